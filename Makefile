# make demo   set up .venv and compute advantages of the embedded real rollouts
# make test   set up .venv and run the tests
# make lint   set up .venv, then ruff and mypy
SHELL := /bin/bash
# The first interpreter that is new enough; override with make PYTHON=...
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: demo test lint

demo: $(STAMP)
	$(BIN)/compiled-adv run

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

# The stamp is written last, so a set-up that was cut short is done again. torch goes first and by itself:
# a CPU build of the pinned version then serves all that follows.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python"; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@
