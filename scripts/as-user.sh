#!/usr/bin/env bash
# as-user.sh COMMAND ARGS...: runs a command in this checkout as an ordinary user with the default limits.
#
# Root becomes "nobody". Where nobody may not enter the checkout or a folder above it (a clone in /root), what is in it
# is mounted under /tmp in a mount namespace of this command's own: virtual environments work from any path.
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

if "${drop[@]}" test -r . -a -x . -a -r "$PWD/Makefile" 2>/dev/null; then
	"${drop[@]}" "${environment[@]}" "$@"
else
	# Entry by entry: the checkout's own folder may be closed too.
	echo "nobody cannot enter $PWD: its entries are mounted in $home/checkout for this command"
	unshare --mount --propagation private bash -euo pipefail -c '
		shopt -s dotglob
		checkout=$1
		for entry in "$2"/*; do
			at=$checkout/${entry##*/}
			if [[ -d $entry ]]; then mkdir "$at"; else : >"$at"; fi
			mount --bind "$entry" "$at"
		done
		cd "$checkout"
		shift 2
		"$@"' as-user "$home/checkout" "$PWD" "${drop[@]}" "${environment[@]}" "$@"
fi
