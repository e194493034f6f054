"""The lab's commands, a row each: what it is, how long it takes, what it needs, and what runs.

``about`` and ``short`` stand in the tables of docs/development/campaigns.md and bench/README.md, so they are Markdown, with
links as seen from docs/development. Goals of campaigns are in ``campaigns/campaign_rows.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SUPPORT: Final = MappingProxyType({"PYTHONPATH": f"{ROOT}:{ROOT}/tests/support:{ROOT}/lab/cluster"})
CHECKOUT: Final = MappingProxyType({"PYTHONPATH": f"{ROOT}"})
RENO: Final = 'ip link set lo up && sysctl -qw net.ipv4.tcp_congestion_control=reno && exec "$@"'
WRITE: Final = (("--write",),)


class Command(NamedTuple):
    """A command: ``argv`` for Python, with ``{NAME}`` for the folder of an extra.

    ``usual``: the arguments where none are given, a tuple for each run. ``env``: is set where it is not set yet, and
    PYTHONPATH goes before what it is. ``extras``: see that module; ``profile``: of the test cluster, which is built before.
    ``result``: a file of bench/results. ``short``: what of it the tests do. ``anew``: what makes it begin anew where it
    would go on: a file to remove, or an argument. ``together``: its runs are side by side.
    """

    name: str
    minutes: int
    about: str
    argv: tuple[str, ...]
    usual: tuple[tuple[str, ...], ...] = ((),)
    env: Mapping[str, str] = SUPPORT
    result: str = ""
    short: str = ""
    root: bool = False
    extras: tuple[str, ...] = ()
    profile: str = ""
    anew: str = ""
    prefix: tuple[str, ...] = ()
    together: bool = False

    @property
    def needs(self) -> str:
        """What a machine must have for it, in words."""
        return ", ".join(("root",) * self.root + self.extras)


def campaign(name: str, minutes: int, about: str, argv: tuple[str, ...] = (), *, file: str = "", timeout: int = 600,
             **more: object) -> Command:
    """One that is a program, or a ``file`` for pytest, of which a test may take ``timeout`` seconds."""
    if file:
        argv = ("-m", "pytest", "-s", *(f"lab/campaigns/{each}" for each in file.split()), "--timeout", str(timeout))
    more = {"env": {}} | more
    return Command(f"campaign-{name}", minutes, about, argv, **more)  # type: ignore[arg-type]


BENCHES: Final = (
    Command("bench-router", 8, "the router beside nginx, vllm-router and sglang-router; `--before PYTHON` adds the xpyd that is "
            "installed in another environment, `--rounds n`",
            ("lab/bench/router", "--built", "{bench}", "--binaries", "{bench}/venv/bin"), WRITE, extras=("bench",),
            result="router.json"),
    Command("bench-kv", 5, "the KV links beside memcpy, TCP in C, gloo, NIXL and Mooncake",
            ("lab/bench/kv", "--raw", "{bench-kv}/raw", "--rivals", "{bench-kv}/venv/bin/python"), WRITE, env=CHECKOUT, root=True,
            extras=("bench-kv",), prefix=("unshare", "--net", "bash", "-c", RENO, "_"), result="kv.json"),
    Command("bench-encryption", 1, "what `kv.encryption` costs: bytes per second and processor time of one stripe, with a "
            "thread at each end, beside one in clear", ("lab/bench/encryption",), WRITE, env=CHECKOUT, result="encryption.json"),
    Command("bench-handover", 25, "1P1D and 1P3D beside one engine, two plain ones and vLLM's NixlConnector, with real engines",
            ("lab/bench/handover", "--nixl", "{bench-kv}/site"), WRITE, extras=("bench-kv",), result="handover.json"),
    Command("bench-modes", 5, "the modes put_async, put and get with three real engines, TTFT and prefill's leg by prompt length",
            ("lab/bench/modes",), WRITE, result="modes.json"),
    Command("bench-queue", 7, "the broadcast queue beside vLLM's MessageQueue, multiprocessing.Queue and ZMQ",
            ("lab/bench/queue",), env=CHECKOUT, result="queue.json"),
    Command("bench-queue-steps", 13, "the same queue under the executor of real engines (TP2): the time between two decode "
            "steps beside vLLM's queue, on one host and over two process sets; and under the executor alone",
            ("lab/bench/queue_steps.py",), WRITE, result="queue_steps.json"),
    Command("bench-dp", 8, "steps that data-parallel ranks run for nothing: vLLM's waves beside step sync",
            ("lab/bench/dp",), WRITE, result="dp.json"),
    Command("bench-observer", 1, "what counting a request, a scrape and an answer to the dashboard cost the router",
            ("lab/bench/observer",), WRITE, result="observer.json"),
    Command("bench-tenants", 1, "what 10,000 tenants cost a router: keys, admission, shares, reading their document",
            ("lab/bench/tenants",), WRITE, result="tenants.json"),
    Command("bench-adapters", 1, "how often engines fetch another LoRA adapter: 1,000 over 8P8D with 64 places each, beside who "
            "knows what is asked for most", ("lab/bench/adapters",), WRITE, result="adapters.json"),
    Command("bench-operator", 5, "the operator on fake nodes: 1,000 engine pods of one service, then 100 services of 10",
            ("lab/bench/operator",), root=True, result="operator.json"),
    Command("bench-operator-services", 12, "the operator's memory and time with 1,000 services of two pods on fake nodes",
            ("lab/bench/operator", "--pods", "10", "--services", "1000", "--per-service", "2"), root=True,
            result="operator_services.json"),
    Command("bench-operator-groups", 3, "the operator with 240 instances of two pods on fake nodes, where all fit and where "
            "some do not", ("lab/bench/operator", "--groups"), root=True, result="operator_groups.json"),
    Command("bench-planner", 15, "the planner beside HPA, static counts and perfect foresight on a sinusoid and two traces "
            "(`--traces FOLDER`), and the simulation beside real engines of this host; `--parts simulated` or "
            "`--parts calibration` alone, results are merged", ("lab/bench/planner",), WRITE, result="planner.json"),
    Command("drill", 18, "an hour of traffic in six minutes on a real operator, real routers and a real API server, with engines "
            "that work as the simulation says, beside the simulation; then again while the operator is killed, the API server is "
            "away for a minute and two engines die. `--parts calm` or `--parts faults` alone, `--family`, `--seed`, `--faster n`",
            ("lab/bench/drill",), WRITE, root=True, profile="light", result="drill.json"),
    Command("bench-policies", 1, "what the router's policies are worth on a trace (`FILE`; without one on made-up "
            "conversations, and nothing is written), with and without caches that are told, and what a choice costs", ("lab/bench/policies",), env={}, result="policies.json"),
    Command("check-gpu", 5, "what xpyd does on a GPU, without vLLM: [the first day on a GPU](gpu.md) says what each figure is",
            ("-m", "lab.gpu"), env=CHECKOUT, result="gpu.json"),
    Command("check-gpu-engines", 10, "real vLLM engines on one GPU, 1P1D beside a plain engine: equal answers, times by prompt length, "
            "clients that leave; [what each part shows](gpu.md#real-engines)", ("-m", "lab.gpu_engines"), (("--write",),), env=CHECKOUT,
            result="gpu_engines.json"),
    Command("scripted-device", 4, "1P1D beside one engine on a scripted device with a real one's rates: vLLM's scheduler and our "
            "connector as they are, no GPU, no bytes", ("-m", "lab.scripted_device"), WRITE, env=CHECKOUT,
            result="scripted_device.json"),
    Command("compare-times", 1, "what `make test` costs beside another commit, from files that `CI_TIMES` named "
            "([decision 0023](../decisions/0023-what-ci-costs.md))", ("lab/tools/compare_times.py",), result="ci.json"),
)

CAMPAIGNS: Final = (
    campaign("buddy", 1, "a million operations on the buddy allocator, each checked against a map of the space",
             ("lab/campaigns/buddy.py",), short="thousands", result="buddy.json"),
    campaign("pairs", 1, "memory and file descriptors of an engine by peer that it has met", ("lab/campaigns/pairs.py",),
             result="campaign_pairs.json"),
    campaign("http", 5, "malformed, slow, split, pipelined and smuggling HTTP: 20 seeds, 20,000 connections",
             file="test_http.py", timeout=1800, short="a few seeds", result="campaign_http.json"),
    campaign("queue", 5, "a million messages through the broadcast queue", file="test_queue.py", timeout=3600,
             anew=".cache/campaign_queue.json", short="thousands", result="campaign_queue.json"),
    campaign("turns", 30, "300 conversations whose KV is moved from decode to prefill while engines stand still, are killed and "
             "clients leave", ("lab/campaigns/turns.py",), usual=(("--count", "300", "--write"),), short="a kill in a pull",
             result="campaign_turns.json"),
    campaign("tenants", 65, "fifty tenants of four routers for an hour: whether each gets its tokens, and whether a flood by one "
             "moves another's first token", ("lab/campaigns/tenants.py",), usual=(("--write",),), env=SUPPORT,
             short="each rule by itself", result="campaign_tenants.json"),
    campaign("zero", 60, "200 times from no instances to 1P1D and back on a real operator, real routers and a real API server: "
             "what is lost, how long a wake takes, how many it starts", ("lab/campaigns/zero.py",), usual=(("--write",),),
             root=True, profile="light", env=SUPPORT, short="each step by itself", result="campaign_zero.json"),
    campaign("planner", 60, "200 scenarios of ten families of traffic whose seed is drawn: the planner beside fixed counts, "
             "an oracle that learns of a rise when it comes, and rivals tuned on other seeds; square waves for a day",
             ("lab/campaigns/planner",), usual=(("--write",),), short="one of two families", result="campaign_planner.json"),
    campaign("gateways", 12, "10,000 streams through nginx and through HAProxy while engines of decode are killed every ten "
             "seconds; how much later the first chunk comes; two services with weights",
             ("lab/campaigns/gateways.py", "--built", "{gateways}"), usual=(("--write",),), extras=("gateways",),
             env=SUPPORT, short="a hundred streams", result="campaign_gateways.json"),
    campaign("modes", 4, "put_async, put, get, and decode's buffer, on three real engines", file="test_modes.py",
             short="between connectors without engines"),
    campaign("failures", 5, "rows of [the failure table](../protocols/kv.md#failures): real engines that are stopped, killed, "
             "started again", file="test_failures.py", short="most other rows"),
    campaign("arm64", 10, "images for amd64 and arm64, built twice; those of arm64 run under emulation",
             ("lab/campaigns/arm64.py",), root=True, result="campaign_arm64.json",
             short="the amd64 ones, and what a build for arm64 asks of compilers, locks and files"),
    campaign("files", 6, "700 streams at once on a service of `xpyd up` that may open 1,024 files, also while an engine is "
             "killed", file="test_file_limits.py", timeout=1200, short="the same limits with scripted engines",
             result="campaign_files.json"),
    campaign("long", 7, "a prefill of five minutes, ten load timeouts long, on two real engines", file="test_long_prefill.py",
             timeout=1500, short="one of 14 seconds with a load timeout of 3; 128k tokens without engines",
             result="campaign_long.json"),
    campaign("gang", 15, "two instances of two pods where three pods have a place, on a fake node: kube-scheduler alone, and "
             "with the plugin [coscheduling](../groups.md) in it and an operator that is told so; ten minutes are the "
             "scheduler's first build", file="test_gang.py", timeout=3600, root=True, short="the pure part",
             result="campaign_gang.json"),
    campaign("kueue", 20, "services whose pods queue at a real [Kueue](../kueue.md), in groups and one by one, on a fake node: "
             "too little quota, a deleted pod, preemption; 15 minutes are Kueue's first build", file="test_kueue.py",
             timeout=3600, root=True, short="the pure part", result="campaign_kueue.json"),
    campaign("walk", 30, "the life of a service on a whole cluster with real engines, as the docs go: check, apply, ask, describe, "
             "scale, edit, break, a core that is stopped, an upgrade of the operator, delete, an instance of two pods",
             file="cluster/walk.py", timeout=3600, root=True, profile="full", short="each step by itself",
             result="campaign_walk.json"),
    campaign("zero-cluster", 40, "five times from no instances to 1P1D and back on a whole cluster with real engines, with images "
             "[fetched ahead](../planner.md#a-first-answer-soon)", file="cluster/zero.py", timeout=5400, root=True,
             profile="full", short="with scripted pods", result="campaign_zero_cluster.json"),
    campaign("groups-cluster", 40, "an [instance of two pods](../groups.md) on a whole cluster, real engines: TP2 over two pods "
             "prefills for TP1; strangers at its pods; a killed engine, an evicted pod, a drained node with two groups, a lost "
             "kubelet, under traffic", file="cluster/groups.py", timeout=3600, root=True, profile="full",
             short="the same with scripted pods, and with engines of `xpyd up`", result="campaign_groups_cluster.json"),
    campaign("group-ranks-cluster", 20, "data-parallel ranks with shared experts over two pods, as prefill and as decode, on a "
             "whole cluster: a pod cut off under traffic, a killed rank", file="cluster/group_ranks.py", timeout=3600,
             root=True, profile="full", short="the same with `xpyd up` and stand-ins for engines",
             result="campaign_group_ranks_cluster.json"),
    campaign("ipv6", 10, "a cluster without IPv4: API server, node, pods, Services, engines; requests while pods come and go",
             file="cluster/ipv6.py", timeout=900, root=True, profile="full",
             short="the same tests on a cluster of both families", result="campaign_ipv6.json"),
    campaign("service", 15, "kill -9 of each process of a service of `xpyd up`, in both roles; schemathesis with 100 requests "
             "of each operation", ("-m", "pytest", "-s", "tests/component/test_service_under_load.py",
                                   "tests/component/test_router_clients.py", "--timeout", "1800"),
             env={"VICTIMS": "all", "EXAMPLES": "100"}, short="each kind of process once, 6 requests of each"),
    campaign("upgrade", 30, "xpyd itself is upgraded under load on a whole cluster: from the release before, to an artificial "
             "next one that is not compatible, and back", file="cluster/upgrade.py", timeout=3600, root=True, profile="full",
             short="the same with engines of `xpyd up`, and with scripted pods", result="campaign_upgrade.json"),
    Command("mutants", 7, "breaks laws on purpose, one by one, and says whether the tests notice", ("-m", "lab.mutation.laws"),
            env={}, short="that every row fits"),
    Command("mutation", 150, "breaks lines that are drawn, 200 for each of three seeds, and says where no test notices; "
            "`--changed` those of a branch", ("-m", "lab.mutation.sample"),
            (("--sample", "200", "--seed", "101", "--seed", "102", "--seed", "103"),), env={}, result="mutation.json",
            extras=("mutation",)),
    campaign("fuzz", 15, "what is written in C, [fuzzed under the sanitizers](sanitizers.md); `--seconds 3600 --seed 7` for "
             "each of nine entry points", ("scripts/sanitize.py", "fuzz"), usual=(("--seconds", "300"),), extras=("compiler",),
             short="half a minute for each of nine entry points"),
    campaign("fleet", 10, "a rollout of 96P144D with scripted engines that take 12 s to start, before a real API server: same "
             "KV, other KV", ("-m", "pytest", "-s", "tests/kube/test_fleet.py", "-k", "batches", "--timeout", "3600"),
             env={"XPYD_FLEET": "96P144D", "XPYD_FLEET_START_S": "12",
                  "XPYD_FLEET_RESULTS": "bench/results/campaign_fleet.json"}, root=True, profile="light",
             short="8P12D; the whole fleet simulated, with 60 s", result="campaign_fleet.json"),
    campaign("stores", 10, "vLLM's offloading, Mooncake's store and LMCache beside our connector on both roles: equal answers, "
             "prefixes from the store", file="test_stores.py", timeout=900, extras=("stores",),
             env={"XPYD_STORES_SITE": "{stores}/site"}, short="a store of the tests, at once and late",
             result="campaign_stores.json"),
    campaign("speculation", 20, "prefill and decode that draft alike, otherwise, or alone: EAGLE, EAGLE3, MTP, a draft model, "
             "n-grams, suffixes; accepted drafts beside one engine's", file="test_speculation.py", timeout=1200,
             extras=("suffix",), env={"PYTHONPATH": "{suffix}/site"}, result="campaign_speculation.json",
             short="EAGLE on both and on decode alone, n-grams on decode; the rest without engines"),
    campaign("sampled", 4, "the distribution of sampled streams that go on: 2,000 of a toy model with four planted errors, "
             "2,000 of real engines", ("lab/campaigns/sampled.py",), usual=(("--scripted",), ("--real",)),
             short="all of the toy model, 200 over sockets", result="campaign_sampled.json"),
    campaign("parallel", 10, "tensor-parallel engines, mp and Ray: eight processes at full speed (four processors, or "
             "patience)", file="test_parallel.py", short="some of it"),
    campaign("unequal", 20, "prefill and decode of unequal tensor and pipeline sizes, MQA, MLA, fp8, windows",
             file="test_unequal.py", short="the same without engines", result="campaign_parallel.json"),
    campaign("models", 45, "models with windows or states beside full attention: 49 prompts one by one, eight at once, growing "
             "prefixes, preemptions; each array's data ruined, with sums and without; both policies, killed engines, clients "
             "that leave, streams that go on elsewhere", file="test_models.py", timeout=1800,
             short="11 prompts of three models; everything by hand with vLLM's own block managers",
             result="campaign_models.json"),
    campaign("scenarios", 30, "random hand-overs of KV with faults, stops and kills; 5 minutes without engines, the rest on "
             "real ones", ("lab/campaigns/scenarios.py",), usual=(("--scripted", "1000", "--real", "1000"),), anew="--fresh",
             short="50", result="campaign_scenarios.json"),
    campaign("scenarios-models", 30, "the same with a model of windows and one of states, 500 on real engines each, side by "
             "side", ("lab/campaigns/scenarios.py", "--real", "500"), anew="--fresh", together=True,
             usual=(("--model", "tiny-gemma-3"), ("--model", "tiny-granite")),
             result="campaign_scenarios_models.json"),
    campaign("mixed", 31, "a mixed load at half of what is possible", ("lab/campaigns/mixed.py",), short="20 seconds",
             result="campaign_mixed.json"),
    campaign("router", 40, "kills at random points of streams, clients that leave; a minute scripted, the rest on real engines",
             ("lab/campaigns/router.py",), usual=(("--scripted",), ("--real",)), result="campaign_router.json",
             short="100 scripted and 5 real kills, 400 scripted and 100 real leaving clients"),
    campaign("groups", 85, "members of a group: every size up to 16 members through vLLM's own parser, more states of their "
             "rounds ([protocol](../protocols/group.md)), random ways with many faults; real engines with data-parallel ranks "
             "over two members, as decode and as prefill; with tensor or data-parallel ranks in networks of their own (root), "
             "each member killed, stopped and cut off, idle and in mid-answer, and the server of one stopped alone",
             file="test_groups.py test_group_ranks.py test_group_faults.py", timeout=3600, result="campaign_group_faults.json",
             short="eight sizes, two members with a fault, 30 random ways; ranks over members with stand-ins for engines"),
    campaign("dp", 60, "steps of data-parallel ranks: larger models of the protocol, 10,000 requests over each link, 15 killed "
             "or stopped ranks", file="test_dp.py", timeout=7200, anew=".cache/campaign_dp.json", result="campaign_dp.json",
             short="small models, 250 requests and a kill for each link"),
    campaign("scale", 100, "scale steps and role switches of `xpyd up` under load, also of instances of two members; seconds "
             "simulated, the rest on real engines", ("lab/campaigns/scale.py",), usual=(("--simulated", "--real", "--groups"),),
             anew="--fresh", short="thousands simulated; 6 real steps, 5 real switches", result="campaign_scale.json"),
    campaign("away", 45, "half an hour of traffic while operator and API server are away", file="cluster/away.py",
             timeout=3600, root=True, profile="full", short="a minute of each", result="campaign_away.json"),
)

OTHERS: Final = (
    Command("campaigns", sum(each.minutes for each in CAMPAIGNS), "all campaigns one after the other, and their figures beside their goals; goes on where it ended "
            "(`--fresh`, `--only NAMES`, `--table`)", ("-m", "lab.campaigns"), env={}),
    Command("strangers", 1, "what strangers without a key cost a router; a line per attack", ("lab/campaigns/strangers.py",)),
    *(Command(f"cluster-{name}", 1, about, ("-m", "testcluster", name)) for name, about in (
        ("up", "start a Kubernetes for hand work (`--profile light|full`, `--kwok`, `--dir`, `--ipv6`)"),
        ("down", "remove it, whatever is left of it"), ("status", "say what of it runs"),
        ("build", "build its programs alone: ten minutes, once"))),
    Command("dashboard-picture", 3, "docs/pictures/dashboard.png anew, from a router under load",
            ("lab/tools/dashboard_picture.py",), extras=("browser",)),
    Command("sizes", 1, "lines of code by area, at another commit and now (`--base REV`)", ("lab/tools/sizes.py",), env={}),
    Command("kv-sources", 1, "digests of how versions of vLLM write KV, for tests/data/kv_sources.json",
            ("lab/tools/kv_sources.py",)),
    Command("extras", 10, "install what some commands need besides; without a name, say which there are",
            ("-m", "lab.extras"), env={}),
)

COMMANDS: Final = {command.name: command for command in (*BENCHES, *CAMPAIGNS, *OTHERS)}
