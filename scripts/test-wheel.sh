#!/usr/bin/env bash
# test-wheel.sh VENV PYTHON TORCH [PYTEST_ARGS...]: the wheel in an environment that holds nothing else of ours,
# with no compiler or build tool in PATH, tested from a folder without sources.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 python=$2 torch=$3
shift 3

pip=("$venv/bin/python" -m pip --disable-pip-version-check -qq)
if [[ ! -e $venv/stamp || requirements/test.txt -nt $venv/stamp ]]; then
	"$python" -m venv --clear "$venv"
	"${pip[@]}" install "torch==$torch" -r requirements/test.txt
	touch "$venv/stamp"
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/bin"
for program in /usr/sbin/* /usr/bin/*; do
	case ${program##*/} in
	*cc | *cc-[0-9]* | *c++* | *g++* | *gcc* | *clang* | *cpp | *cpp-[0-9]* | as | ld | ld.* | *-as | *-ld | *-ld.* | \
		cmake | ninja | make | cython* | c[89]9*) ;;
	*) ln -sf "$program" "$scratch/bin/" ;;
	esac
done
export PATH=$PWD/$venv/bin:$scratch/bin
for tool in cc gcc c++ g++ clang ld as cmake ninja make; do
	if command -v "$tool"; then
		echo "$tool is still in PATH" >&2
		exit 1
	fi
done

"${pip[@]}" install --force-reinstall --no-deps build/wheel/*.whl
"${pip[@]}" install build/wheel/*.whl
cp -r tests docs pyproject.toml "$scratch/"
cd "$scratch"
python -m pytest -p no:cacheprovider "$@" tests/unit tests/engine tests/format tests/frontends
