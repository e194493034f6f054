"""What mode put_async adds to a prefill step, by the engine's own clock; also while decode is stopped, or dead."""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from client import prompt_of
from engines import Engine
from figures import interval, milliseconds, pairs, ratios, spread

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


def computing(engine: Engine) -> Path:
    """Where the kernel says how long the thread that computes an engine's steps ran and waited for a processor."""
    for pid in engine.group.pids():
        if "Worker" in Path(f"/proc/{pid}/comm").read_text():
            return Path(f"/proc/{pid}/task/{pid}/schedstat")
    raise RuntimeError(f"{engine.name} has no worker process")


def waited_s(thread: Path) -> float:
    """Seconds that it was ready to run and did not."""
    return int(thread.read_text().split()[1]) / 1e9


class Steps:
    """A leg, a plain request of the same engine, and one of another engine (``control``), in turns.

    Each round takes them in an order of its own. ``rests``: pause after one of them, in seconds; after one of the control
    engine as long as its processes look for more work and would take processors from what comes next.
    """

    def __init__(self, prefill: Engine, control: Engine, peer: legs.Peer, draw: random.Random,
                 rests: Mapping[str, float]) -> None:
        self._prefill, self._control, self._peer = prefill, control, peer
        self._draw, self._rests = draw, rests
        self._thread = computing(prefill)

    def rounds(self, count: int, decode: Engine | None) -> dict[str, list[float]]:
        """Seconds of prefill by what was asked; with "waited " before it, those that prefill's thread waited meanwhile.

        ``decode``: takes what is pushed, if it can.
        """
        with ThreadPoolExecutor(1) as pool:
            kinds: dict[str, Callable[[], float]] = {
                "leg": lambda: self._leg(pool, decode),
                "plain": lambda: prefill_s(self._prefill, prompt_of(TOKENS, self._draw)),
                "control": lambda: prefill_s(self._control, prompt_of(TOKENS, self._draw)),
            }
            found: dict[str, list[float]] = {name: [] for kind in kinds for name in (kind, f"waited {kind}")}
            for number in range(count + 1):
                for name in self._draw.sample(sorted(kinds), len(kinds)):
                    before = waited_s(self._thread)
                    seconds = kinds[name]()
                    waited = waited_s(self._thread) - before
                    time.sleep(self._rests[name])
                    if number:  # the first warms up
                        found[name].append(seconds)
                        found[f"waited {name}"].append(waited)
        return found

    def _leg(self, pool: ThreadPoolExecutor, decode: Engine | None) -> float:
        prompt, transfer = prompt_of(TOKENS, self._draw), TransferId(uuid.uuid4().hex)
        taker = None
        if decode is not None:
            params = legs.encode(legs.Leg(legs.VERSION, Role.DECODE, transfer, Attempt(1), 60.0))
            taker = pool.submit(decode.complete, prompt, 1, kv_transfer_params=params)
        params = legs.encode(legs.Leg(legs.VERSION, Role.PREFILL, transfer, Attempt(1), 60.0, self._peer))
        seconds = prefill_s(self._prefill, prompt, params)
        if taker is not None:
            taker.result(WAIT_S)
        return seconds


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
            rests: Mapping[str, float]) -> dict[str, Any]:
    """All three states of decode: ``count`` rounds while it lives, three fifths of them else. It is dead at the end.

    Raises:
        RuntimeError: decode's connector has not started, or an engine counts no prefill.
    """
    known = decode.record()
    if known is None:
        raise RuntimeError("decode's connector has not started")
    peer = legs.Peer(InstanceName(decode.name), known.incarnation, known.control)
    one, fewer = Steps(prefill, control, peer, draw, rests), count * 3 // 5
    found = {"alive": one.rounds(count, decode)}
    with stopped(decode):
        found["stopped"] = one.rounds(fewer, None)
    time.sleep(1.0)
    decode.kill()
    found["dead"] = one.rounds(fewer, None)
    return summary(found)


def summary(found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Legs against plain requests of the same engine and round; plain requests against the engine that has no peer."""
    out: dict[str, Any] = {}
    base = pairs(found["alive"]["plain"], found["alive"]["control"])
    for state, one in found.items():
        out[state] = {"leg_over_plain": ratios(one["leg"], one["plain"]),
                      "plain_over_control": ratios(one["plain"], one["control"]),
                      "waited_ms": {name: milliseconds(one[f"waited {name}"]) for name in ("leg", "plain")},
                      "prefill_ms": round(1000 * spread(one["plain"], 6)["median"], 1)}
        out[state] |= added("leg", pairs(one["leg"], one["plain"]))
        if state != "alive":
            out[state] |= added("others", pairs(one["plain"], one["control"]), base)
    return out


def added(to: str, values: Sequence[float], base: Sequence[float] = (1.0,)) -> dict[str, Any]:
    """What the median is above that of ``base``, as a share of it, and the interval."""
    return {f"added_to_{to}": round(median(values) / median(base) - 1, 4),
            f"added_to_{to}_interval": [round(end - 1, 4) for end in interval(values, base, 5)]}
