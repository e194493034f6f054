"""The tiers of tests, one row each: what it is, what it needs built, its commands, and in which of two speeds it runs.

    make test        rows of TEST: what a change needs. Rows with ``touched`` run only where a change may touch what they
                     test (``tier_paths``)
    make test-all    all rows

Two lanes run side by side. ``COMPUTE`` uses processors; ``CLUSTER`` waits for a Kubernetes, of which there can be one at a
time; rows of ``EITHER`` go to the lane that is free first. Rows of ``FIRST`` run before the lanes begin, and a failure
there ends the run. Only Python's own library is imported, since ``make help`` reads this without an environment.
"""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
PYTEST = (PYTHON, "-m", "pytest")
CLUSTER = (PYTHON, "-m", "testcluster", "build", "--kwok", "--profile")
NEXT = ROOT / ".cache" / "vllm-next" / "site"

LAWS = tuple(f"tests/unit/test_{name}.py" for name in (
    "model_based", "serving_exchange", "serving_exchange_laws", "serving_poison_ledger", "stream_continuation",
    "fleet_roster", "kv_pairing", "kv_receiving", "kv_publishing", "kv_offers", "kv_groups", "kv_leases", "kv_simulation",
    "broadcast_ring_model", "broadcast_layout", "dp_model", "group_model", "membership_protocol",
    "kube_backend", "kube_backend_gangs", "kube_backend_groups", "kube_backend_quota", "kube_leader", "plan_status",
    "plan_fleet", "plan_step", "planner_decide", "balance_picker", "balance_retry_budget"))
"""Files that hold laws which much else stands on: few, quick, and first."""
BY_HAND = tuple(f"tests/component/test_{name}.py" for name in (
    "connector_sides", "connector_rest", "connector_refused", "connector_memory", "connector_groups", "connector_switch",
    "connector_reset", "late_copies", "engine_sampling", "engine_compat", "engine_kv_abi", "engine_versions", "dp_compat",
    "dp_by_hand", "executor_queue", "executor_hosts", "request_fields", "hidden_fields", "owned_arguments", "vllm_options"))
"""Files that import vLLM and start no engine, so that sources without what is compiled are enough."""


class Lane(Enum):
    """Where a row runs."""

    FIRST = "first"
    COMPUTE = "compute"
    CLUSTER = "cluster"
    EITHER = "either"


class Tier(NamedTuple):
    """A row. ``needs``: rows that build what it runs on; ``touched``: it is left out of ``make test`` where no change may
    touch what it tests; ``root``: without root it says that it was left out.
    """

    name: str
    what: str
    lane: Lane
    commands: tuple[tuple[str, ...], ...]
    needs: tuple[str, ...] = ()
    in_test: bool = True
    touched: bool = False
    root: bool = False
    env: dict[str, str] = {}  # noqa: RUF012 (nobody changes it)


def _pytest(*words: str, processes: int = 0, timeout: int = 0) -> tuple[str, ...]:
    beside = ("--numprocesses", str(processes), "--dist", "loadfile") if processes else ()
    return (*PYTEST, *words, *beside, *(("--timeout", str(timeout)) if timeout else ()))


def _extra(name: str, what: str) -> Tier:
    return Tier(f"get-{name}", what, Lane.EITHER, ((PYTHON, "-m", "lab", "extras", name),), touched=True)


def _build(name: str, what: str, *command: str) -> Tier:
    return Tier(f"build-{name}", what, Lane.CLUSTER, (command,), root=True, env={"PYTHONPATH": "lab/cluster"})


