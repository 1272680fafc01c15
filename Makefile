# The two commands a newcomer needs are `make quickstart` and `make test`; `make help` lists the rest.
.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-slow check format build clean

BIN := .venv/bin
# Processes that share the tests. Each runs one thread: on few cores that beats one process with many.
JOBS ?= 2
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -q -n $(JOBS) --dist loadgroup

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make .venv with everything that development needs
	@bash scripts/setup.sh dev

quickstart:  ## set up, then train, adapt and fine-tune a small GLM-5 (10 minutes on two cores; QUICK=1: a smoke run)
	@bash scripts/setup.sh run
	@$(BIN)/yunque quickstart $(if $(filter-out 0,$(QUICK)),--quick)

test: setup  ## run the tests
	@$(PYTEST) -m "not slow" $(ARGS)

test-slow: setup  ## run the tests that take long
	@$(PYTEST) -m slow $(ARGS)

check: setup  ## lint, format check, type check
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

format: setup  ## format the code and fix what the linter can fix
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

build: setup  ## build the wheel and the source archive into dist/
	@$(BIN)/python -m build --no-isolation --outdir dist

clean:  ## remove build products and caches (runs and .venv stay)
	@rm -rf dist .pytest_cache .ruff_cache .hypothesis
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
