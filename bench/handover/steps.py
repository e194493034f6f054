"""What mode put_async adds to a prefill step, by the engine's own clock; also while decode is stopped, or dead."""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from client import prompt_of
from engines import Engine
from figures import ratios, spread

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Attempt, InstanceName, Role, TransferId

PREFILL = "vllm:request_prefill_time_seconds"
"""vLLM's histogram: from being scheduled to the first token."""
TOKENS = 1024
WAIT_S = 30.0


def prefill_s(engine: Engine, prompt: list[int], params: dict[str, Any] | None = None) -> float:
    """Prefill time of one request of one token."""
    count, total = engine.metric(f"{PREFILL}_count"), engine.metric(f"{PREFILL}_sum")
    engine.complete(prompt, 1, **({"kv_transfer_params": params} if params else {}))
    end = time.monotonic() + WAIT_S
    while engine.metric(f"{PREFILL}_count") == count:
        if time.monotonic() > end:
            raise RuntimeError(f"{engine.name} counts no prefill")
        time.sleep(0.02)
    return engine.metric(f"{PREFILL}_sum") - total


def rounds(prefill: Engine, control: Engine, peer: legs.Peer, decode: Engine | None, *, count: int,
           draw: random.Random, rest_s: float = 0.0) -> dict[str, list[float]]:
    """A leg, a plain request, and one of another engine, in turns. ``decode``: takes what is pushed, if it can.

    ``rest_s``: pause before each, in which the workers of the others fall idle.
    """
    found: dict[str, list[float]] = {"plain": [], "leg": [], "control": []}
    with ThreadPoolExecutor(1) as pool:
        for number in range(count + 1):
            prompt, transfer = prompt_of(TOKENS, draw), TransferId(uuid.uuid4().hex)
            taker = None
            time.sleep(rest_s)
            if decode is not None:
                params = legs.encode(legs.Leg(legs.VERSION, Role.DECODE, transfer, Attempt(1), 60.0))
                taker = pool.submit(decode.complete, prompt, 1, kv_transfer_params=params)
            params = legs.encode(legs.Leg(legs.VERSION, Role.PREFILL, transfer, Attempt(1), 60.0, peer))
            taken = {"leg": prefill_s(prefill, prompt, params)}
            if taker is not None:
                taker.result(WAIT_S)
            time.sleep(rest_s)
            taken["plain"] = prefill_s(prefill, prompt_of(TOKENS, draw))
            time.sleep(rest_s)
            taken["control"] = prefill_s(control, prompt_of(TOKENS, draw))
            if number:  # the first warms up
                for name, seconds in taken.items():
                    found[name].append(seconds)
    return found


@contextmanager
def stopped(engine: Engine) -> Iterator[None]:
    """All processes of an engine stand still."""
    pids = list(engine.group.pids())
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def measure(prefill: Engine, decode: Engine, control: Engine, count: int, draw: random.Random, *,
            rest_s: float = 0.0) -> dict[str, Any]:
    """All three states of decode; it is dead at the end."""
    known = decode.record()
    if known is None:
        raise RuntimeError("decode's connector has not started")
    peer = legs.Peer(InstanceName(decode.name), known.incarnation, known.control)
    found = {"alive": rounds(prefill, control, peer, decode, count=count, draw=draw, rest_s=rest_s)}
    with stopped(decode):
        found["stopped"] = rounds(prefill, control, peer, None, count=count // 2, draw=draw, rest_s=rest_s)
    time.sleep(1.0)
    decode.kill()
    found["dead"] = rounds(prefill, control, peer, None, count=count // 2, draw=draw, rest_s=rest_s)
    return summary(found)


def summary(found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Legs against plain requests of the same engine and round; plain requests against the engine that has no peer."""
    out: dict[str, Any] = {}
    base = spread(ratios_of(found["alive"]["plain"], found["alive"]["control"]))["median"]
    for state, one in found.items():
        out[state] = {"leg_over_plain": ratios(one["leg"], one["plain"]),
                      "plain_over_control": ratios(one["plain"], one["control"]),
                      "prefill_ms": round(1000 * spread(one["plain"], 6)["median"], 1)}
        out[state]["added_to_leg"] = round(out[state]["leg_over_plain"]["median"] - 1, 4)
        if state != "alive":
            out[state]["added_to_others"] = round(out[state]["plain_over_control"]["median"] / base - 1, 4)
    return out


def ratios_of(ones: list[float], others: list[float]) -> list[float]:
    """Of pairs."""
    return [one / other for one, other in zip(ones, others, strict=True)]
