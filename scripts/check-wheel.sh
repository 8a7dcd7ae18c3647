#!/usr/bin/env bash
# check-wheel.sh VENV WHEEL: the wheel needs no shared library but the C library's own.
set -euo pipefail
venv=$1 wheel=$2

report=$("$venv/bin/python" -m auditwheel show "$wheel")
echo "$report"
foreign=$(grep -oE 'lib(uring|xxhash|zstd|isal)[^ "]*\.so[^ "]*' <<<"$report" || true)
# Only a wheel whose every library is the platform's own is consistent with a manylinux tag. That tag is also named as
# the best one possible, whatever the wheel needs: only the first sentence counts. It is wrapped anywhere.
if [[ -n $foreign ]] || ! tr -s ' \n' ' ' <<<"$report" |
	grep 'is consistent with the following platform tag: "manylinux_' >/dev/null; then
	echo "the wheel needs libraries that it does not bring along: ${foreign:-see above}" >&2
	exit 1
fi
