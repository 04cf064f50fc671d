# Every verb sets up what it needs and does nothing twice.
#   make train ARGS="--env CartPole-v1 --total_steps 200000"

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
ARGS   ?=
TRAIN  := torchbeast.polybeast
CPP    := $(wildcard cpp/*.h cpp/*.cc cpp/python/*.h cpp/python/*.cc)
EXAMPLES := $(wildcard examples/cpp_client/*.h examples/cpp_client/*.cc)
comma  := ,

.DEFAULT_GOAL := help
.PHONY: help setup train test sanitize lint format proto bench clean doctest

help:
	@echo "make train     train on Pong with a live view (ARGS=\"--env Catch\" for something else)"
	@echo "make test      run the tests"
	@echo "make sanitize  run the C++ tests under address, undefined and thread sanitizers"
	@echo "make lint      check style and types (make format mends the style)"
	@echo "make bench     run every benchmark"
	@echo "make clean     remove what the verbs above made"

setup: $(VENV)/ready

# One file stands for the whole installation; it is remade when a requirement or C++ code changes.
# No isolated build: what was compiled before is kept in build/.
$(VENV)/ready: pyproject.toml constraints.txt CMakeLists.txt $(CPP)
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt torch scikit-build-core nanobind cmake ninja
	@$(PIP) install -c constraints.txt --no-build-isolation \
		--config-settings cmake.define.TORCHBEAST_STRICT=ON -e ".[test,lint,bench]"
	@touch $@

train: setup
	@$(BIN)/python -m $(TRAIN) $(ARGS)

# $(call ctest,directory,sanitizers): build what changed of the C++ tests and run them.
ctest = PATH="$(CURDIR)/$(BIN):$$PATH"; \
	cmake -S . -B $(1) -G Ninja -DCMAKE_BUILD_TYPE=Debug -DTORCHBEAST_TESTS=ON \
		-DTORCHBEAST_STRICT=ON -DTORCHBEAST_SANITIZE=$(2) > /dev/null && \
	cmake --build $(1) && ctest --test-dir $(1) --output-on-failure

# The one thing that no package on PyPI brings.
doctest:
	@echo '#include <doctest/doctest.h>' | $(CXX) -E -x c++ - > /dev/null 2>&1 || { \
		echo "Installing doctest-dev for the C++ tests ..."; \
		apt-get update -qq && apt-get install -y -qq doctest-dev > /dev/null || { \
		echo "The C++ tests need doctest: install your system's package of it (Debian: doctest-dev)."; \
		exit 1; }; }

test: setup doctest
	@$(call ctest,build/test)
	@$(BIN)/python -m pytest $(ARGS)

sanitize: setup doctest
	@$(call ctest,build/asan,address$(comma)undefined)
	@$(call ctest,build/tsan,thread)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/codespell
	@$(BIN)/clang-format --dry-run -Werror $(CPP) $(EXAMPLES)

format: setup
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP) $(EXAMPLES)

# After a change of the protocol; the code it makes is committed.
proto: setup
	@$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. libtorchbeast/rpc/env.proto

bench: setup
	@for program in benchmarks/*.py; do echo "== $$program"; $(BIN)/python $$program || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
