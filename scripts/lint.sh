#!/usr/bin/env bash
# lint.sh VENV: style, types and compiler warnings. Goes through all of them, then fails if any did.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/$1/bin
failed=()

check() {
	local name=$1
	shift
	if "$@"; then echo "ok: $name"; else failed+=("$name"); fi
}

mapfile -t c_files < <(find native -name '*.[ch]' | sort)
mapfile -t c_sources < <(find native/src -name '*.c' | sort)
mapfile -t shell_files < <(find scripts .ci -type f \( -name '*.sh' -o -name run \) | sort)

check "ruff check" "$bin/ruff" check .
check "ruff format" "$bin/ruff" format --check .
check "mypy" "$bin/mypy"
check "clang-format" "$bin/clang-format" --dry-run -Werror "${c_files[@]}"
check "compiler warnings" gcc -std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -Werror -fsyntax-only -Inative/include "${c_sources[@]}"
for file in "${shell_files[@]}"; do check "bash -n $file" bash -n "$file"; done

if ((${#failed[@]})); then
	printf 'failed: %s\n' "${failed[@]}" >&2
	exit 1
fi
