#!/usr/bin/env bash
# asan-suite.sh VENV [PYTEST_ARGS...]: the Python suite against a build of striate with ASan and UBSan.
#
# ASAN_TESTS names the tests to run, all that make sense here by default.
#
# The instrumented build lies in a folder of its own, in front of the installed wheel. Leaks are left out: CPython and
# torch keep memory for the life of the process; the engine's C tests look for leaks.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
shift

site=build/asan-site
if [[ ! -e $site/stamp || -n $(find pyproject.toml CMakeLists.txt src native -newer "$site/stamp" -type f ! -name '*.so' ! -name '*.pyc' -print -quit) ]]; then
	rm -rf "$site" build/asan-wheel
	"$venv/bin/python" -m pip --disable-pip-version-check -qq wheel --no-deps --wheel-dir build/asan-wheel \
		--config-settings=build-dir=build/asan-module --config-settings=cmake.define.STRIATE_SANITIZE=address \
		--config-settings=cmake.build-type=RelWithDebInfo --config-settings=install.strip=false .
	"$venv/bin/python" -m pip --disable-pip-version-check -qq install --no-deps --target "$site" build/asan-wheel/*.whl
	touch "$site/stamp"
fi
# Not grep -q: it would leave nm with a broken pipe, and the pipeline with its status.
if ! nm -D "$site"/striate/_engine*.so | grep __asan_init >/dev/null; then
	echo "the build in $site is not instrumented" >&2
	exit 1
fi

# libstdc++ beside it: otherwise ASan finds no real __cxa_throw to wrap before torch loads the library.
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so)" \
ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allocator_may_return_null=1 \
UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
PYTHONPATH=$PWD/$site PYTHONMALLOC=malloc \
	"$venv/bin/python" -m pytest --timeout 900 "$@" ${ASAN_TESTS:-tests --ignore tests/scale --ignore tests/benchmarks}
