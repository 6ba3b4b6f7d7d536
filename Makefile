# One entrance for people and for continuous integration. Every target that needs the environment makes it
# first: a fresh machine needs make, a C compiler and Python 3.11 or 3.12 with its venv module, no more.
#
#   make demo                          the main job, end to end
#   make test ARGS="-k frame -x"       ARGS go to the command behind demo, bench, gpu, torture, mutants and all tests
#   make env PYTHON=/opt/python3.12    which Python a new environment is made from
#   make mutants ARGS="--only ID"      whether the tests find that bug; all of them without ARGS (tests/mutants)
#   make gpu STAGE=ttft                one step of the list for a GPU; all but vLLM's without STAGE
#   make gpu PYTHON=python3            with that Python as it is, where no environment can be made
#
# On a machine without a GPU the CPU build of torch saves several gigabytes:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make env

.DEFAULT_GOAL := help
SHELL := /bin/sh

VENV   := .venv
ENGINES := .venv-engines
EXTRAS := server,hf,dev
PYTHON ?=
ARGS   ?=
SHARE  ?=
IMAGE  ?=
IMAGE_EXTRAS ?=
BUILDER ?=
STAGE  ?=

# Tests share the cores, one worker for each; those that look at a clock run by themselves behind them. A test that hangs is
# ended and named after this time. tests/kinds.py says which file is of which kind.
TEST_LIMIT_SECONDS := 600
# Tests start hundreds of processes: where the environment forbids it to be kept, each would compile the product anew.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(VENV)/bin/python -m pytest -rs --timeout $(TEST_LIMIT_SECONDS)
# One more than there are cores: some tests wait for another process.
TOGETHER := -n $$(($$(nproc) + 1)) --dist loadfile

# Engines run in an environment of their own: they name versions of torch and of much else.
ENGINE_TESTS := tests/engines
ENGINE_LIMIT_SECONDS := 1200
ENGINE_STAMP := $(ENGINES)/.installed-$(shell cat pyproject.toml engines.txt engines-alone.txt | cksum | tr ' ' '-')

# What computes rather than talks: kernels in Triton's interpreter and in its compiler, codecs on a model, adapters.
KERNEL_TESTS := tests/kernels tests/adapters tests/demo \
    tests/bench/test_benches.py tests/bench/test_gpu_list.py

# An installed environment carries the checksum of the two files it was made from in its stamp's name, so that
# a change of their content makes it stale and a mere checkout does not.
STAMP := $(VENV)/.installed-$(shell (cat pyproject.toml constraints.txt; grep '^__version__' kvstore/__init__.py) | cksum | tr ' ' '-')

# Some machines have launchers on the path that fail when run, and some Pythons lack venv: only running tells.
SUPPORTED := import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))

.PHONY: help env engines demo test test-pure test-all test-kernels test-drawn test-rest test-slow test-engines browser check bench gpu torture mutants promtool image dist roles release matrix clean

