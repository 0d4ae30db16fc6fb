# make quickstart: install and tune a small network end to end.   make test: install and run every check.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Nothing is compiled that is never imported; what is, Python compiles at its first import, and keeps.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

# What test-minimum runs.
MINIMUM := tests/core tests/space tests/goal tests/predict tests/sample/test_simple.py tests/sample/test_optuna.py \
  tests/store/test_sqlite.py tests/cli/test_cli.py tests/train/test_run.py tests/energy/test_meter.py tests/energy/test_nvml.py

.PHONY: quickstart test lint unit format docs clean help bench results release-check test-minimum

help: ## Show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 20

quickstart: $(VENV)/.quickstart ## Install, tune a small network on digits, print what was found and what it cost
	$(BIN)/python examples/quickstart.py

# Both at once: each leaves a core idle now and then. Either one's failure fails the target.
test: $(VENV)/.dev ## Install what tests need, lint, and run all tests
	@$(MAKE) --no-print-directory -j 2 lint unit

lint: $(VENV)/.dev ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check src tests examples benchmarks tools
	$(BIN)/ruff format --check src tests examples benchmarks tools
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit: $(VENV)/.dev ## All tests
	$(BIN)/python -m pytest -n 3 --dist loadscope

format: $(VENV)/.dev ## Format the code
	$(BIN)/ruff check --fix src tests examples benchmarks tools
	$(BIN)/ruff format src tests examples benchmarks tools

docs: $(VENV)/.docs ## Build the documentation into site/VERSION; fails on a broken page or reference
	$(BIN)/python tools/site.py

release-check: $(VENV)/.dev ## Build sdist and wheel, install the wheel into a clean environment, run the quickstart from it
	$(BIN)/python tools/release.py

test-minimum: ## Run the core's tests with the oldest versions that pyproject.toml admits
	$(PYTHON) -m venv .venv-minimum
	.venv-minimum/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints-minimum.txt torch
	.venv-minimum/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints-minimum.txt \
	  -e '.[examples,postgres]' pytest pytest-xdist hypothesis
	.venv-minimum/bin/python -m pytest -q $(MINIMUM)

bench: $(VENV)/.bench ## Run every benchmark of benchmarks/all.py, some ten hours, and make the pages of results; broken off, it goes on. QUICK=1: none of more than half an hour; AGAIN=1: also what this source has made
	$(BIN)/python -m benchmarks.all $(if $(QUICK),--quick) $(if $(AGAIN),--again)

bench-rehearsal: $(VENV)/.bench ## Every benchmark at a tiny size, in some twenty minutes; keeps no results (PENSTOCK_DATA names the data's folder)
	$(BIN)/python -m benchmarks.all --rehearse

results: $(VENV)/.dev ## Make docs/results.md and the tables of README.md and docs/flagship.md from benchmarks/results
	$(BIN)/python -m benchmarks.report

bench-%: $(VENV)/.bench ## Run one benchmark of benchmarks/all.py, e.g. bench-throughput, or all of a paper, e.g. bench-hydro (PENSTOCK_DATA names the data's folder)
	$(BIN)/python -m benchmarks.all --only $*

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Penstock needs Python 3.11 or newer; run: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first: whatever comes after must be content with the build that is there.
$(VENV)/.torch: $(VENV)/bin/python constraints.txt
	$(PIP) torch
	@touch $@

$(VENV)/.quickstart: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[examples]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[docs]'
	@touch $@

# Compiled here: contenders that start many processes would do it within what is measured.
$(VENV)/.bench: $(VENV)/.dev
	$(PIP) -e '.[bench]'
	@$(BIN)/python -m compileall -q -j 2 $(VENV)/lib >/dev/null 2>&1 || true
	@touch $@

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .venv-minimum site dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
