# Everything a newcomer and CI need. Each target sets up what it uses.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
LOG_PATH ?= runs/quickstart
TRL := .venv-trl
VLLM := .venv-vllm
CLIENTS := .venv-clients
HARNESSES := .venv-harnesses
ENVIRONMENTS := .venv-environments
# The folder with the script of the hand-written loop.
BENCH ?= ../shared/bench
TESTERS ?= 2
MINUTES ?= 30
REQUESTS ?= 10000
CROWD ?= 1
SEED ?= 0
# How often a test that fails is run again; the closing lines name it.
RERUNS ?= 0
DIST := worksteal
PYTEST = $(BIN)/pytest --numprocesses $(TESTERS) --dist $(DIST) --reruns $(RERUNS) -rfER
WITH_VLLM := HEARTH_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python

# Tests and the processes that they start keep their bytecode: compiling it anew costs half of make test-fast's start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-wheel test-fast test-scale test-vllm test-clients test-environments chaos mutants check check-viewer viewer docs bench format clean

demo: $(VENV)/.runtime  ## Train the shipped model with GRPO and show it before and after.
	$(BIN)/hearth quickstart --log-path $(LOG_PATH)
	@echo "before the commands above, in this shell: source $(VENV)/bin/activate"

test: $(VENV)/.dev  ## Run all tests that this machine can run; TESTERS at a time.
	$(PYTEST) --ignore=tests/scale

test-fast: $(VENV)/.dev  ## Run the unit tests that are not marked slow.
	$(PYTEST) tests/unit -m "not slow"

# VERSIONS=newest or VERSIONS=lowest runs one of the two.
test-wheel: $(VENV)/.dev  ## Install the built wheel elsewhere, with the lowest and with the newest versions, and use it.
	$(BIN)/python tools/test_wheel.py --versions $(or $(VERSIONS),both)

test-scale: $(VENV)/.dev $(VLLM)/.installed  ## Run the tests of several ranks and machines, on this one.
	$(WITH_VLLM) $(PYTEST) tests/scale

# The tests of a file share servers.
test-vllm: DIST := loadfile
test-vllm: $(VENV)/.dev $(VLLM)/.installed  ## Run the tests that need vLLM, on its build for CPUs.
	$(WITH_VLLM) $(PYTEST) tests/vllm

# VERSIONS="tinker 0.38" and RECIPES="math_rl" run those whose name has that text.
test-clients: $(VENV)/.dev $(CLIENTS)/.installed $(HARNESSES)/.installed  ## Call versions of the official clients, and run tinker-cookbook's recipes.
	$(BIN)/python -m tests.clients.versions --only "$(VERSIONS)"
	$(BIN)/python -m tests.clients.cookbook --python $(CLIENTS)/bin/python --only "$(RECIPES)"
	HEARTH_HARNESSES=$(CURDIR)/$(HARNESSES)/bin $(BIN)/pytest tests/clients/test_harnesses.py

# Each library lies beside the tests' environment, in versions of its own.
test-environments: $(VENV)/.dev $(ENVIRONMENTS)/.installed  ## Train on environments of verifiers and of OpenEnv.
	for name in verifiers openenv; do \
		PYTHONPATH=$(CURDIR)/$(ENVIRONMENTS)/$$name $(BIN)/pytest tests/environments/test_$$name.py || exit 1; done

# A failed trial names the command that repeats it. --soak and --only: tests/chaos/campaign.py.
chaos: $(VENV)/.dev  ## Disturb runs for MINUTES, then send a CROWD and REQUESTS odd requests.
	$(BIN)/python -m tests.chaos.campaign --minutes $(MINUTES) --seed $(SEED)
	$(BIN)/python -m tests.chaos.load --scale $(CROWD)
	$(BIN)/python -m tests.chaos.fuzz --requests $(REQUESTS) --seed $(SEED)

# MUTANTS="hearth.losses.clipped*" tries a part again; mutmut show and mutmut tests-for-mutant explain one.
mutants: $(VENV)/.dev  ## Break the arithmetic in thousands of small ways, one at a time, and list what no test notices.
	OMP_NUM_THREADS=1 $(BIN)/mutmut run --max-children $(TESTERS) $(foreach name,$(MUTANTS),'$(name)')
	$(BIN)/mutmut results
	$(BIN)/mutmut export-cicd-stats

