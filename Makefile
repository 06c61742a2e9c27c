# `make` alone lists the targets. PYTHON is the interpreter that the environment is made with.
PYTHON ?= python3
JOBS ?= 2
RANKS ?= 4
ARGS ?=

BIN := .venv/bin
# Environments with other versions than those of constraints.txt.
LATEST ?= .venv-latest
MATRIX ?= .venv-matrix
ROWS ?=
# What was installed into .venv: for the demo, for the tests as well, for the site.
FOR_DEMO := .venv/.demo
FOR_TESTS := .venv/.installed
FOR_SITE := .venv/.site
INSTALL = $(BIN)/python -m pip install -q -c constraints.txt
# One thread a process: the ranks of a demo or a test share the cores, they do not each own them.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help env latest demo test suite lint slow matrix bench docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-6s %s\n", $$1, $$2}' Makefile

env: $(FOR_DEMO)  ## make .venv with autopar, in the versions of constraints.txt

latest:  ## make .venv-latest with what a newcomer gets: no constraints
	test -x $(LATEST)/bin/python || $(PYTHON) -m venv $(LATEST)
	$(LATEST)/bin/python -m pip install -q --upgrade -e '.[demo]'

demo: $(FOR_DEMO)  ## train a byte-level GPT on four CPU processes (ARGS="--steps 100" to change it)
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train_gpt.py $(ARGS)

test: $(FOR_TESTS)  ## lint, and beside it run the tests that are not slow
	@$(MAKE) --no-print-directory -k -j 2 lint suite

suite: $(FOR_TESTS)  ## run the tests that are not slow
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

lint: $(FOR_TESTS)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy autopar examples

slow: $(FOR_TESTS)  ## run the slow tests too: whole zoo, all recipes, whole tables
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "slow or not slow"

matrix: $(FOR_TESTS)  ## test a part with the oldest, the pinned and the newest torch (ROWS="oldest" for one of them)
	$(BIN)/python -m benchmarks.matrix --environments $(MATRIX) $(ROWS)

bench: $(FOR_TESTS)  ## run the benchmarks, one after the other
	@set -e; for script in $(sort $(wildcard benchmarks/speed/bench_*.py)); do \
		echo "$$script"; $(BIN)/python "$$script"; \
	done

docs: $(FOR_SITE)  ## build the site into build/site, and fail on a broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

clean:  ## remove what was built and cached; the environment and runs/ stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

# torch goes in first and alone: what comes after finds its pin satisfied and fetches no other build.
$(FOR_DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "autopar needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.x"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) torch
	$(INSTALL) -e '.[demo]'
	@touch $@

$(FOR_TESTS): $(FOR_DEMO)
	$(INSTALL) -e '.[dev,zoo,frameworks,torchao]'
	@touch $@

$(FOR_SITE): $(FOR_DEMO)
	$(INSTALL) -e '.[docs]'
	@touch $@
