# The one entry point: every target sets up what it needs. Needs python3 (3.11 or later) with venv and pip, git, make.

PYTHON ?= python3
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, max(2, os.cpu_count() or 2)))')
PYTEST_ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
MOONCAKE_STAMP := .venv/.mooncake-installed

# One thread per test process: the processes are what fills the cores, and results do not depend on their number.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: help venv demo test test-long check format clean

help:
	@echo "make demo       play a conversation on a tiny model, cache off and on"
	@echo "make test       the tests (minutes); PYTEST_ARGS='-k name' selects"
	@echo "make test-long  the same tests at full size"
	@echo "make check      ruff format, ruff lint, mypy --strict"
	@echo "make format     let ruff rewrite the files"
	@echo "make venv       .venv alone, with everything the targets above need, and Mooncake where it can be had"

venv: $(STAMP) $(MOONCAKE_STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test,lint]'
	@touch $@

# Not every machine can have it, so a failure ends nothing, and is tried again the next time.
$(MOONCAKE_STAMP): $(STAMP) .ci/install-mooncake
	@if .ci/install-mooncake $(BIN)/python; then touch $@; fi

demo: $(STAMP)
	$(BIN)/dalsegno demo

test: venv
	$(PYTEST) $(PYTEST_ARGS)

test-long: venv
	DALSEGNO_TEST_LONG=1 $(PYTEST) $(PYTEST_ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src tests examples

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
