# make quickstart: install and tune a small network end to end.   make test: install and run every check.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Nothing is compiled that is never imported; what is, Python compiles at its first import, and keeps.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

.PHONY: quickstart test lint unit format docs clean help

help: ## Show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 20

quickstart: $(VENV)/.quickstart ## Install, tune a small network on digits, print what was found and what it cost
	$(BIN)/python examples/quickstart.py

test: lint unit ## Install what tests need, lint, and run all tests

lint: $(VENV)/.dev ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit: $(VENV)/.dev ## All tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

format: $(VENV)/.dev ## Format the code
	$(BIN)/ruff check --fix src tests examples benchmarks
	$(BIN)/ruff format src tests examples benchmarks

docs: $(VENV)/.docs ## Build the documentation into site/; fails on a broken page or reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench-zeus: $(VENV)/.bench ## Recurring jobs replayed from the Zeus traces (PENSTOCK_DATA names their folder)
	$(BIN)/python -m benchmarks.papers.zeus.replay

bench-hyperpower: $(VENV)/.bench ## Predictors and searches under limits (PENSTOCK_DATA names the data's folder)
	$(BIN)/python benchmarks/papers/hyperpower/predictors.py --save $(if $(PENSTOCK_DATA),--data $(PENSTOCK_DATA)/ecnas)
	$(if $(PENSTOCK_DATA),$(BIN)/python benchmarks/papers/hyperpower/divergence.py --save --data $(PENSTOCK_DATA)/taskset)
	$(BIN)/python benchmarks/papers/hyperpower/suggest.py --save
	$(BIN)/python benchmarks/papers/hyperpower/fixed_time.py --save
	$(BIN)/python benchmarks/papers/hyperpower/search.py --seeds 10 --peers --save

bench-loop: $(VENV)/.bench ## The training loop against one by hand, the loader against DataLoader
	$(BIN)/python -m benchmarks.loop

bench-sm2: $(VENV)/.bench ## SM2's three scenarios and its learning rates against a full grid
	$(BIN)/python -m benchmarks.papers.sm2.scenarios --wide --exhaustive
	$(BIN)/python -m benchmarks.papers.sm2.lr_cases
	$(BIN)/python -m benchmarks.papers.sm2.lr_cases --fresh

bench-%: $(VENV)/.bench ## Run one benchmark, e.g. bench-throughput; results land in benchmarks/results
	$(BIN)/python benchmarks/$*.py

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

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) -e '.[bench]'
	@touch $@

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis
