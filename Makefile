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

.PHONY: help setup demo test test-cluster test-unit test-browser test-component test-versions test-kube test-gitops test-e2e build-light build-full build-images lint requirements crds clean images images-push

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

# --- the first day on a GPU: see docs/development/gpu.md ---
.PHONY: check-gpu gpu-wheels
WHEELS ?=
WRITE ?=
GPU_PYTHONS ?= 3.12
GPU_PLATFORMS := $(foreach kind,_2_28 _2_27 _2_26 _2_24 _2_17 2014,--platform manylinux$(kind)_x86_64)
check-gpu: ## Copies, marks, graphs and NCCL on this machine's GPUs, without vLLM (PYTHON=… names another, WHEELS=.wheels what it lacks, ONLY=names, WRITE=1 records)
	@$(if $(filter command line,$(origin PYTHON)),$(PYTHON),$(BIN)/python) lab/gpu $(if $(WHEELS),--wheels '$(WHEELS)') \
	  --only '$(ONLY)' $(if $(WRITE),--write)

gpu-wheels: $(STAMP) ## What check-gpu needs beside torch, as wheels in .wheels (28 MiB for each of GPU_PYTHONS=3.12)
	@rm -rf .wheels
	@for python in $(GPU_PYTHONS); do for list in gpu gpu-cu12 gpu-cu13; do \
	  $(BIN)/python -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes \
	    --implementation cp --python-version $$python --abi cp$${python/./} --abi abi3 --abi none $(GPU_PLATFORMS) \
	    -r requirements/$$list.txt -d .wheels; done; done
	@du -sh .wheels
# --- end of GPU ---

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

.PHONY: test-sanitize fuzz sanitizers
SECONDS ?= 30
sanitizers:
	@command -v $${CC:-gcc} >/dev/null || apt-get install -y --no-install-recommends gcc libc6-dev

test-sanitize: $(STAMP) sanitizers ## What is written in C, under the address and undefined-behaviour sanitizers (4 minutes; gcc)
	@$(BIN)/python scripts/sanitize.py tests
	@$(BIN)/python scripts/sanitize.py fuzz --seconds 30 --seed '$(SEED)'

fuzz: $(STAMP) sanitizers ## The fuzz of C alone, for long (SECONDS=30 for each of six entry points, SEED=)
	@$(BIN)/python scripts/sanitize.py fuzz --seconds '$(SECONDS)' --seed '$(SEED)'