help:
	@echo 'make demo    run the main job on an embedded store with a real engine and real text'
	@echo 'make test    the tests that everybody runs, on all cores, in some minutes; skips are listed'
	@echo 'make test-pure     those of them that only compute: a minute'
	@echo 'make test-all      every test but those in an engine: also the long ones, which draw histories and damage at random'
	@echo '                   (in four parts: test-pure, test-kernels, test-drawn, test-rest)'
	@echo 'make test-slow     what make test leaves out; SHARE=3/8 the third of eight shares of it'
	@echo 'make test-engines  the adapters in a real vLLM, and in a real SGLang, on a CPU, in $(ENGINES) (3.7 GB),'
	@echo '                   without the slow tests; SHARE=3/40 with the third of forty shares of these'
	@echo 'make matrix        the adapters on the newest vLLM, SGLang and transformers: what broke, and README'"'"'s table of engines;'
	@echo '                   ARGS="--served --slow --prompts 200" all of these tests on every release that is served: hours'
	@echo 'make browser the console'"'"'s pages in chromium (apt-get install --no-install-recommends chromium fonts-dejavu-core)'
	@echo 'make check   run the linter, the formatter (reporting only) and the type checker'
	@echo 'make bench   run every benchmark that needs no GPU against its physical limit'
	@echo 'make gpu     test and measure on a GPU, at most 8 minutes; results in benchmarks/results (benchmarks/gpu.py)'
	@echo 'make torture damage, power losses, kills and attacks for as long as ARGS say (tests/torture/)'
	@echo 'make mutants put small bugs into a copy of the tree, one at a time: the tests must find each (tests/mutants/)'
	@echo 'make promtool  fetch promtool of Prometheus into $(VENV), for the tests of its rules and of the dashboard'
	@echo 'make image   build the container image kvstore:VERSION, where podman, buildah or docker is there (deploy/container/build.sh)'
	@echo 'make dist    the source distribution and the wheel, and those of the demo'"'"'s model, in dist/'
	@echo 'make roles   packages and sizes of what engine, host and all install, in new environments'
	@echo 'make release VERSION=0.1.1  set the version, and date its section of the changelog; commits nothing'
	@echo 'make env     make $(VENV), or bring it up to date (each target above does so itself)'
	@echo 'make engines make $(ENGINES), or bring it up to date'
	@echo 'make clean   remove $(VENV) and everything built or cached'
	@echo ''
	@echo 'PYTHON=...   the Python to make $(VENV) from: 3.11 or 3.12; found by itself when not given'
	@echo '             make gpu PYTHON=... makes none: it runs with that Python as it is'
	@echo 'STAGE=...    steps of make gpu alone: tests, kernels, codec, ttft, and with vLLM: vllm-tests, vllm'
	@echo 'ARGS=...     further arguments for demo, bench, gpu, torture, mutants and all tests'

env: $(STAMP)

$(STAMP):
	@if ! $(VENV)/bin/python -c '$(SUPPORTED)' >/dev/null 2>&1; then \
	    chosen=; \
	    for candidate in $(or $(PYTHON),python3.12 python3.11 python3); do \
	        if "$$candidate" -c '$(SUPPORTED)' >/dev/null 2>&1; then chosen="$$candidate"; break; fi; \
	    done; \
	    if [ -z "$$chosen" ]; then \
	        echo 'error: found no working Python 3.11 or 3.12 with the venv module (tried: $(or $(PYTHON),python3.12 python3.11 python3)); install one (on Debian also python3-venv), or name it: make env PYTHON=/path/to/python3.12' >&2; \
	        exit 1; \
	    fi; \
	    echo "making $(VENV) with $$chosen"; \
	    rm -rf $(VENV) && "$$chosen" -m venv $(VENV) || exit 1; \
	fi
	$(VENV)/bin/python -m pip --disable-pip-version-check install -c constraints.txt -e ".[$(EXTRAS)]"
	@rm -f $(VENV)/.installed-* && touch $@

engines: $(ENGINE_STAMP)

# The packages of pictures and sound that vLLM asks for are builds for another kind of machine: torch does not load them.
$(ENGINE_STAMP): $(STAMP)
	rm -rf $(ENGINES) && $(VENV)/bin/python -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip --disable-pip-version-check install -r engines.txt
	$(ENGINES)/bin/python -m pip --disable-pip-version-check install --no-deps -r engines-alone.txt
	$(ENGINES)/bin/python -m pip --disable-pip-version-check uninstall -y torchvision torchaudio torchcodec
	$(ENGINES)/bin/python -m pip --disable-pip-version-check install --no-deps -e .
	@touch $@

demo: $(STAMP)
	$(VENV)/bin/kvstore demo $(ARGS)

test: $(STAMP)
	$(PYTEST) $(TOGETHER) -m 'not slow and not alone' --ignore=$(ENGINE_TESTS) $(ARGS)
	$(PYTEST) -m 'alone and not slow' --ignore=$(ENGINE_TESTS) $(ARGS)

test-all: $(STAMP)
	$(PYTEST) $(TOGETHER) -m 'not alone' --ignore=$(ENGINE_TESTS) $(ARGS)
	$(PYTEST) -m alone --ignore=$(ENGINE_TESTS) $(ARGS)

