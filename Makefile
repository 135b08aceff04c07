# Everything a newcomer and CI need. Each target sets up what it uses.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
LOG_PATH ?= runs/quickstart

.PHONY: demo test check format clean

demo: $(VENV)/.runtime  ## Train the shipped model with GRPO and show it before and after.
	$(BIN)/hearth quickstart --log-path $(LOG_PATH)

test: $(VENV)/.dev  ## Run all tests that this machine can run.
	$(BIN)/pytest

check: $(VENV)/.dev  ## Lint, format, types, layers, spelling.
	$(BIN)/ruff check src tests tools benchmarks
	$(BIN)/ruff format --check src tests tools benchmarks
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/codespell src tests tools benchmarks docs *.md

format: $(VENV)/.dev  ## Rewrite the files as ruff wants them.
	$(BIN)/ruff check --fix src tests tools benchmarks
	$(BIN)/ruff format src tests tools benchmarks

clean:  ## Remove what the other targets made, runs excepted.
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .ruff_cache .hypothesis

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