BUILDS = (
    _extra("compiler", "gcc"),
    _extra("nixl", "NIXL (0.2 GB, once)"),
    _extra("vllm-next", "vLLM 0.33's Python sources (0.34 GB, once)"),
    _extra("browser", "Chromium and its driver"),
    _build("light", "an API server, once for each change of its inputs", *CLUSTER, "light"),
    _build("full", "a node and network policies, likewise", *CLUSTER, "full"),
    _build("images", "the images that run in pods", PYTHON, "-m", "images", "build"),
    _build("gitops", "Helm, and what Argo CD and Flux think of objects", PYTHON, "-m", "testcluster", "build", "--gitops",
           "--profile", "light")._replace(in_test=False),
)
TIERS = (
    Tier("lint", "style, types, import contracts, generated files", Lane.FIRST, ((PYTHON, "scripts/lint.py"),)),
    Tier("laws", "the laws that much else stands on", Lane.FIRST, (_pytest(*LAWS, "-x", processes=2),)),
    Tier("unit", "pure parts", Lane.COMPUTE,
         (_pytest("tests/unit", "-m", "not test_all", *(f"--ignore={path}" for path in LAWS), processes=2),)),
    Tier("sockets", "what opens sockets or starts threads and processes", Lane.COMPUTE,
         (_pytest("tests/sockets", "-m", "not test_all", processes=2),)),
    Tier("component", "parts of vLLM, stepped by hand without an engine", Lane.COMPUTE,
         (_pytest("tests/component", "-m", "not engines and not test_all", processes=2, timeout=600),)),
    Tier("engines", "real vLLM engines on this machine's CPU: a test for each class of faults", Lane.COMPUTE,
         (_pytest("tests/component", "-m", "engines and smoke", timeout=600),)),
    Tier("kube", "a real API server (root)", Lane.CLUSTER,
         (_pytest("tests/kube", "-m", "not test_all", processes=2, timeout=600),), ("build-light",), root=True),
    Tier("cluster", "a whole cluster with real engines in pods: an answer, a change of shape, a lost pod (root)",
         Lane.CLUSTER, (_pytest("e2e", "-m", "smoke", timeout=900),), ("build-full", "build-images"), root=True),
    Tier("sanitize", "what is written in C, under sanitizers and a fuzz", Lane.EITHER,
         ((PYTHON, "scripts/sanitize.py", "tests"), (PYTHON, "scripts/sanitize.py", "races"),
          (PYTHON, "scripts/sanitize.py", "fuzz", "--seconds", "15")),
         ("get-compiler",), touched=True),
    Tier("versions", "what needs no engine, with the Python sources of vLLM 0.33", Lane.EITHER,
         (_pytest(*BY_HAND, processes=2, timeout=120),), ("get-vllm-next",), touched=True,
         env={"PYTHONPATH": str(NEXT), "VLLM_TARGET_DEVICE": "cpu"}),
    Tier("nixl", "the link `rdma` over NIXL itself, without a card", Lane.EITHER, (_pytest("tests/nixl", timeout=600),),
         ("get-nixl",), touched=True, env={"XPYD_NIXL_SITE": str(ROOT / ".cache" / "nixl" / "site")}),
    Tier("browser", "the dashboard in headless Chromium", Lane.EITHER, (_pytest("tests/browser", timeout=300),),
         ("get-browser",), touched=True),
    Tier("workshop", "the tools of this repository", Lane.EITHER, (_pytest("tests/workshop", processes=2),), in_test=False),
    Tier("parts-rest", "many rounds of what unit, sockets and component show once", Lane.COMPUTE,
         (_pytest(*(f"tests/{name}" for name in ("unit", "sockets", "component")), "-m", "test_all and not engines",
                  processes=2, timeout=600),), in_test=False),
    Tier("engines-rest", "all other tests on real engines", Lane.COMPUTE,
         (_pytest("tests/component", "-m", "engines and not smoke", timeout=600),), in_test=False),
    Tier("sanitize-rest", "all other tests that run what is written in C, and a longer fuzz", Lane.EITHER,
         ((PYTHON, "scripts/sanitize.py", "far-tests"),
          (PYTHON, "scripts/sanitize.py", "fuzz", "--seconds", "60", "--seed", "2")), ("get-compiler",), in_test=False),
    Tier("kube-rest", "a real API server: random steps, large fleets, the test cluster (root)", Lane.CLUSTER,
         (_pytest("tests/kube", "-m", "test_all", "--ignore=tests/kube/test_gitops.py", timeout=600),), ("build-light",),
         in_test=False, root=True),
    Tier("gitops", "the chart, Argo CD's and Flux's judgement, alerts by promtool (root)", Lane.CLUSTER,
         ((PYTHON, "scripts/promtool.py"),
          _pytest(*(f"tests/{name}.py" for name in ("sockets/test_chart", "sockets/test_gitops_health",
                  "sockets/test_observability", "kube/test_gitops", "kube/test_install")), timeout=600)),
         ("build-gitops",), in_test=False, root=True),
    Tier("cluster-rest", "all other tests on a whole cluster, and the images (root)", Lane.CLUSTER,
         (_pytest("e2e", "-m", "not smoke", timeout=900),), ("build-full", "build-images"), in_test=False, root=True),
)
ROWS = {one.name: one for one in (*BUILDS, *TIERS)}
SPEEDS = {"test": False, "test-all": True}
"""By make's target: whether it runs everything."""


def of_speed(everything: bool) -> tuple[Tier, ...]:
    """Tiers of ``make test-all``, or those that ``make test`` may run."""
    return tuple(one for one in TIERS if everything or one.in_test)


def with_needs(tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
    """The tiers, each after what it needs built, once."""
    found: dict[str, Tier] = {}
    for one in tiers:
        for name in (*one.needs, one.name):
            found.setdefault(name, ROWS[name])
    return tuple(found.values())
