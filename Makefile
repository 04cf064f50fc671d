# Every verb sets up what it needs and does nothing twice.
#   make train ARGS="--env CartPole-v1 --total_steps 200000"

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
ARGS   ?=
JOBS   ?= 3
TRAIN  := torchbeast.polybeast
CPP    := $(wildcard cpp/*.h cpp/*.cc cpp/python/*.h cpp/python/*.cc)
EXAMPLES := $(wildcard examples/cpp_client/*.h examples/cpp_client/*.cc)
comma  := ,

# Compile a module once, whatever the environment says, not in each process that a test starts.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup train check test test-packages sanitize lint style format proto bench clean

help:
	@echo "make train     train on Pong with a live view (ARGS=\"--env Catch\" for something else)"
	@echo "make check     check style and types, and run the tests that are fast (two minutes)"
	@echo "make test      run all tests"
	@echo "make sanitize  run the C++ tests under address, undefined and thread sanitizers"
	@echo "make lint      check style and types (make format corrects the style)"
	@echo "make bench     run every benchmark"
	@echo "make clean     remove what the verbs above made"

setup: $(VENV)/ready

# One file stands for the whole installation; it is remade when a requirement or C++ code changes.
# No isolated build: what was compiled before is kept in build/.
$(VENV)/ready: pyproject.toml constraints.txt CMakeLists.txt $(CPP) $(wildcard third_party/*/*.h)
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt torch scikit-build-core nanobind cmake ninja
	@$(PIP) install -c constraints.txt --no-build-isolation \
		--config-settings cmake.define.TORCHBEAST_STRICT=ON -e ".[plot,keys,ray,slurm,test,lint,bench]"
	@# NetHack asks for one version of Gymnasium, and works with others; to build it takes long.
	@$(PIP) install -c constraints.txt --no-deps --only-binary nle nle || \
		echo "There is no wheel of nle for this Python: the test of examples/nethack.py is skipped."
	@touch $@

train: setup
	@$(BIN)/python -m $(TRAIN) $(ARGS)

# $(call ctest,directory,sanitizers): build what changed of the C++ tests and run them.
ctest = PATH="$(CURDIR)/$(BIN):$$PATH"; \
	cmake -S . -B $(1) -G Ninja -DCMAKE_BUILD_TYPE=Debug -DTORCHBEAST_TESTS=ON \
		-DTORCHBEAST_STRICT=ON -DTORCHBEAST_SANITIZE=$(2) > /dev/null && \
	cmake --build $(1) && ctest --test-dir $(1) --output-on-failure

# Several tests at once: most of them wait for most of their time.
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

# While working: what is not marked as slow; beside it mypy, which may have much to do.
check: style
	@$(BIN)/mypy & types=$$!; $(PYTEST) -m "not slow" $(ARGS); tests=$$?; \
		wait $$types || { echo "mypy has found errors; see above."; tests=1; }; exit $$tests

test: setup
	@$(call ctest,build/test)
	@$(PYTEST) $(ARGS)

# Debian's packages for the tests that build a client in C++, wire up network namespaces, or start
# Slurm; where they are missing, those tests are skipped.
test-packages:
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends pkg-config libgrpc++-dev libprotobuf-dev \
		protobuf-compiler-grpc iproute2 nftables slurmctld slurmd slurm-client munge

sanitize: setup
	@$(call ctest,build/asan,address$(comma)undefined)
	@$(call ctest,build/tsan,thread)

lint: style
	@$(BIN)/mypy

style: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/codespell
	@$(BIN)/clang-format --dry-run -Werror $(CPP) $(EXAMPLES)

format: setup
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP) $(EXAMPLES)

# After a change of the protocol; what it makes is committed.
proto: setup
	@$(BIN)/python -m grpc_tools.protoc -I. -o libtorchbeast/rpc/env.binpb --pyi_out=. \
		libtorchbeast/rpc/env.proto

bench: setup
	@for program in benchmarks/*.py; do echo "== $$program"; $(BIN)/python $$program || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