viewer: viewer/node_modules/.installed  ## Build the page of hearth view into the package.
	npm --prefix viewer run --silent types
	cd viewer && node build.mjs

# The page is built from its source once more and compared with the files of the package.
check-viewer:
	@if command -v npm >/dev/null; then \
		$(MAKE) --no-print-directory viewer/node_modules/.installed && npm --prefix viewer run --silent types \
		&& (cd viewer && node build.mjs ../build/viewer) && diff -rq build/viewer src/hearth/viewer/assets \
		|| { echo "src/hearth/viewer/assets must be built from viewer/: run make viewer"; exit 1; }; \
	else echo "node and npm are not here: src/hearth/viewer/assets was not compared with viewer/"; fi

viewer/node_modules/.installed: viewer/package-lock.json
	npm --prefix viewer ci --ignore-scripts --no-audit --no-fund --silent
	touch $@

check: $(VENV)/.dev check-viewer  ## Lint, format, types, layers, spelling, known weaknesses of what is pinned, the built page.
	$(BIN)/ruff check src tests tools benchmarks
	$(BIN)/ruff format --check src tests tools benchmarks
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/codespell src tests tools benchmarks docs viewer/src *.md
	@found=$$($(BIN)/pip-audit -r constraints.txt --no-deps --disable-pip --progress-spinner off 2>&1) || { echo "$$found"; exit 1; }

docs: $(VENV)/.docs  ## Build the documentation site into build/docs; a broken link or an orphan is an error.
	$(BIN)/python -m sphinx -W --keep-going --quiet -b html docs build/docs

format: $(VENV)/.dev  ## Rewrite the files as ruff wants them.
	$(BIN)/ruff check --fix src tests tools benchmarks
	$(BIN)/ruff format src tests tools benchmarks

bench: $(VENV)/.dev $(TRL)/.installed  ## Compare one GRPO step with TRL's and a hand-written loop's.
	$(BIN)/python benchmarks/compare.py --bench $(BENCH) --trl-python $(TRL)/bin/python

# tinker-cookbook comes last and alone: it asks for a version of a package that cannot be had.
$(CLIENTS)/.installed: tests/clients/requirements.txt constraints.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip --disable-pip-version-check --quiet install -c constraints.txt torch
	$(CLIENTS)/bin/pip --disable-pip-version-check --quiet install -r tests/clients/requirements.txt
	$(CLIENTS)/bin/pip --disable-pip-version-check --quiet install --no-deps tinker-cookbook==0.6.1
	touch $@

$(ENVIRONMENTS)/.installed: tests/environments/verifiers.txt tests/environments/openenv.txt $(VENV)/.dev
	for name in verifiers openenv; do \
		$(PIP) install --no-deps --target $(ENVIRONMENTS)/$$name -r tests/environments/$$name.txt || exit 1; done
	touch $@

# What they want of libraries differs from ours.
$(HARNESSES)/.installed: tests/clients/harnesses.txt constraints.txt
	$(PYTHON) -m venv $(HARNESSES)
	$(HARNESSES)/bin/pip --disable-pip-version-check --quiet install -c constraints.txt torch
	$(HARNESSES)/bin/pip --disable-pip-version-check --quiet install -r tests/clients/harnesses.txt
	touch $@

clean:  ## Remove what the other targets made, runs excepted.
	rm -rf $(VENV) $(TRL) $(VLLM) $(CLIENTS) $(HARNESSES) $(ENVIRONMENTS) viewer/node_modules mutants build src/*.egg-info .pytest_cache .ruff_cache .hypothesis

# torch comes first and pinned: with it in place nothing pulls another build of it.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Hearth needs Python 3.11 or newer: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	touch $@

$(VENV)/.runtime: $(VENV)/.torch pyproject.toml
	$(PIP) install -c constraints.txt -e '.[plot]'
	touch $@

# All extras at once: to choose versions takes as long for one of them.
$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) install -c constraints.txt -e '.[plot,docs,dev]'
	touch $(VENV)/.runtime $(VENV)/.docs $@

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(PIP) install -c constraints.txt -e '.[docs]'
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