requirements: ## Pin again what the .in files ask for
	$(COMPILE) --no-emit-index-url --no-emit-find-links \
	  --override requirements/override.txt requirements/cpu.in requirements/sidecar.in requirements/operator.in \
	  requirements/dev.in -o requirements/cpu.txt
	$(COMPILE) --no-emit-index-url --no-emit-find-links \
	  requirements/uv.in -o requirements/uv.txt
	$(COMPILE) --no-emit-index-url --no-emit-find-links requirements/bench.in -o requirements/bench.txt
	$(COMPILE) --no-emit-index-url --no-emit-find-links --no-deps requirements/bench-kv.in -o requirements/bench-kv.txt
	$(COMPILE) --no-emit-index-url --no-emit-find-links --no-deps requirements/nixl.in -o requirements/nixl.txt
	for name in stores suffix suffix-build; do $(COMPILE) --no-emit-index-url --no-emit-find-links --no-deps requirements/$$name.in -o requirements/$$name.txt; done
	$(COMPILE) --no-emit-index-url --no-emit-find-links --no-deps requirements/vllm-next.in -o requirements/vllm-next.txt
	$(COMPILE_IMAGE) x86_64-manylinux_2_28 --no-emit-package numpy requirements/gpu.in -o requirements/gpu.txt
	for name in gpu-cu12 gpu-cu13; do $(COMPILE) --no-emit-index-url --no-emit-find-links --no-deps requirements/$$name.in -o requirements/$$name.txt; done
	for name in operator-image sidecar-image engine-image; do for kind in $(IMAGE_PLATFORMS); do \
	  $(COMPILE_IMAGE) $${kind#*:} requirements/$$name.in -o requirements/$$name-$${kind%:*}.txt; done; done

crds: $(STAMP) ## Write crds/*.yaml and docs/reference.md from the API structs
	$(BIN)/xpyd render crds
	$(BIN)/xpyd render reference
	$(BIN)/python scripts/manifests.py

# install: what a cluster gets. OVERLAY chooses the variant, e.g. OVERLAY=manifests/overlays/images.
KUBECTL ?= kubectl
OVERLAY ?= manifests/base
.PHONY: install uninstall manifests

manifests: $(STAMP) ## Render manifests/base into manifests/install.yaml
	@$(BIN)/python scripts/manifests.py

install: ## Install the operator into the cluster that kubectl talks to (OVERLAY=...)
	$(KUBECTL) apply --server-side -k $(OVERLAY)
	$(KUBECTL) -n xpyd-system rollout status deployment/xpyd-operator --timeout=180s

uninstall: ## Remove it again; refused while there are services, which would go with it (ALL=1: them too)
	@left=$$($(KUBECTL) get disaggservices.xpyd.dev -A -o name --ignore-not-found 2>/dev/null || true); \
	if [ -n "$$left" ] && [ -z "$(ALL)" ]; then echo "still there, delete them first or say ALL=1:"; echo "$$left"; exit 1; fi
	$(KUBECTL) delete --ignore-not-found -k $(OVERLAY)

clean: ## Remove the environment and caches
	rm -rf $(VENV) .cache .wheels .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# --- images: see docs/images.md ---
# Wheels for Linux alone, in the versions that the tests run with; a lock for each platform.
IMAGE_PLATFORMS := amd64:x86_64-manylinux_2_28 arm64:aarch64-manylinux_2_28
COMPILE_IMAGE := $(BIN)/uv pip compile --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
  -c requirements/cpu.txt --python-platform
BASE ?=
REGISTRY ?=
TAG ?=
PLATFORMS ?=
BOTH := amd64,arm64

images: $(STAMP) ## Build the container images for this machine's processor; PLATFORMS=amd64,arm64 for an index, BASE=… names another base
	@$(BIN)/python -m images build $(if $(BASE),--base '$(BASE)') $(if $(PLATFORMS),--platforms '$(PLATFORMS)')

images-push: $(STAMP) ## Push operator and sidecar for amd64 and arm64 to REGISTRY=host/path; PLATFORMS=…, TAG=…, INSECURE=1 for plain HTTP
	@$(if $(REGISTRY),,$(error give the registry: make images-push REGISTRY=host/path))
	@$(BIN)/python -m images push '$(REGISTRY)' --platforms '$(or $(PLATFORMS),$(BOTH))' $(if $(BASE),--base '$(BASE)') \
	  $(if $(TAG),--tag '$(TAG)') $(if $(INSECURE),--insecure)
.PHONY: push
push: images-push
# --- end of images ---

# --- the test cluster: a real Kubernetes of this host; PROFILE=light|full, DIR=its folder, KWOK=1 adds fake nodes, IPV6=1 takes
# IPv4 from the full one ---
PROFILE ?= light
DIR ?=
KWOK ?=
IPV6 ?=
CLUSTER = PYTHONPATH=lab/cluster $(BIN)/python -m testcluster
CLUSTER_AT = --profile $(PROFILE) $(if $(DIR),--dir '$(DIR)')

.PHONY: cluster-up cluster-down cluster-status cluster-build
cluster-up: $(STAMP) ## Start a Kubernetes for hand work (PROFILE=light|full, KWOK=1 for fake nodes, DIR=folder)
	@$(CLUSTER) up $(CLUSTER_AT) $(if $(KWOK),--kwok) $(if $(IPV6),--ipv6)

cluster-down: $(STAMP) ## Remove it, whatever is left of it
	@$(CLUSTER) down $(CLUSTER_AT)

cluster-status: $(STAMP) ## Say what of it runs
	@$(CLUSTER) status $(CLUSTER_AT)

cluster-build: $(STAMP) ## Build its programs alone (once, 8 minutes)
	@$(CLUSTER) build --profile $(PROFILE) $(if $(KWOK),--kwok)
# --- end of the test cluster ---

# --- campaigns: outside CI, since they take longer or want more processors than it has ---
# Each has a row in lab/campaigns/campaign_rows.py and in docs/development/campaigns.md.
.PHONY: campaigns
campaigns: $(STAMP) ## All of them, one after the other, with a table of figures against goals (6 hours; goes on where it ended, FRESH=1 begins anew, ONLY=names)
	@$(BIN)/python lab/campaigns --only '$(ONLY)' $(if $(FRESH),--fresh)

.PHONY: campaign-parallel campaign-unequal campaign-away campaign-ipv6 campaign-upgrade
campaign-parallel: $(STAMP) ## Tensor-parallel engines, mp and Ray: eight processes at full speed (4 cores or patience)
	@$(BIN)/pytest lab/campaigns/test_parallel.py --timeout 600

ONLY ?=
campaign-unequal: $(STAMP) ## Engines of unequal sizes or with unusual KV, pair by pair, into bench/results (20 minutes; ONLY=pp2 for some)
	@$(BIN)/pytest lab/campaigns/test_unequal.py $(if $(ONLY),-k '$(ONLY)') --timeout 600

.PHONY: campaign-models
campaign-models: $(STAMP) ## Models of several KV cache groups on real engines, 49 prompts in every order and with faults, into bench/results (45 minutes; ONLY=tiny-granite for some)
	@$(BIN)/pytest lab/campaigns/test_models.py $(if $(ONLY),-k '$(ONLY)') --timeout 1800

campaign-away: $(STAMP) ## 30 minutes of traffic without operator and API server, into bench/results (root)
	@$(CLUSTER) build --profile full
	@$(BIN)/pytest -s lab/campaigns/cluster/away.py

campaign-upgrade: $(STAMP) ## xpyd itself is upgraded under load on a whole cluster, and back, into bench/results (root, 30 minutes)
	@$(CLUSTER) build --profile full
	@$(BIN)/pytest -s lab/campaigns/cluster/upgrade.py --timeout 3600

.PHONY: campaign-groups-cluster
campaign-groups-cluster: $(STAMP) ## An instance of two pods on a whole cluster with real engines: a killed engine, an evicted pod, a drained node, a lost kubelet, strangers, into bench/results (root, 40 minutes)
	@$(CLUSTER) build --profile full
	@$(BIN)/pytest -s lab/campaigns/cluster/groups.py --timeout 3600

.PHONY: campaign-group-ranks-cluster
campaign-group-ranks-cluster: $(STAMP) ## Data-parallel ranks over pods on a whole cluster with real engines, as prefill and as decode: a cut link, a killed engine, into bench/results (root, 20 minutes)
	@$(CLUSTER) build --profile full
	@$(BIN)/pytest -s lab/campaigns/cluster/group_ranks.py --timeout 3600

.PHONY: campaign-gang
campaign-gang: $(STAMP) ## Instances of two pods and a scheduler that places groups whole, on a fake node, into bench/results (root, 5 minutes, and 10 for the scheduler's first build)
	@$(BIN)/pytest -s lab/campaigns/test_gang.py --timeout 3600

.PHONY: campaign-kueue
campaign-kueue: $(STAMP) ## Services whose pods queue at a real Kueue, one by one and in groups, on a fake node, into bench/results (root, 5 minutes, and Kueue's first build)
	@$(BIN)/pytest -s lab/campaigns/test_kueue.py --timeout 3600

campaign-ipv6: $(STAMP) ## A whole cluster without IPv4, and a service on real engines in it, into bench/results (root, 10 minutes)
	@$(CLUSTER) build --profile full
	@$(BIN)/pytest -s lab/campaigns/cluster/ipv6.py --timeout 900

.PHONY: campaign-arm64
campaign-arm64: $(STAMP) ## Images of both platforms, built twice; those of arm64 run under emulation, into bench/results (root, 10 minutes)
	@PYTHONPATH=tests/support $(BIN)/python lab/campaigns/arm64.py

.PHONY: campaign-http
campaign-http: $(STAMP) ## HTTP fuzz of the router: 20 seeds, 20,000 connections, into bench/results (5 minutes)
	@$(BIN)/pytest lab/campaigns/test_http.py --timeout 1800 -s

.PHONY: campaign-router campaign-mixed campaign-sampled
KILLS ?= 40
ABORTS ?= 500
campaign-router: $(STAMP) ## 1,000 kills and 10,000 leaving clients, into bench/results (40 minutes; KILLS=, ABORTS= of real engines)
	@$(BIN)/python lab/campaigns/router.py --scripted
	@$(BIN)/python lab/campaigns/router.py --real --kills $(KILLS) --aborts $(ABORTS)

STREAMS ?= 2000
campaign-sampled: $(STAMP) ## The distribution of sampled streams that go on, and four planted errors, into bench/results (4 minutes; STREAMS= of real engines)
	@$(BIN)/python lab/campaigns/sampled.py --scripted
	@$(BIN)/python lab/campaigns/sampled.py --real --streams $(STREAMS)

MINUTES ?= 30
campaign-mixed: $(STAMP) ## A mixed load on the router at half of what is possible, into bench/results (MINUTES=30)
	@$(BIN)/python lab/campaigns/mixed.py --minutes $(MINUTES)

.PHONY: mutants
mutants: $(STAMP) ## Break the code on purpose, tests/mutants one by one, and say whether the tests notice (10 minutes; ONLY='kv-* tls-minimum')
	@$(BIN)/python scripts/mutants.py $(if $(ONLY),--only '$(ONLY)')

# Suffix decoding's package has no wheel: it is built with the torch of this environment, and put into a folder of its own.
SUFFIX := .cache/suffix
$(SUFFIX)/.installed: $(STAMP) requirements/suffix.txt requirements/suffix-build.txt
	@command -v g++ >/dev/null || apt-get install -y --no-install-recommends g++
	@mkdir -p $(SUFFIX)
	@test -x $(SUFFIX)/venv/bin/python || $(BIN)/uv venv -q --python $(BIN)/python $(SUFFIX)/venv
	@$(BIN)/uv pip install -q --no-deps --require-hashes -r requirements/suffix-build.txt --python $(SUFFIX)/venv/bin/python
	@$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > $$(echo $(SUFFIX)/venv/lib/python3.*/site-packages)/base.pth
	@PATH=$(CURDIR)/$(SUFFIX)/venv/bin:$$PATH $(BIN)/uv pip install -q --no-deps --no-build-isolation --require-hashes \
	  -r requirements/suffix.txt --python $(SUFFIX)/venv/bin/python
	@mkdir -p $(SUFFIX)/site && cp -r $(SUFFIX)/venv/lib/python3.*/site-packages/arctic_inference* $(SUFFIX)/site/
	@touch $@

.PHONY: campaign-speculation
campaign-speculation: $(SUFFIX)/.installed ## Roles that draft alike, otherwise or alone, on real engines, into bench/results (20 minutes; ONLY=ngram for some)
	@PYTHONPATH=$(CURDIR)/$(SUFFIX)/site$${PYTHONPATH:+:$$PYTHONPATH} $(BIN)/pytest -s lab/campaigns/test_speculation.py $(if $(ONLY),-k '$(ONLY)') --timeout 1200

# Other stores of KV in a folder of their own; they run with this environment's torch.
STORES := .cache/stores
$(STORES)/.installed: $(STAMP) requirements/stores.txt
	@dpkg -s libibverbs1 libnl-3-200 libnl-route-3-200 >/dev/null 2>&1 || \
	  apt-get install -y --no-install-recommends libibverbs1 libnl-3-200 libnl-route-3-200
	@mkdir -p $(STORES)
	@$(BIN)/uv pip install -q --no-deps --require-hashes -r requirements/stores.txt --python $(BIN)/python --target $(STORES)/site
	@touch $@

.PHONY: campaign-stores
campaign-stores: $(STORES)/.installed ## vLLM's offloading, Mooncake and LMCache beside ours on real engines, into bench/results (10 minutes; ONLY=mooncake for some)
	@XPYD_STORES_SITE=$(CURDIR)/$(STORES)/site $(BIN)/pytest -s lab/campaigns/test_stores.py $(if $(ONLY),-k '$(ONLY)') --timeout 900

.PHONY: campaign-queue
campaign-queue: $(STAMP) ## A million messages through the broadcast queue, with stalls and kills, into bench/results
	@$(BIN)/pytest -s lab/campaigns/test_queue.py --timeout 3600

.PHONY: campaign-buddy
campaign-buddy: $(STAMP) ## A million random operations on the buddy allocator, into bench/results (a minute)
	@$(BIN)/python lab/campaigns/buddy.py

.PHONY: campaign-modes
campaign-modes: $(STAMP) ## The modes and decode's buffer with three real engines (4 minutes)
	@$(BIN)/pytest -s lab/campaigns/test_modes.py --timeout 600

.PHONY: campaign-pairs campaign-long
campaign-long: $(STAMP) ## A prefill of five minutes on real engines is handed over, into bench/results (7 minutes)
	@$(BIN)/pytest lab/campaigns/test_long_prefill.py --timeout 1500

campaign-pairs: $(STAMP) ## Memory and file descriptors of an engine by peer that it has met, into bench/results (a minute)
	@$(BIN)/python lab/campaigns/pairs.py

.PHONY: campaign-files
campaign-files: $(STAMP) ## 700 streams at once on a service that may open 1,024 files, into bench/results (6 minutes)
	@$(BIN)/pytest lab/campaigns/test_file_limits.py --timeout 1200

.PHONY: campaign-service campaign-fuzz
campaign-service: $(STAMP) ## kill -9 of every process of a service of each role, 100 schemathesis requests of each operation (15 minutes)
	@VICTIMS=all EXAMPLES=100 $(BIN)/pytest -s tests/component/test_service_under_load.py tests/component/test_router_clients.py --timeout 1800

campaign-fuzz: $(STAMP) sanitizers ## What is written in C, fuzzed for five minutes at each entry point (15 minutes; SEED=)
	@$(BIN)/python scripts/sanitize.py fuzz --seconds 300 --seed '$(SEED)'

.PHONY: campaign-failures campaign-scenarios campaign-scenarios-models
campaign-failures: $(STAMP) ## Rows of the failure table with two real engines, stopped, killed and started again (5 minutes)
	@$(BIN)/pytest lab/campaigns/test_failures.py --timeout 600

REAL ?= 1000
SCRIPTED ?= 1000
SEED ?= 1
SCENARIO_MINUTES ?= 60
campaign-scenarios: $(STAMP) $(if $(filter nixl,$(LINK)),$(NIXL)/.installed) ## Random hand-overs with faults, kills and stops, into bench/results (an hour; REAL=, SCRIPTED= in all, SCENARIO_MINUTES= of this run, SEED=; LINK=tcp, shm or nixl; MODEL=tiny-gemma-3: with real engines of that; LAG=stops or starves: with two ranks to which that happens; goes on where it ended, FRESH=1 begins anew)
	@XPYD_NIXL_SITE=$(CURDIR)/$(NIXL)/site $(BIN)/python lab/campaigns/scenarios.py $(if $(MODEL),--model $(MODEL),--scripted $(SCRIPTED)) --real $(REAL) --minutes $(SCENARIO_MINUTES) --seed $(SEED) $(if $(LINK),--link $(LINK)) $(if $(LAG),--lag $(LAG)) $(if $(FRESH),--fresh)

MODELS ?= tiny-gemma-3 tiny-granite
campaign-scenarios-models: $(STAMP) ## The same with models of windows and of states, 500 scenarios each, side by side, into bench/results (half an hour; MODELS=, SCENARIO_MINUTES= for each; goes on where it ended, FRESH=1 begins anew)
	@for model in $(MODELS); do $(BIN)/python lab/campaigns/scenarios.py --model $$model --real 500 --minutes $(SCENARIO_MINUTES) --seed $(SEED) $(if $(FRESH),--fresh) & all="$$all $$!"; done; worst=0; for one in $$all; do wait $$one || worst=1; done; exit $$worst

.PHONY: campaign-dp
REQUESTS ?= 10000
DP_KILLS ?= 15
campaign-dp: $(STAMP) ## Step sync: larger models, 10,000 requests per variant, 15 kills, into bench/results (an hour; REQUESTS=, DP_KILLS=)
	@REQUESTS=$(REQUESTS) KILLS=$(DP_KILLS) $(BIN)/pytest -s lab/campaigns/test_dp.py --timeout 7200

.PHONY: campaign-groups
campaign-groups: $(STAMP) ## Members of a group: all sizes through vLLM's parser, larger models of their rounds, ranks of real engines over members, killed, stopped and cut off (an hour and a half; MINUTES= of random ways)
	@$(BIN)/pytest -s lab/campaigns/test_groups.py lab/campaigns/test_group_ranks.py lab/campaigns/test_group_faults.py --timeout 3600

.PHONY: campaign-scale
STEPS ?= 60
SWITCHES ?= 100
campaign-scale: $(STAMP) ## 1,000 simulated scale steps; STEPS= real ones, SWITCHES= of roles, 30 of instances of two members, added to bench/results (100 minutes; goes on where it ended, FRESH=1 begins anew)
	@$(BIN)/python lab/campaigns/scale.py --simulated --real --groups --steps $(STEPS) --switches $(SWITCHES) $(if $(FRESH),--fresh)

.PHONY: campaign-fleet
FLEET ?= 96P144D
FLEET_START_S ?= 12
campaign-fleet: $(STAMP) ## A rollout of 96P144D with scripted engines before a real API server, into bench/results (root, 10 minutes; FLEET=, FLEET_START_S= of an engine)
	@$(CLUSTER) build --profile light
	@XPYD_FLEET=$(FLEET) XPYD_FLEET_START_S=$(FLEET_START_S) XPYD_FLEET_RESULTS=bench/results/campaign_fleet.json \
	  $(BIN)/pytest -s tests/kube/test_fleet.py -k batches --timeout 3600
# --- end of campaigns ---

.PHONY: dashboard-picture
dashboard-picture: $(STAMP) ## Make docs/pictures/dashboard.png anew, from a router under load
	@PYTHONPATH=tests/support $(BIN)/python scripts/browser.py
	@PYTHONPATH=tests/support $(BIN)/python lab/tools/dashboard_picture.py

# --- benchmarks: see bench/README.md ---
.PHONY: bench-operator bench-operator-groups
bench-operator: $(STAMP) ## The operator with 1,000 pods on fake nodes, into bench/results (root, 5 minutes)
	@PYTHONPATH=lab/cluster:tests/support $(BIN)/python lab/bench/operator

bench-operator-groups: $(STAMP) ## The operator with 240 instances of two pods on fake nodes, where all fit and where some do not, into bench/results (root, 3 minutes)
	@PYTHONPATH=lab/cluster:tests/support $(BIN)/python lab/bench/operator --groups

.PHONY: bench-queue
bench-queue: $(STAMP) ## The broadcast queue beside vLLM's, multiprocessing's and ZMQ (7 minutes)
	@$(BIN)/python lab/bench/queue

.PHONY: bench-queue-steps
bench-queue-steps: $(STAMP) ## The time between decode steps with the broadcast queue and with vLLM's, on one host and over two process sets, into bench/results (8 minutes)
	@PYTHONPATH=tests/support $(BIN)/python lab/bench/queue_steps.py --write

.PHONY: bench-observer
bench-observer: $(STAMP) ## What metrics, history and the dashboard cost the router, into bench/results (a minute)
	@PYTHONPATH=tests/support $(BIN)/python lab/bench/observer --write

.PHONY: bench-planner
TRACES ?=
PARTS ?= simulated,calibration
bench-planner: $(STAMP) ## The planner beside HPA, static counts and foresight (TRACES=FOLDER), and the simulation beside real engines (15 minutes; PARTS=simulated|calibration|sinusoid|azure|mooncake)
	@PYTHONPATH=tests/support $(BIN)/python lab/bench/planner $(if $(TRACES),--traces '$(TRACES)') --parts '$(PARTS)' --write

.PHONY: bench-policies
bench-policies: $(STAMP) ## The router's policies on a trace (TRACE=FILE), simulated, into bench/results (a minute)
	@$(BIN)/python lab/bench/policies $(if $(TRACE),'$(TRACE)')

.PHONY: bench-dp
bench-dp: $(STAMP) ## Steps that data-parallel ranks run for nothing: vLLM's waves beside step sync, into bench/results (8 minutes)
	@PYTHONPATH=tests/support $(BIN)/python lab/bench/dp --write

# Other routers have an environment of their own: what they need must not decide what xpyd runs with.
RIVALS := .cache/bench
$(RIVALS)/.installed: $(STAMP) requirements/bench.txt
	@command -v nginx >/dev/null && command -v $(CC) >/dev/null || apt-get install -y --no-install-recommends nginx-light gcc libc6-dev
	@mkdir -p $(RIVALS)
	@test -x $(RIVALS)/venv/bin/python || $(BIN)/uv venv -q --python $(BIN)/python $(RIVALS)/venv
	@$(BIN)/uv pip install -q --no-deps --require-hashes -r requirements/bench.txt --python $(RIVALS)/venv/bin/python
	@touch $@

.PHONY: bench-router
bench-router: $(RIVALS)/.installed ## The router beside nginx, vllm-router and sglang-router, into bench/results (8 minutes; BEFORE=… adds the xpyd of another Python)
	@$(CC) -O2 -Wall -Wextra -Werror -o $(RIVALS)/engine lab/bench/router/engine.c
	@$(CC) -O2 -Wall -Wextra -Werror -o $(RIVALS)/load lab/bench/router/load.c
	@PYTHONPATH=tests/support $(BIN)/python lab/bench/router --built $(RIVALS) --binaries $(RIVALS)/venv/bin $(if $(BEFORE),--before '$(BEFORE)') --rounds $(or $(ROUNDS),7) --write

.PHONY: bench-modes
bench-modes: $(STAMP) ## put_async, put and get against each other with real engines, into bench/results (5 minutes)
	@PYTHONPATH=tests/support $(BIN)/python lab/bench/modes --write

# The same for what else moves KV: NIXL and Mooncake, which use this environment's torch.
KV_PEERS := .cache/bench/kv
$(KV_PEERS)/.installed: $(STAMP) requirements/bench-kv.txt
	@command -v $(CC) >/dev/null || apt-get install -y --no-install-recommends gcc libc6-dev
	@dpkg -s libibverbs1 libnl-3-200 libnl-route-3-200 iproute2 >/dev/null 2>&1 || \
	  apt-get install -y --no-install-recommends libibverbs1 libnl-3-200 libnl-route-3-200 iproute2
	@mkdir -p $(KV_PEERS)
	@test -x $(KV_PEERS)/venv/bin/python || $(BIN)/uv venv -q --python $(BIN)/python $(KV_PEERS)/venv
	@$(BIN)/uv pip install -q --no-deps --require-hashes -r requirements/bench-kv.txt --python $(KV_PEERS)/venv/bin/python
	@$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > $$(echo $(KV_PEERS)/venv/lib/python3.*/site-packages)/base.pth
	@touch $@

.PHONY: bench-kv
bench-kv: $(KV_PEERS)/.installed ## The links beside memcpy, TCP in C, gloo, NIXL and Mooncake, into bench/results (root, 5 minutes)
	@$(CC) -O2 -Wall -Wextra -Werror -o $(KV_PEERS)/raw lab/bench/kv/raw.c -lpthread
	@unshare --net bash -c 'ip link set lo up && sysctl -qw net.ipv4.tcp_congestion_control=reno && exec "$$@"' _ \
	  $(BIN)/python lab/bench/kv --raw $(CURDIR)/$(KV_PEERS)/raw --rivals $(CURDIR)/$(KV_PEERS)/venv/bin/python --write
.PHONY: bench-handover
bench-handover: $(KV_PEERS)/.installed ## 1P1D and 1P3D beside one engine, two, and vLLM's NixlConnector, into bench/results (25 minutes)
	@PYTHONPATH=tests/support $(BIN)/python lab/bench/handover --nixl $$(echo $(CURDIR)/$(KV_PEERS)/venv/lib/python3.*/site-packages) --write
# --- end of benchmarks ---
