"""What a request costs in our router and in others of the field: side by side in one run, in interleaved rounds.

    python -m lab bench-router                         everything, some minutes, into bench/results/router.json and .svg
    python -m lab bench-router --rounds 3 …          shorter, for a look (results are printed alone)

    clients (load.c) ──▶ router ──▶ engines (engine.c): 1 prefill and 2 decode instances, one token per stream and step

In each round every router serves the same, one right after the other, in an order that is drawn anew each time: answers of
128 chunks, answers of 8 chunks, and one client alone whose time to the first event counts. Processor time is that of the
router's own processes. Then 1,000 streams at once go through ours.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import contenders
import msgspec
from contenders import Contender, Engines
from heart import Heart
from lab.bench.charts import Bar, bars
from measures import cpu_s, figures, peak_rss_mb
from processes import Group, free_port

RESULTS = Path(__file__).resolve().parents[3] / "bench/results"
STEP_US = 5000
LIMIT_S = 60
PROMPT = "What a router costs is seen best where engines cost nothing at all. " * 16
CROWD = 1000
CROWD_STEP_US = 40_000


class Shape(msgspec.Struct, frozen=True):
    """What is asked in a turn."""

    chunks: int
    streams: int
    requests: int


SHAPES = {128: Shape(128, 64, 192), 8: Shape(8, 64, 1600)}
ALONE = Shape(2, 1, 150)
ALL = Shape(128, CROWD, CROWD)


class Answers(msgspec.Struct):
    """What load.c prints."""

    requests: int
    failed: int
    reason: str
    first_us: tuple[int, int, int]
    seconds: float


def request(chunks: int) -> bytes:
    """A chat request of about 300 tokens, whole."""
    body = msgspec.json.encode({"model": contenders.MODEL, "messages": [{"role": "user", "content": PROMPT}],
                                "max_tokens": chunks, "temperature": 0, "stream": True})
    head = (f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {contenders.CLIENT_KEY}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n")
    return head.encode() + body


class Field:
    """The programs of one run."""

    def __init__(self, built: Path, folder: Path) -> None:
        self._built = built
        self._folder = folder
        self.step_us = STEP_US

    def engines(self, step_us: int) -> tuple[Group, Engines]:
        """Start them."""
        self.step_us = step_us
        ports = [free_port() for _ in range(3)]
        engines = Engines(tuple(ports[:1]), tuple(ports[1:]))
        group = Group([str(self._built / "engine"), str(step_us), "prefill", *map(str, engines.prefill), "decode",
                       *map(str, engines.decode)], log=self._folder / "engine.log")
        return group, engines

    def load(self, port: int, shape: Shape) -> Answers:
        """One turn. The streams begin over the time that one takes, so that they are at different places."""
        spread_us = shape.chunks * self.step_us
        command = [str(self._built / "load"), str(port), str(shape.streams), str(shape.requests), str(shape.chunks),
                   str(spread_us), str(LIMIT_S)]
        done = subprocess.run(command, input=request(shape.chunks), capture_output=True, check=True)
        return msgspec.json.decode(done.stdout, type=Answers)


class Rounds:
    """Interleaved rounds, and what came of them."""

    def __init__(self, field: Field, routers: Sequence[Contender], engines: Engines) -> None:
        self._field = field
        self._routers = list(routers)
        self._engines = engines
        self._dice = random.Random(1)
        self.cpu_ms: dict[int, dict[str, list[float]]] = {chunks: defaultdict(list) for chunks in SHAPES}
        self.first_us: dict[str, list[float]] = defaultdict(list)

    def warm(self) -> None:
        """Every connection is made and every path taken once before it counts."""
        for router in self._routers:
            for shape in (*SHAPES.values(), ALONE):
                self._right(router.name, self._field.load(router.port, shape))

    def one(self) -> None:
        """Each router once, in each shape, in an order of its own: who comes behind a program like itself finds more in
        the processor's caches.
        """
        for chunks, shape in SHAPES.items():
            for router in self._shuffled():
                before = cpu_s(router.group.pids())
                answers = self._right(router.name, self._field.load(router.port, shape))
                used = cpu_s(router.group.pids()) - before
                self.cpu_ms[chunks][router.name].append(used * 1000 / answers.requests)
        self.first_us["direct"].append(self._right("direct", self._field.load(self._engines.decode[0], ALONE)).first_us[1])
        for router in self._shuffled():
            self.first_us[router.name].append(self._right(router.name, self._field.load(router.port, ALONE)).first_us[1])

    def _shuffled(self) -> list[Contender]:
        return self._dice.sample(self._routers, len(self._routers))

    def _right(self, name: str, answers: Answers) -> Answers:
        if answers.failed:
            log = next((router.group.tail(2) for router in self._routers if router.name == name), "")
            raise RuntimeError(f"{name}: {answers.failed} of {answers.requests} answers failed: {answers.reason}\n{log}")
        return answers


def bench(built: Path, binaries: Path, folder: Path, rounds: int, only: Sequence[str], *, before: str) -> dict[str, Any]:
    """All of it; the figures. ``before``: the Python of another version of ours, empty where there is none."""
    field = Field(built, folder)
    with contextlib.ExitStack() as stack:
        group, engines = field.engines(STEP_US)
        stack.callback(group.kill)
        routers: list[Contender] = []
        ours = [("xpyd", {}, sys.executable), ("xpyd_error", {"failover": "error"}, sys.executable)]
        for name, settings, python in [*ours, ("xpyd_before", {}, before)] if before else ours:
            router, members, key = contenders.xpyd(name, folder, settings, python)
            stack.callback(router.group.kill)
            stack.enter_context(Heart(members, key, engines))
            routers.append(router)
        for make in (contenders.nginx, contenders.vllm_router, contenders.sglang_router):
            if only and make.__name__ not in only:
                continue
            router = make(engines, folder) if make is contenders.nginx else make(engines, folder, binaries)  # type: ignore[operator]
            stack.callback(router.group.kill)
            routers.append(router)
        turns = Rounds(field, routers, engines)
        turns.warm()
        for number in range(rounds):
            turns.one()
            shown = {chunks: {name: round(values[-1], 3) for name, values in sorted(each.items())}
                     for chunks, each in turns.cpu_ms.items()}
            print(f"round {number + 1} of {rounds}: ms per request {shown}", flush=True)
    return figures(turns.cpu_ms, turns.first_us) | crowd(field, folder) | beats()


def crowd(field: Field, folder: Path) -> dict[str, Any]:
    """1,000 streams at once through a fresh router of ours."""
    with contextlib.ExitStack() as stack:
        group, engines = field.engines(CROWD_STEP_US)
        stack.callback(group.kill)
        router, members, key = contenders.xpyd("crowd", folder, {})
        stack.callback(router.group.kill)
        stack.enter_context(Heart(members, key, engines))
        answers = field.load(router.port, ALL)
        if answers.failed:
            print(f"{CROWD} streams: {answers.failed} failed: {answers.reason}", flush=True)
        return {f"streams_{CROWD}_failed": answers.failed, f"streams_{CROWD}_seconds": answers.seconds,
                "rss_mb": round(peak_rss_mb(router.group.pids()), 1)}


def beats() -> dict[str, Any]:
    """1,000 instances beat; measured by a program of its own."""
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("beats.py"))], capture_output=True, text=True,
                          check=False)
    if done.returncode:
        raise RuntimeError(f"beats.py failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = msgspec.json.decode(done.stdout)
    return found


def chart(results: dict[str, Any]) -> str:
    """The absolute figures as bars."""
    def group(prefix: str, suffix: str = "") -> list[Bar]:
        names = ("xpyd", "xpyd_error", "xpyd_before", "nginx", "vllm_router", "sglang_router")
        keys = [(name, f"{prefix}{name}{suffix}") for name in names]
        return [Bar(name, results[key], results[f"{key}_p25"], results[f"{key}_p75"])
                for name, key in keys if key in results]

    return bars(f"Routers side by side, {results['date']} (median and quartiles of {results['rounds']} rounds)", [
        ("processor time per request with 128 chunks, ms", group("cpu_ms_", "_128")),
        ("processor time per request with 8 chunks, ms", group("cpu_ms_", "_8")),
        ("added to the time to the first token (median), µs", group("ttft_added_us_")),
    ])


def main() -> None:
    """Run it, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--built", type=Path, required=True, help="folder with the programs engine and load")
    parser.add_argument("--binaries", type=Path, required=True, help="bin folder of the environment with the other routers")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--before", default="", help="the Python of an environment with another version of xpyd")
    parser.add_argument("--only", nargs="*", default=(), help="of the other routers; vllm_router is always needed")
    parser.add_argument("--write", action="store_true", help="write bench/results/router.json and .svg")
    args = parser.parse_args()
    if args.rounds < 3:
        parser.error("--rounds: there are no quartiles of fewer than 3")
    began = time.monotonic()
    load = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory(prefix="xpyd-bench-") as folder:
        results = bench(args.built, args.binaries, Path(folder), args.rounds, args.only, before=args.before)
    about = contenders.versions(args.binaries)
    results |= about | {"rounds": args.rounds, "cpus": os.cpu_count() or 0, "load_before": load,
                        "took_s": round(time.monotonic() - began)}
    text = msgspec.json.format(msgspec.json.encode(results), indent=2).decode() + "\n"
    if args.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "router.json").write_text(text)
        (RESULTS / "router.svg").write_text(chart(results))
    print(text)


if __name__ == "__main__":
    main()