# The same in four parts, of which no two have a test in common.
test-pure: $(STAMP)
	$(PYTEST) $(TOGETHER) -m pure $(ARGS)

test-kernels: $(STAMP)
	$(PYTEST) $(TOGETHER) -m process $(KERNEL_TESTS) $(ARGS)

test-drawn: $(STAMP)
	$(PYTEST) $(TOGETHER) -m drawn --ignore=$(ENGINE_TESTS) $(ARGS)

test-rest: $(STAMP)
	$(PYTEST) $(TOGETHER) -m 'process and not alone' $(addprefix --ignore=,$(KERNEL_TESTS) $(ENGINE_TESTS)) $(ARGS)
	$(PYTEST) -m alone --ignore=$(ENGINE_TESTS) $(ARGS)

# What `make test` leaves out; with SHARE=K/N the Kth of N shares of it, which may have none that looks at a clock (5).
test-slow: $(STAMP)
	$(PYTEST) $(TOGETHER) -m 'slow and not alone' --ignore=$(ENGINE_TESTS) $(if $(SHARE),--share $(SHARE)) $(ARGS)
	$(PYTEST) -m 'slow and alone' --ignore=$(ENGINE_TESTS) $(if $(SHARE),--share $(SHARE)) $(ARGS) || [ $$? -eq 5 ]

test-engines: $(STAMP) $(ENGINE_STAMP)
	$(ENGINES)/bin/python -m pytest -rs -p no:cacheprovider -n 2 --dist loadfile --timeout $(ENGINE_LIMIT_SECONDS) $(if $(SHARE),--share $(SHARE),-m 'not slow') $(ENGINE_TESTS) $(ARGS)

browser: $(STAMP)
	$(PYTEST) tests/console/test_browser.py tests/console/test_states.py tests/console/test_cost.py $(ARGS)

# PYTHONPATH of each run has the release that is tried; see the script.
matrix: $(STAMP) $(ENGINE_STAMP)
	$(VENV)/bin/python -P tests/engine_matrix.py $(ARGS)

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(STAMP)
	$(VENV)/bin/python benchmarks/benches.py all $(ARGS)

gpu: $(if $(PYTHON),,$(STAMP))
	@$(or $(PYTHON),$(VENV)/bin/python) benchmarks/gpu.py $(foreach stage,$(STAGE),--stage $(stage)) $(ARGS)

torture: $(STAMP)
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests:$(CURDIR)/benchmarks $(VENV)/bin/python -m torture $(ARGS)

# For tests of deploy/prometheus, which skip without it. Debian's package, on a machine that has apt; KVSTORE_PROMTOOL names
# another one, and PATH is searched as well.
promtool: $(VENV)/bin/promtool

$(VENV)/bin/promtool: | $(STAMP)
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && cd "$$folder" && \
	    apt-get -q download prometheus && dpkg-deb -x prometheus_*.deb . && cd - >/dev/null && \
	    cp "$$folder/usr/bin/promtool" $@ && $@ --version

# PYTHON, BUILDER and EXTRAS as the script says them.
image:
	@BUILDER='$(BUILDER)' EXTRAS='$(IMAGE_EXTRAS)' PYTHON='$(PYTHON)' sh deploy/container/build.sh $(IMAGE)

# The source distribution, the wheel made of it, and both of the demo's model, in dist/.
dist: $(STAMP)
	rm -rf dist && for one in . ./demo-model; do $(VENV)/bin/python -P tests/release.py build "$$one" dist || exit 1; done

# What each role installs, in new environments: packages and MiB.
roles: $(STAMP)
	$(VENV)/bin/python -P tests/release.py roles $(ARGS)

# Sets the version and dates the changelog's section; the rest is the reader's: see, commit, tag.
release:
	@python3 -P tests/release.py version '$(VERSION)'

mutants: $(STAMP)
	PYTHONPATH=tests $(VENV)/bin/python -m mutants $(ARGS)

clean:
	rm -rf $(VENV) $(ENGINES) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find kvstore tiering engine_adapter kernels tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
