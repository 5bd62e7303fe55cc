# Two commands do everything on a fresh machine:
#   make bench   the environment if it is missing, then `weft bench` on whatever this machine is
#   make test    the environment if it is missing, then every test that can run here
#
# Variables: PYTHON (which Python), VENV (folder of the environment), ARGS (for weft bench),
# PYTEST_ARGS (for pytest), JOBS (test workers) and GPU_JOBS (test workers for each GPU),
# WEFT_ACCELERATOR=cpu|cuda (instead of looking for a GPU), TORCH_INDEX_URL (where torch is taken from, e.g. https://download.pytorch.org/whl/cu128).
VENV ?= .venv
ARGS ?=
PYTEST_ARGS ?=
JOBS ?= 2
GPU_JOBS ?= 6
# Each worker has neighbouring tests, which share a float64 reference, until another runs out.
PYTEST = -m pytest -n $(JOBS) --dist worksteal
DOCS = README.md $(shell find docs -name "*.md" -not -name log.md) $(wildcard src/weft/ops/*/README.md)

# A python3 that has torch comes first, so that a working torch is kept; then the newest supported.
# Each is run, not only looked up: version managers leave shims for Pythons that are not there.
ifndef PYTHON
PYTHON := $(shell fits='import sys; assert (3, 11) <= sys.version_info < (3, 14)'; \
  torch='import importlib.util as u; assert u.find_spec("torch")'; \
  python3 -c "$$fits; $$torch" 2>/dev/null && echo python3 && exit; \
  for p in python3.13 python3.12 python3.11 python3; do \
    $$p -c "$$fits" 2>/dev/null && echo $$p && exit; done)
endif
IN_VENV = $(VENV)/bin/python
export TORCH_INDEX_URL WEFT_ACCELERATOR
# Where it is set, each of the tests' many processes would compile Weft's own modules anew.
unexport PYTHONDONTWRITEBYTECODE
# Workers share the cores: a thread that waits for its neighbours is to sleep, not to spin.
test test-fast: export OMP_WAIT_POLICY ?= passive

.PHONY: help bench test test-fast gpu-test lint format types compile docs docs-check site env env-dev clean
.DEFAULT_GOAL := help

help: ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 14

bench: env ## weft bench: is it right, how fast is it, how far from the limit (ARGS="softmax --json")
	@$(VENV)/bin/weft bench $(ARGS)

test: env-dev ## every test that can run on this machine
	@$(IN_VENV) $(PYTEST) --slow $(PYTEST_ARGS)

test-fast: env-dev ## the tests without the slow ones
	@$(IN_VENV) $(PYTEST) $(PYTEST_ARGS)

gpu-test: ## the GPU tests on all GPUs of this machine, with the python3 that is there and no install
	@python3 tools/gpu_tests.py --jobs $(GPU_JOBS) $(PYTEST_ARGS)

lint: env-dev ## ruff: lint and format
	@$(IN_VENV) -m ruff check .
	@$(IN_VENV) -m ruff format --check .

format: env-dev ## ruff: put right what it can
	@$(IN_VENV) -m ruff check --fix .
	@$(IN_VENV) -m ruff format .

types: env-dev ## mypy
	@$(IN_VENV) -m mypy

compile: env-dev ## every .cu and every Triton kernel for sm_80, sm_90 and sm_100; needs no GPU
	@$(IN_VENV) -m weft.backends.compile_all --arch sm_80 --arch sm_90 --arch sm_100 $(COMPILE_ARGS)

docs: env-dev ## regenerate the README's pictures, the generated blocks of README and docs, the names for completion
	@PYTHONPATH=src $(IN_VENV) -m weft.workbench.report.overview
	@PYTHONPATH=src $(IN_VENV) -m weft.cli.completion
	@PYTHONPATH=src $(IN_VENV) -m cogapp -r $(DOCS)

docs-check: env-dev ## are the generated blocks current
	@PYTHONPATH=src $(IN_VENV) -m cogapp --check --diff $(DOCS)

site: env-dev ## the documentation as a searchable site in build/site
	@NO_MKDOCS_2_WARNING=1 $(IN_VENV) -m mkdocs build --strict --quiet && echo build/site/index.html

env: ## the environment to run in
	@$(call make_env,run)

env-dev: ## the environment to run, test, lint and type-check in
	@$(call make_env,dev)

clean: ## remove the environment and everything generated
	rm -rf $(VENV) $(VENV).lock build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

define make_env
if [ -z "$(PYTHON)" ]; then \
  echo "Weft needs Python 3.11, 3.12 or 3.13, and none was found." >&2; \
  echo "hint: install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
  exit 2; \
fi; \
$(PYTHON) tools/environment.py $(VENV) $(1)
endef
