# Needs Python 3.11 or newer and make, nothing else. `make` alone lists the targets.

# PYTHON=... chooses another interpreter for .venv. A python3.11 that is only a shim without a Python behind it is skipped.
PYTHON ?= $(shell python3.11 -c "" 2>/dev/null && echo python3.11 || echo python3)
BIN := .venv/bin
# More arguments for pytest: make test ARGS="tests/test_chain.py -x"
ARGS ?=

# What `make serve` serves: a trained model by name, a ladder folder, or a run of yours.
MODEL ?= fashion

# What `make paper` does: smoke (two minutes), cpu (ten hours of two cores) or full (the paper's own scale); and where
# the data sets' folders are.
SCALE ?= cpu
DATA ?= data

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help venv demo serve paper test check format clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1: \2/p' Makefile

venv: .venv/.installed ## make .venv with everything for training and development

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("cnmm needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; try: make venv PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	@echo "installing into .venv (first time only, about 2 minutes)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq -c constraints.txt -e ".[train,dev]"
	@touch $@

demo: .venv/.installed ## the whole story on real images: train, measure, export, classify; writes to demo/
	$(BIN)/python examples/demo.py

serve: .venv/.installed ## serve a trained model on this machine: open the address that it says in a browser
	@echo "starting; then open the address below in a browser, and drop an image on the page"
	@$(BIN)/cnmm serve $(MODEL)

paper: .venv/.installed ## check the paper's claims: train and measure what is missing, write docs/claims.md (SCALE=cpu DATA=DIR)
	$(BIN)/python -m benchmarks.claims --scale $(SCALE) --data-dir $(DATA)

test: .venv/.installed ## run all tests in two processes of one thread each
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal $(ARGS)

check: .venv/.installed ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.installed ## fix what ruff can fix, and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, caches, builds and the demo's pictures
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
