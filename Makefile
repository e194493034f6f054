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
CLUSTER = PYTHONPATH=lab/cluster $(BIN)/python -m testcluster
ARGS ?=

.PHONY: help setup demo lint test test-cluster test-unit test-browser test-component test-versions test-kube test-gitops test-e2e build-light build-full build-images check-gpu generate images install clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

setup: $(STAMP) ## Check the machine and install everything, pinned

$(STAMP): requirements/uv.txt requirements/cpu.txt operator/pyproject.toml sidecar/pyproject.toml \
		sidecar/hatch_build.py $(wildcard sidecar/src/xpyd_sidecar/router/relay/_*.[ch]) \
		sidecar/src/xpyd_sidecar/transport/_moves.c scripts/preflight.py
	@$(PYTHON) scripts/preflight.py $(VENV)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/uv.txt
	@$(BIN)/uv pip install --compile-bytecode --no-deps --require-hashes -r requirements/cpu.txt --python $(BIN)/python
	@$(BIN)/uv pip install -q --no-deps --no-build-isolation -e sidecar -e operator --python $(BIN)/python
	@touch $@

demo: $(STAMP) ## Serve examples/local/1p1d.yaml, ask a question, prove where the work was done
	@$(BIN)/python scripts/demo.py $(if $(MODEL),--model '$(MODEL)')

test: $(STAMP) ## What CI runs: every tier, then what each cost (CI_TIMES=FILE for the same as JSON)
	@$(BIN)/python scripts/tiers.py

test-cluster: test-kube test-e2e ## The tiers that run on a Kubernetes of their own (root)

lint: $(STAMP) ## Style, types, import contracts, generated files
	@$(BIN)/python scripts/lint.py

test-unit: $(STAMP) ## Pure parts and sockets, without engines (4 minutes)
	@$(BIN)/pytest tests/unit --numprocesses 3 --dist loadfile

test-browser: $(STAMP) ## The dashboard in headless Chromium (a minute; root installs the browser)
	@PYTHONPATH=tests/support $(BIN)/python scripts/browser.py
	@$(BIN)/pytest tests/browser --timeout 300

# NIXL's packages alone; they run with this environment's torch.
NIXL := .cache/nixl
$(NIXL)/.installed: $(STAMP) requirements/nixl.txt
	@mkdir -p $(NIXL)
	@$(BIN)/uv pip install -q --no-deps --require-hashes -r requirements/nixl.txt --python $(BIN)/python --target $(NIXL)/site
	@touch $@

.PHONY: test-nixl
test-nixl: $(NIXL)/.installed ## The link over NIXL itself, over UCX's TCP, shared memory and kernel reads (3 minutes; 0.2 GB)
	@XPYD_NIXL_SITE=$(CURDIR)/$(NIXL)/site $(BIN)/pytest tests/nixl --timeout 600

# The newer vLLM that is known: its Python sources on the path before the installed one, whose dependencies they run with.
VLLM_NEXT := .cache/vllm-next
$(VLLM_NEXT)/.installed: $(STAMP) requirements/vllm-next.txt scripts/vllm_sources.py
	@$(BIN)/python scripts/vllm_sources.py requirements/vllm-next.txt $(VLLM_NEXT)
	@touch $@

BY_HAND := $(addprefix tests/component/test_,connector_sides.py connector_rest.py connector_refused.py connector_memory.py connector_groups.py \
  connector_switch.py connector_reset.py late_copies.py engine_sampling.py engine_compat.py engine_kv_abi.py engine_versions.py dp_compat.py dp_by_hand.py \
  executor_queue.py executor_hosts.py \
  request_fields.py hidden_fields.py owned_arguments.py)
.PHONY: test-versions
test-versions: $(VLLM_NEXT)/.installed ## What needs no engine, with the Python sources of the newer vLLM (a minute; 0.34 GB, once)
	@PYTHONPATH=$(CURDIR)/$(VLLM_NEXT)/site VLLM_TARGET_DEVICE=cpu $(BIN)/pytest $(BY_HAND) --timeout 120

test-component: $(STAMP) ## Real vLLM engines on this machine's CPU (12 minutes)
	@$(BIN)/pytest tests/component --timeout 600

build-light: $(STAMP) ## The Kubernetes of test-kube, once for each change of its inputs (8 minutes)
	@$(if $(filter 0,$(ROOT)),$(CLUSTER) build --profile light --kwok,true)

build-full: $(STAMP) ## What test-e2e needs beside it: a node, network policies (5 minutes)
	@$(if $(filter 0,$(ROOT)),$(CLUSTER) build --profile full --kwok,true)

build-images: $(STAMP) ## The images that test-e2e runs, which it builds itself where they are missing (a minute)
	@$(if $(filter 0,$(ROOT)),$(BIN)/python -m images build >/dev/null,true)

test-kube: build-light ## A real API server, and what needs its kubectl (root)
ifeq ($(ROOT),0)
	@$(BIN)/pytest tests/kube tests/unit/test_manifests.py --timeout 600 --numprocesses 2 --dist loadfile
else
	@echo "left out: tests/kube (it needs root)"
endif

check-gpu: ## What xpyd does on this machine's GPUs, without vLLM (PYTHON=… names another, ARGS='--wheels FOLDER --write')
	@$(if $(filter command line,$(origin PYTHON)),$(PYTHON),$(BIN)/python) -m lab check-gpu $(ARGS)

test-gitops: $(STAMP) ## Helm chart, Argo CD's and Flux's judgement, alerts by promtool (root; outside CI for its build)
	@$(CLUSTER) build --profile light --gitops
	@$(BIN)/python scripts/promtool.py
	@$(BIN)/pytest tests/unit/test_chart.py tests/unit/test_gitops_health.py tests/unit/test_observability.py tests/kube/test_gitops.py \
	  tests/kube/test_install.py tests/kube/test_autoscaling.py --timeout 600

test-e2e: build-full ## A whole cluster with real engines in pods (root)
ifeq ($(ROOT),0)
	@$(BIN)/pytest e2e --timeout 900
else
	@echo "left out: e2e (it needs root)"
endif

.PHONY: test-sanitize sanitizers
sanitizers:
	@command -v $${CC:-gcc} >/dev/null || apt-get install -y --no-install-recommends gcc libc6-dev

test-sanitize: $(STAMP) sanitizers ## What is written in C, under the address and undefined-behaviour sanitizers (4 minutes; gcc)
	@$(BIN)/python scripts/sanitize.py tests
	@$(BIN)/python scripts/sanitize.py fuzz --seconds 30

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
