# make demo   set up .venv and compute advantages of the embedded real rollouts
# make test   set up .venv and run the tests
# make test-long  the tests that compile many programs
# make test-browser  written pages in a headless Chromium, which it installs if it may (Debian, as root)
# make test-triton  the GPU's operators in Triton's interpreter and compiled for a GPU (190 MB to download); a part of make test
# make lint   set up .venv, then ruff and mypy
# make fuzz   whatever may arrive from outside, for MINUTES=30; FUZZ_BACKENDS=eager,compiled takes the compiler in
# make soak   2,000 random batches through the compiled backend, against the plain loops (20 minutes)
# make peers  set up .venv-peers: areal, verl and torchrl for the benchmarks (2.3 GB, a few minutes)
# make test-trainers  the tests against the real trainers, in .venv-peers
# make bench  time LADDER=small|medium|large, against the peers where .venv-peers is, into perf/dashboards/index.html
SHELL := /bin/bash
# The first interpreter that is new enough; override with make PYTHON=...
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
STAMP := .venv/installed

PEERS := .venv-peers/installed
# The peers' environment can run everything; without it the benchmarks leave the peers out.
BENCH_BIN = $(if $(wildcard $(PEERS)),.venv-peers/bin,$(BIN))

MINUTES ?= 30
LADDER ?= small

.PHONY: help demo test test-long test-browser test-trainers lint fuzz soak peers bench test-triton

help:
	@sed -n 's/^# \(make [a-z]\)/\1/p' Makefile

demo: $(STAMP)
	$(BIN)/compiled-adv run

test: $(STAMP)
	$(BIN)/python -m pytest
	$(MAKE) test-triton

# Triton lies apart from the environment: its presence changes how torch compiles.
test-triton: .venv/triton/installed
	TRITON_INTERPRET=1 PYTHONPATH=.venv/triton $(BIN)/python -m pytest tests/unit/test_triton.py
	PYTHONPATH=.venv/triton $(BIN)/python -m pytest tests/unit/test_triton_compiled.py

.venv/triton/installed: $(STAMP)
	$(BIN)/python -m pip install -c constraints.txt --no-deps --target .venv/triton triton
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-long: $(STAMP)
	$(BIN)/python -m pytest -m long

test-browser: $(STAMP)
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
		{ [ $$(id -u) = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; } || \
		{ echo "Chromium is needed: apt-get install chromium chromium-driver, as root"; exit 1; }
	$(BIN)/python -c 'import selenium' 2>/dev/null || $(BIN)/python -m pip install -q -c constraints.txt -e '.[browser]'
	$(BIN)/python -m pytest -m browser tests/browser

test-trainers: $(PEERS)
	.venv-peers/bin/python -m pytest tests/trainers

fuzz: $(STAMP)
	OMP_NUM_THREADS=1 nice $(BIN)/python -W ignore -m tests.fuzz $(MINUTES)

soak: $(STAMP)
	OMP_NUM_THREADS=1 nice $(BIN)/python -W ignore -m tests.soak.soak_compiled

peers: $(PEERS)

$(PEERS): perf/peers/requirements.txt perf/peers/install.sh
	perf/peers/install.sh $(PYTHON)

BENCH = OMP_NUM_THREADS=1 $(BENCH_BIN)/python -m pytest --ladder $(LADDER) -q

# Compiling is most of the time, so two processes fill Inductor's cache first.
bench: $(STAMP)
	mkdir -p perf/results
	$(BENCH) --benchmark-disable perf/bench_recipes.py >/dev/null & \
		$(BENCH) --benchmark-disable perf/bench_pipeline.py perf/bench_passes.py >/dev/null; wait
	$(BENCH) perf --benchmark-max-time 0.1 --benchmark-columns=median,iqr,rounds \
		--benchmark-json perf/results/bench.json
	$(BIN)/compiled-adv dashboard perf/results/bench.json --out perf/dashboards

# The stamp is written last, so a set-up that was cut short is done again. torch goes first and by itself:
# a CPU build of the pinned version then serves all that follows.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python"; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@
