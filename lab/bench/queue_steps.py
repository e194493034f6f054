"""The time between two decode steps with the broadcast queue under vLLM's executor, beside vLLM's own queue.

    python -m lab bench-queue-steps                                        all parts, into results/queue_steps.json
    python -m lab bench-queue-steps --part bare --write               one of them, added to what is there
    python -m lab bench-queue-steps --part one_host --rounds 5        for a look; writes nothing

Two engines of two tensor-parallel workers each, which differ in the queue alone, on one host or with their workers in two
process sets as an instance with ``pods: 2`` has them. In a round each gives one answer, one after the other, in an order
that is drawn. A figure is the median of the ratios within rounds, so that what else the machine does meets both.

``bare``: vLLM's executor alone with one worker that sleeps for a step, each on a processor of its own (as root before
everything else on the machine): what the queue itself takes where processors are enough, as on a GPU's host.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import vllm
from engines import Engine
from executor_hosts import Host, hosts
from processes import Group, free_port

from xpyd_sidecar.contract import launch
from xpyd_sidecar.contract.group import ENV_LIFE
from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine.executor_queue.settings import QueueSettings

RESULTS = Path(__file__).parents[2] / "bench/results/queue_steps.json"
QUEUES = ("vllm", "xpyd")
SIZES = ("--tensor-parallel-size", "2", "--num-gpu-blocks-override", "64", "--distributed-executor-backend", "mp")
FOLLOWER = "xpyd_sidecar.engine.compat.follower"
TOKENS = 96
"""Of an answer."""
BETWEEN = "vllm:inter_token_latency_seconds"
PAUSE_S = 1.2
"""Between answers: readers of vLLM's queue look for messages for a second after the last one."""
READY_S, ANSWER_S = 300.0, 120.0
COUNTED_S = 5.0
"""After an answer, until the server has counted its last token."""
ROUNDS_MIN = 10
PARTS = {"one_host": 1, "two_process_sets": 2}
"""Of engines, and their process sets."""
BARE = "bare"
STEPS_MS = (2, 5, 20)
CALLS = 15
"""Of a round; its median counts."""
PRIORITY = 5


