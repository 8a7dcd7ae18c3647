#!/usr/bin/env bash
# bench.sh VENV SIZE: the benchmarks, one after the other.
#   smoke  the smallest run of each: shows that they work, its figures mean nothing
#   full   what the README's tables are made with: 2 GiB, 9 rounds; a throttled drive too, as root
#   2G     as full, with that many bytes
# Results as JSON go to build/bench-results/.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1/bin/python size=$2
results=build/bench-results
mkdir -p "$results"

case $size in
smoke)
	"$python" benchmarks/save_load.py --smoke --json "$results/save_load-smoke.json"
	"$python" benchmarks/many_small.py --smoke --json "$results/many_small-smoke.json"
	exit
	;;
full) size=2G ;;
esac
"$python" benchmarks/save_load.py --size "$size" --json "$results/save_load.json"
if ((EUID == 0)); then
	"$python" benchmarks/save_load.py --size "$size" --throttle 400 --json "$results/save_load-throttled.json"
else
	echo "left out: the throttled drive, which needs root"
fi
"$python" benchmarks/many_small.py --json "$results/many_small.json"
