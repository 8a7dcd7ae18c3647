#!/usr/bin/env bash
# native.sh PRESET: builds the engine and its C tests with a CMake preset (asan, tsan, release) and runs them.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1

# ThreadSanitizer of GCC before 14 cannot place its shadow where the kernel
# randomises more than 28 bits of mmap addresses: switch that off for the run.
run=()
[[ $preset == tsan ]] && run=(setarch "$(uname -m)" --addr-no-randomize)

cmake --preset "$preset" >/dev/null
cmake --build --preset "$preset" --parallel 2
"${run[@]}" ctest --preset "$preset" --output-on-failure
