# Two commands matter: `make demo` and `make test`. Everything they need is installed into .venv, pinned by hash.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL ?=
ROOT := $(filter 0,$(shell id -u))
COMPILE := $(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes

# A tier that needs root says that it was left out, and so does one that has no tests in this version.
tier = $(if $(wildcard $(1)/test_*.py),$(if $(ROOT),$(BIN)/pytest $(1) --timeout 600,\
  echo "left out: $(1) (it needs root)"),echo "left out: $(1) (its tests come with $(2))")

.PHONY: help setup demo test test-unit test-component test-kube test-e2e lint requirements crds clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

setup: $(STAMP) ## Check the machine and install everything, pinned

$(STAMP): requirements/uv.txt requirements/cpu.txt operator/pyproject.toml sidecar/pyproject.toml scripts/preflight.py
	@$(PYTHON) scripts/preflight.py $(VENV)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/uv.txt
	@$(BIN)/uv pip install --compile-bytecode --no-deps --require-hashes -r requirements/cpu.txt --python $(BIN)/python
	@$(BIN)/uv pip install -q --no-deps --no-build-isolation -e sidecar -e operator --python $(BIN)/python
	@touch $@

demo: $(STAMP) ## Serve examples/local/1p1d.yaml, ask a question, prove where the work was done
	@$(BIN)/python scripts/demo.py $(if $(MODEL),--model '$(MODEL)')

test: lint test-unit test-component test-kube test-e2e ## All tiers, the fast ones first

lint: $(STAMP) ## Style, types, import contracts, generated files
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/xpyd render crds --check
	@$(BIN)/xpyd render reference --check

test-unit: $(STAMP) ## Pure parts and sockets, without engines (a minute)
	@$(BIN)/pytest tests/unit

test-component: $(STAMP) ## Real vLLM engines on this machine's CPU (12 minutes)
	@$(BIN)/pytest tests/component --timeout 600

test-kube: $(STAMP) ## A real API server (root)
	@$(call tier,tests/kube,the Kubernetes backend)

test-e2e: $(STAMP) ## A whole cluster (root)
	@$(call tier,e2e,the test cluster)

requirements: ## Pin again what the .in files ask for
	$(COMPILE) --no-emit-index-url --no-emit-find-links \
	  --override requirements/override.txt requirements/cpu.in requirements/sidecar.in requirements/operator.in \
	  requirements/dev.in -o requirements/cpu.txt
	$(COMPILE) --no-emit-index-url --no-emit-find-links \
	  requirements/uv.in -o requirements/uv.txt

crds: $(STAMP) ## Write crds/*.yaml and docs/reference.md from the API structs
	$(BIN)/xpyd render crds
	$(BIN)/xpyd render reference

clean: ## Remove the environment and caches
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