@contextlib.contextmanager
def engine(queue: str, sets: int, folder: Path) -> Iterator[Engine]:
    """An engine with this queue; it is ready when the caller has waited for it."""
    port = free_port()
    life = f"{port:032x}"
    env = {launch.ENV_QUEUE: queue, "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    config = launch.kv_transfer_config(KvOptions(), "recompute") | {"engine_id": life}
    nodes = ("--nnodes", str(sets), "--master-addr", "127.0.0.1", "--master-port", str(port))
    if sets > 1:
        env[ENV_LIFE] = life
    args = (*SIZES, "--kv-transfer-config", json.dumps(config), *(nodes if sets > 1 else ()))
    rank = ("--node-rank", "0") if sets > 1 else ()
    leader = Engine(f"{queue}-{sets}", folder, connector=False, args=(*args, *rank), env=env, forked=False)
    with leader, contextlib.ExitStack() as stack:
        if sets > 1:
            stack.callback(follower(leader).kill)
        yield leader


def follower(leader: Engine) -> Group:
    """The worker of the other process set."""
    command = leader.command
    at = command.index("--model")
    own = [*command[at:command.index("--host")], *command[command.index("--port") + 2:]]
    own[own.index("--node-rank") + 1] = "1"
    return Group([sys.executable, "-m", FOLLOWER, "--headless", "--api-server-count", "0", *own],
                 log=leader.folder / f"{leader.name}-follower.log", env=leader.env, name=f"follower of {leader.name}")


def step(one: Engine, prompt: list[int]) -> float:
    """Mean seconds between the tokens of an answer, as the engine core has stamped them.

    Not as they come to a client: with workers that spin, a server on few processors hands them over in bunches.
    """
    took, count = one.metric(f"{BETWEEN}_sum"), one.metric(f"{BETWEEN}_count")
    one.complete(prompt, TOKENS, timeout_s=ANSWER_S)
    end = time.monotonic() + COUNTED_S
    while (found := one.metric(f"{BETWEEN}_count") - count) < TOKENS - 1:
        if time.monotonic() > end:
            raise RuntimeError(f"{one.name}: {found:g} times between {TOKENS} tokens")
        time.sleep(0.05)
    return (one.metric(f"{BETWEEN}_sum") - took) / found


def measure(sets: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Both engines, round after round."""
    draw = random.Random(0)
    took: dict[str, list[float]] = {queue: [] for queue in QUEUES}
    with contextlib.ExitStack() as stack:
        both = {queue: stack.enter_context(engine(queue, sets, folder)) for queue in QUEUES}
        for one in both.values():
            one.wait_ready(READY_S)
        same = [one.complete(list(range(5, 69)), 32)["token_ids"] for one in both.values()]
        if same[0] != same[1]:
            raise RuntimeError(f"the engines answer differently: {same}")
        for number in range(rounds + 1):
            prompt = [draw.randrange(3, 500) for _ in range(64)]
            for queue in draw.sample(QUEUES, len(QUEUES)):
                time.sleep(PAUSE_S)
                found = step(both[queue], prompt)
                if number:  # the first round warms up
                    took[queue].append(found)
            print(f"{sets} process sets, round {number} of {rounds}", flush=True)
    ratios = [ours / theirs for ours, theirs in zip(took["xpyd"], took["vllm"], strict=True)]
    return {
        "step_ratio": round(statistics.median(ratios), 4),
        "step_ratio_quartiles": [round(one, 4) for one in statistics.quantiles(ratios, n=4)],
        "step_ms": {queue: round(1000 * statistics.median(took[queue]), 3) for queue in QUEUES},
    }


def first(host: Host) -> None:
    """Before everything else on this machine, where that is allowed."""
    with contextlib.suppress(PermissionError):
        for pid in (host.process.pid, *host.ask("workers")):
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setscheduler(int(task.name), os.SCHED_RR, os.sched_param(PRIORITY))


def measure_bare(rounds: int) -> dict[str, Any]:
    """What a call of a worker takes beyond the step itself."""
    draw, found = random.Random(0), dict[str, Any]()
    with hosts(1, 1, None) as (theirs,), hosts(1, 1, QueueSettings()) as (ours,):
        both = {"vllm": theirs, "xpyd": ours}
        for host in both.values():
            first(host)
        for step_ms in STEPS_MS:
            took: dict[str, list[float]] = {queue: [] for queue in QUEUES}
            for _ in range(rounds):
                for queue in draw.sample(QUEUES, len(QUEUES)):
                    time.sleep(PAUSE_S)
                    took[queue].append(1000 * statistics.median(both[queue].ask("timed", CALLS, step_ms / 1000)))
            ratio = statistics.median(mine / other for mine, other in zip(took["xpyd"], took["vllm"], strict=True))
            found[f"step_of_{step_ms}_ms"] = {
                "step_ratio": round(ratio, 4),
                "step_ms": {queue: round(statistics.median(took[queue]), 3) for queue in QUEUES}}
            print(f"bare, steps of {step_ms} ms: {ratio:.4f}", flush=True)
    return found


def main() -> None:
    """Run it, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=(*PARTS, BARE), action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    parts = given.part or [*PARTS, BARE]
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if given.write and RESULTS.exists() else {}
    for name in parts:
        load, began = os.getloadavg()[0], time.monotonic()
        with tempfile.TemporaryDirectory(prefix="xpyd-steps-") as folder:
            figures = measure_bare(given.rounds) if name == BARE else measure(PARTS[name], given.rounds, Path(folder))
        found[name] = figures | {"date": datetime.now(UTC).date().isoformat(), "rounds": given.rounds,
                                 "load_before": round(load, 2), "seconds": round(time.monotonic() - began)}
    found |= {"vllm": vllm.__version__, "python": platform.python_version(), "cpus": os.cpu_count() or 0}
    text = msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"
    if given.write and given.rounds >= ROUNDS_MIN:
        RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
