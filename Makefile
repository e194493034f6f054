# Two commands matter: `make demo` and `make test`. Everything they need is installed into .venv, pinned by hash.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL ?=
ARGS ?=

.PHONY: help setup demo lint test test-all test-unit test-sockets test-component test-kube test-e2e check-gpu check-gpu-engines generate images install clean

help: ## List the targets, and the tiers of tests with their minutes
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'
	@$(PYTHON) scripts/tier_minutes.py help

setup: $(STAMP) ## Check the machine and install everything, pinned

$(STAMP): requirements/uv.txt requirements/cpu.txt operator/pyproject.toml sidecar/pyproject.toml \
		sidecar/hatch_build.py $(wildcard sidecar/src/xpyd_sidecar/router/relay/_*.[ch]) \
		$(wildcard sidecar/src/xpyd_sidecar/transport/_*.[ch]) scripts/preflight.py
	@$(PYTHON) scripts/preflight.py $(VENV)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/uv.txt
	@$(BIN)/uv pip install --compile-bytecode --no-deps --require-hashes -r requirements/cpu.txt --python $(BIN)/python
	@$(BIN)/uv pip install -q --no-deps --no-build-isolation -e sidecar -e operator --python $(BIN)/python
	@touch $@

demo: $(STAMP) ## Serve examples/local/1p1d.yaml, ask a question, prove where the work was done
	@$(BIN)/python scripts/demo.py $(if $(MODEL),--model '$(MODEL)')

test: $(STAMP) ## What a change needs, and what CI runs: in two lanes, then what each tier cost (CI_TIMES=FILE, RECORD=1, XPYD_BASE=COMMIT)
	@$(BIN)/python scripts/tiers.py test

test-all: $(STAMP) ## Everything
	@$(BIN)/python scripts/tiers.py test-all

lint: $(STAMP) ## Style, types, import contracts, generated files
	@$(BIN)/python scripts/lint.py

# Some tiers by name. ARGS goes to pytest; scripts/tiers.py runs the others.
TIERS = @$(BIN)/python scripts/tiers.py $(1) $(if $(ARGS),-- $(ARGS))
test-unit: $(STAMP) ## The laws, and all other pure parts
	$(call TIERS,laws unit)

test-sockets: $(STAMP) ## What opens sockets or starts processes, without engines
	$(call TIERS,sockets)

test-component: $(STAMP) ## Parts of vLLM stepped by hand, and all tests on real engines
	$(call TIERS,component engines engines-rest)

test-kube: $(STAMP) ## A real API server, which is built once (root)
	$(call TIERS,kube kube-rest)

test-e2e: $(STAMP) ## A whole cluster with real engines in pods (root)
	$(call TIERS,cluster cluster-rest)

check-gpu: ## What xpyd does on this machine's GPUs, without vLLM (PYTHON=… names another, ARGS='--only NAMES --write')
	@$(if $(filter command line,$(origin PYTHON)),$(PYTHON),$(BIN)/python) -m lab check-gpu $(ARGS)

check-gpu-engines: ## Real vLLM engines on this machine's GPU, which must have vLLM (docs/development/gpu.md brings it to one without)
	@$(if $(filter command line,$(origin PYTHON)),$(PYTHON),$(BIN)/python) -m lab check-gpu-engines $(ARGS)

generate: $(STAMP) ## Write what is made from the API and from manifests/base: crds, docs/reference.md, manifests, the chart
	$(BIN)/xpyd render crds
	$(BIN)/xpyd render reference
	$(BIN)/python scripts/manifests.py

# install: what a cluster gets. OVERLAY chooses the variant, e.g. OVERLAY=manifests/overlays/images.
KUBECTL ?= kubectl
OVERLAY ?= manifests/base
install: ## Install the operator into the cluster that kubectl talks to (OVERLAY=...)
	$(KUBECTL) apply --server-side -k $(OVERLAY)
	$(KUBECTL) -n xpyd-system rollout status deployment/xpyd-operator --timeout=180s

clean: ## Remove the environment and caches
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

images: $(STAMP) ## Build the container images for this machine's processor (docs/images.md; ARGS='--platforms amd64,arm64')
	@$(BIN)/python -m images build $(ARGS)
