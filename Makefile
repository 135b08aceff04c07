# Everything a newcomer and CI need. Each target sets up what it uses.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
LOG_PATH ?= runs/quickstart
TRL := .venv-trl
VLLM := .venv-vllm
# The folder with the other systems' scripts.
BENCH ?= ../shared/bench
TESTERS ?= 2
DIST := worksteal
PYTEST = $(BIN)/pytest --numprocesses $(TESTERS) --dist $(DIST)
WITH_VLLM := HEARTH_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python

# Tests and the processes that they start keep their bytecode: compiling it anew costs half of make test-fast's start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast test-scale test-vllm check bench format clean

demo: $(VENV)/.runtime  ## Train the shipped model with GRPO and show it before and after.
	$(BIN)/hearth quickstart --log-path $(LOG_PATH)

test: $(VENV)/.dev  ## Run all tests that this machine can run; TESTERS at a time.
	$(PYTEST) --ignore=tests/scale

test-fast: $(VENV)/.dev  ## Run the unit tests that are not marked slow.
	$(PYTEST) tests/unit -m "not slow"

test-scale: $(VENV)/.dev $(VLLM)/.installed  ## Run the tests of several ranks and machines, on this one.
	$(WITH_VLLM) $(PYTEST) tests/scale

# The tests of a file share servers.
test-vllm: DIST := loadfile
test-vllm: $(VENV)/.dev $(VLLM)/.installed  ## Run the tests that need vLLM, on its build for CPUs.
	$(WITH_VLLM) $(PYTEST) tests/vllm

check: $(VENV)/.dev  ## Lint, format, types, layers, spelling.
	$(BIN)/ruff check src tests tools benchmarks
	$(BIN)/ruff format --check src tests tools benchmarks
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/codespell src tests tools benchmarks docs *.md

format: $(VENV)/.dev  ## Rewrite the files as ruff wants them.
	$(BIN)/ruff check --fix src tests tools benchmarks
	$(BIN)/ruff format src tests tools benchmarks

bench: $(VENV)/.dev $(TRL)/.installed  ## Compare one GRPO step with TRL's and a hand-written loop's.
	$(BIN)/python benchmarks/compare.py --bench $(BENCH) --trl-python $(TRL)/bin/python

clean:  ## Remove what the other targets made, runs excepted.
	rm -rf $(VENV) $(TRL) $(VLLM) build src/*.egg-info .pytest_cache .ruff_cache .hypothesis

# torch comes first and pinned: with it in place nothing pulls another build of it.
$(VENV)/.runtime: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Hearth needs Python 3.11 or newer: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch $@

# In an environment of its own, so that what TRL wants changes nothing of ours.
$(TRL)/.installed: benchmarks/trl.txt constraints.txt
	$(PYTHON) -m venv $(TRL)
	$(TRL)/bin/pip --disable-pip-version-check --quiet install -c constraints.txt torch
	$(TRL)/bin/pip --disable-pip-version-check --quiet install -c constraints.txt -r benchmarks/trl.txt
	touch $@

# Of its own as well. What vLLM imports of these three where they are there needs libraries of theirs.
$(VLLM)/.installed: tests/vllm/requirements.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip --disable-pip-version-check --quiet install -r tests/vllm/requirements.txt
	$(VLLM)/bin/pip --disable-pip-version-check --quiet uninstall -y torchvision torchaudio torchcodec
	touch $@
