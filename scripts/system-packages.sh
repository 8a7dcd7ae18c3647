#!/usr/bin/env bash
# Installs the packages of system-packages.txt that are missing: as root. Otherwise names them and stops.
set -euo pipefail
list=$(dirname "$0")/system-packages.txt

if ! command -v dpkg-query >/dev/null; then
	echo "This is not Debian or Ubuntu. Install the equivalents of these packages, then go on with" >&2
	echo "  mkdir -p build/stamps && touch build/stamps/system" >&2
	grep -v '^#' "$list" | sed 's/^/    /' >&2
	exit 1
fi

missing=()
while read -r package; do
	[[ -z $package || $package == \#* ]] && continue
	state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
	[[ $state == installed ]] || missing+=("$package")
done <"$list"

if ((${#missing[@]} == 0)); then
	echo "all installed"
	exit 0
fi
if ((EUID != 0)); then
	echo "Packages are missing, and only root can install them. Run this, then make again:" >&2
	echo "  sudo apt-get update && sudo apt-get install --no-install-recommends ${missing[*]}" >&2
	exit 1
fi
echo "installing: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null
