# Every verb sets up what it needs and does nothing twice.
#   make train ARGS="--env CartPole-v1 --total_steps 200000"

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
ARGS   ?=
TRAIN  := torchbeast.monobeast

.DEFAULT_GOAL := help
.PHONY: help setup train test lint format bench clean

help:
	@echo "make train   train on Pong with a live view (ARGS=\"--env Catch\" for something else)"
	@echo "make test    run the tests"
	@echo "make lint    check style and types (make format mends the style)"
	@echo "make bench   run every benchmark"
	@echo "make clean   remove what the verbs above made"

setup: $(VENV)/ready

# One file stands for the whole installation; it is remade when a requirement changes.
$(VENV)/ready: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e ".[test,lint]"
	@touch $@

train: setup
	@$(BIN)/python -m $(TRAIN) $(ARGS)

test: setup
	@$(BIN)/python -m pytest $(ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/codespell

format: setup
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

bench: setup
	@for program in benchmarks/*.py; do echo "== $$program"; $(BIN)/python $$program || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
