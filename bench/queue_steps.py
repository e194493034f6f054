"""The time between two decode steps with the broadcast queue under vLLM's executor, beside vLLM's own queue.

    make bench-queue-steps                                        all parts, into results/queue_steps.json
    python bench/queue_steps.py --part one_host --rounds 5        for a look; writes nothing

Two engines, which differ in the queue alone, with workers on one host or in two process sets, as an instance with
``pods: 2`` has them. In a round each gives one answer, one after the other, in an order that is drawn. A figure is the
median of the ratios within rounds, so that what else the machine does meets both.
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
from typing import Any, NamedTuple

import msgspec
import vllm
from engines import Engine
from processes import Group, free_port

from xpyd_sidecar.contract import launch
from xpyd_sidecar.contract.group import ENV_LIFE
from xpyd_sidecar.contract.launch import KvOptions

RESULTS = Path(__file__).parent / "results/queue_steps.json"
QUEUES = ("vllm", "xpyd")
SIZES = ("--num-gpu-blocks-override", "64", "--distributed-executor-backend", "mp")
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


class Part(NamedTuple):
    """Where an engine's workers are."""

    workers: int
    """Tensor-parallel ranks."""
    hosts: int = 1
    """Process sets."""


PARTS = {"one_worker": Part(1), "one_host": Part(2), "two_process_sets": Part(2, 2)}
"""With one worker two processors are as many as compute, as a GPU's host has them; else fewer."""


@contextlib.contextmanager
def engine(queue: str, part: Part, folder: Path) -> Iterator[Engine]:
    """An engine with this queue; it is ready when the caller has waited for it."""
    hosts = part.hosts
    port = free_port()
    life = f"{port:032x}"
    env = {launch.ENV_QUEUE: queue, "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    config = launch.kv_transfer_config(KvOptions(), "recompute") | {"engine_id": life}
    nodes = ("--nnodes", str(hosts), "--master-addr", "127.0.0.1", "--master-port", str(port))
    if hosts > 1:
        env[ENV_LIFE] = life
    args = (*SIZES, "--tensor-parallel-size", str(part.workers), "--kv-transfer-config", json.dumps(config),
            *(nodes if hosts > 1 else ()))
    rank = ("--node-rank", "0") if hosts > 1 else ()
    leader = Engine(f"{queue}-{hosts}", folder, connector=False, args=(*args, *rank), env=env, forked=False)
    with leader, contextlib.ExitStack() as stack:
        if hosts > 1:
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


def measure(name: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Both engines, round after round."""
    draw = random.Random(0)
    took: dict[str, list[float]] = {queue: [] for queue in QUEUES}
    with contextlib.ExitStack() as stack:
        both = {queue: stack.enter_context(engine(queue, PARTS[name], folder)) for queue in QUEUES}
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
            print(f"{name}, round {number} of {rounds}", flush=True)
    ratios = [ours / theirs for ours, theirs in zip(took["xpyd"], took["vllm"], strict=True)]
    return {
        "step_ratio": round(statistics.median(ratios), 4),
        "step_ratio_quartiles": [round(one, 4) for one in statistics.quantiles(ratios, n=4)],
        "step_ms": {queue: round(1000 * statistics.median(took[queue]), 3) for queue in QUEUES},
    }


def main() -> None:
    """Run it, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    parts = given.part or list(PARTS)
    load = os.getloadavg()[0]
    began = time.monotonic()
    found = {}
    for name in parts:
        with tempfile.TemporaryDirectory(prefix="xpyd-steps-") as folder:
            found[name] = measure(name, given.rounds, Path(folder))
    about = {"date": datetime.now(UTC).date().isoformat(), "rounds": given.rounds, "vllm": vllm.__version__,
             "python": platform.python_version(), "cpus": os.cpu_count() or 0, "load_before": round(load, 2),
             "seconds": round(time.monotonic() - began)}
    text = msgspec.json.format(msgspec.json.encode(found | about), indent=2).decode() + "\n"
    if given.write and given.rounds >= ROUNDS_MIN and len(parts) == len(PARTS):
        RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
