#!/usr/bin/env bash
# as-user.sh COMMAND ARGS...: runs a command in this checkout as an ordinary user with the default limits.
#
# Root becomes "nobody". Where nobody may not enter a folder above the checkout
# (a clone in /root), the checkout is mounted under /tmp in a mount namespace of
# this command's own: virtual environments work from any path.
set -euo pipefail
cd "$(dirname "$0")/.."

if ((EUID != 0)); then
	exec "$@"
fi

home=$(mktemp -d /tmp/striate-user.XXXXXX)
trap 'rm -rf "$home"' EXIT
mkdir "$home/checkout" "$home/tmp"
chown nobody "$home" "$home/tmp"
drop=(setpriv --reuid nobody --regid nogroup --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs)
environment=(env "HOME=$home" "TMPDIR=$home/tmp" "HYPOTHESIS_STORAGE_DIRECTORY=$home/hypothesis"
	PYTHONDONTWRITEBYTECODE=1)

if "${drop[@]}" test -r . -a -r "$PWD/Makefile"; then
	"${drop[@]}" "${environment[@]}" "$@"
else
	echo "nobody cannot enter $PWD: mounted at $home/checkout for this command"
	unshare --mount --propagation private bash -euo pipefail -c '
		mount --bind "$1" "$2"
		cd "$2"
		shift 2
		"$@"' as-user "$PWD" "$home/checkout" "${drop[@]}" "${environment[@]}" "$@"
fi
