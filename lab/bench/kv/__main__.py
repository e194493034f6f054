"""Our links beside what the machine can do and what others have: ``bench-kv``.

All contenders move the same 64 MiB, in blocks of 16 KiB to 4 MiB, from packed copies in one process to scattered places in
another. They run in one network namespace with the same congestion control, in rounds: each round gives every contender one
turn with every size, one after the other. A ratio is the median over the rounds of (ours / theirs) in GB/s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lab.bench.charts import log_lines
from peer import BLOCKS

HERE = Path(__file__).parent
RESULTS = HERE.parents[2] / "bench/results"
SIZE = 64 << 20
OURS = ("ours_tcp", "ours_shm", "ours_nixl")
THEIRS = ("memcpy", "raw_tcp", "gloo_blocks", "gloo_packed", "nixl_tcp", "nixl_read_tcp", "nixl_host", "mooncake_tcp")
START_S = 60.0


class Failed(Exception):
    """A contender does not work here; says why."""


class Process:
    """One side."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in end()
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
                                         env=env, cwd=HERE)

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self, *, json_only: bool = False) -> str:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if not json_only or line.startswith("{"):
                return line.strip()
        self._log.seek(0)
        raise Failed(f"ended with {self._process.wait()}: {self._log.read()[-600:]}")

    def cpu_s(self) -> float:
        """Seconds that all its threads have run (the process's clock, as clock_getcpuclockid(3) makes it)."""
        return time.clock_gettime((~self._process.pid << 3) | 2)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


class Pair:
    """A contender."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        self._sides: list[Process] = []
        env = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))}
        try:
            if name in ("memcpy", "raw_tcp"):
                self._raw(args.raw, env)
            else:
                theirs = name.startswith(("nixl", "mooncake"))
                if name == "ours_nixl":  # NIXL's packages, behind those of this environment
                    [site] = args.rivals.parent.parent.glob("lib/python3.*/site-packages")
                    env["PYTHONPATH"] += os.pathsep + str(site)
                self._python(str(args.rivals if theirs else sys.executable), env)
        except BaseException:
            self.end()
            raise

    def _raw(self, raw: Path, env: dict[str, str]) -> None:
        if self.name == "memcpy":
            self._sides = [Process([str(raw), "memcpy", str(SIZE)], env)]
        else:
            self._sides = [Process([str(raw), "send", str(SIZE)], env)]
            self._sides.append(Process([str(raw), "receive", str(SIZE), self._sides[0].hear()], env))
        self._sides[-1].hear()

    def _python(self, python: str, env: dict[str, str]) -> None:
        self._sides = [Process([python, "peer.py", self.name, role, str(SIZE)], env) for role in "pd"]
        p, d = self._sides
        said = [side.hear(json_only=True) for side in self._sides]
        p.say(said[1])
        d.say(said[0])
        for side in self._sides:
            while side.hear() != "met":
                pass

    def turn(self, block: int, *, cover: int, busy: bool) -> tuple[float, float]:
        """Seconds, and seconds of processor of both sides; of ours with what was done beforehand."""
        early = self._sides[0].cpu_s()
        if len(self._sides) == 2 and self.name != "raw_tcp":
            self._sides[0].say(f"{block} {cover} {int(busy)}")
            while self._sides[0].hear() != "ready":
                pass
        before = early if self.name in OURS else self._sides[0].cpu_s()
        raw = self.name in ("memcpy", "raw_tcp")
        self._sides[-1].say(f"{block} {int(busy)}" if raw else f"{block} {cover} {int(busy)}")
        seconds, right, used = self._sides[-1].hear().split()
        others = self._sides[0].cpu_s() - before if len(self._sides) > 1 else 0.0
        if right != "1":
            raise Failed(f"{self.name}: wrong bytes with blocks of {block}")
        return float(seconds), float(used) + others

    def end(self) -> None:
        for side in self._sides:
            side.end()


def begin(args: argparse.Namespace) -> tuple[list[Pair], dict[str, str]]:
    """The contenders that work here, and why others do not."""
    pairs: list[Pair] = []
    absent: dict[str, str] = {}
    for name in (*OURS, *THEIRS):
        if args.only and name not in args.only:
            continue
        if (name.startswith(("nixl", "mooncake")) or name == "ours_nixl") and not args.rivals:
            absent[name] = "not installed"
            continue
        try:
            pairs.append(Pair(name, args))
        except (Failed, OSError) as error:
            if name in OURS:
                raise
            absent[name] = str(error)[-300:]
        print(f"  {name}: {'runs' if name not in absent else 'absent: ' + absent[name][-120:]}", flush=True)
    return pairs, absent


def measure(pairs: list[Pair], rounds: int, *, busy: bool) -> dict[str, dict[int, list[tuple[float, float]]]]:
    """By contender and block: (seconds, processor seconds) of each round.

    Ours with checksums has "+sums" in its name, and "_late" where prefill makes none of them beforehand.
    """
    found: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for at in range(rounds + 1):  # the first warms up
        for block in BLOCKS:
            for pair in pairs:
                for cover in covers(pair.name, busy=busy):
                    taken = pair.turn(block, cover=cover, busy=busy)
                    if at:
                        name = pair.name + ("", "+sums", "+sums_late")[cover]
                        found.setdefault(name, {}).setdefault(block, []).append(taken)
        print(f"  {'busy' if busy else 'idle'}: round {at} of {rounds}", flush=True)
    return found


def covers(name: str, *, busy: bool) -> tuple[int, ...]:
    """With which checksums a contender has its turns."""
    if name not in OURS:
        return (0,)
    if name == "ours_nixl":
        return () if busy else (0, 1)
    return (1,) if busy else (0, 1, 2)


def ratio(found: dict[str, dict[int, list[tuple[float, float]]]], ours: str, *theirs: str) -> dict[int, float]:
    """By block: median over the rounds of theirs / ours in seconds; of several, against the best of each round."""
    out = {}
    names = [name for name in theirs if name in found]
    if not names or ours not in found:
        return {}
    for block in BLOCKS:
        best = [min(found[name][block][n][0] for name in names) for n in range(len(found[ours][block]))]
        out[block] = statistics.median(other / mine[0] for other, mine in zip(best, found[ours][block], strict=True))
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--raw", type=Path, required=True, help="the program made of raw.c")
    parser.add_argument("--rivals", type=Path, help="the interpreter that has NIXL and Mooncake")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--idle", action="store_true", help="not beside threads that compute")
    args = parser.parse_args()
    if args.write and (args.idle or args.only):
        parser.error("only a whole run is written")
    load = os.getloadavg()[0]
    pairs, absent = begin(args)
    try:
        idle = measure(pairs, args.rounds, busy=False)
        for name, row in table(idle).items():
            print(f"  {name:24}", *(f"{one['gb_per_s']:7.2f}" for one in row.values()),
                  " cpu s/GB", *(f"{one['cpu_s_per_gb']:6.3f}" for one in row.values()), flush=True)
        busy = measure(pairs, max(3, args.rounds // 3), busy=True) if not args.idle else {}
        for name, row in table(busy).items():
            print(f"  {name:24}", *(f"{one['gb_per_s']:7.2f}" for one in row.values()),
                  " cpu s/GB", *(f"{one['cpu_s_per_gb']:6.3f}" for one in row.values()), flush=True)
    finally:
        for pair in pairs:
            pair.end()
    ratios = {
        "tcp_vs_raw": ratio(idle, "ours_tcp", "raw_tcp"),
        "tcp_sums_vs_raw": ratio(idle, "ours_tcp+sums", "raw_tcp"),
        "shm_vs_memcpy": ratio(idle, "ours_shm", "memcpy"),
        "shm_sums_vs_memcpy": ratio(idle, "ours_shm+sums", "memcpy"),
        "shm_vs_nixl": ratio(idle, "ours_shm+sums", "nixl_host"),
        "shm_bare_vs_nixl": ratio(idle, "ours_shm", "nixl_host"),
        "shm_late_vs_nixl": ratio(idle, "ours_shm+sums_late", "nixl_host"),
        "nixl_link_vs_nixl": ratio(idle, "ours_nixl", "nixl_tcp", "nixl_read_tcp"),
        "nixl_link_sums_vs_nixl": ratio(idle, "ours_nixl+sums", "nixl_tcp", "nixl_read_tcp"),
        "tcp_late_vs_raw": ratio(idle, "ours_tcp+sums_late", "raw_tcp"),
        "tcp_late_vs_gloo": ratio(idle, "ours_tcp+sums_late", "gloo_blocks", "gloo_packed"),
        "tcp_late_vs_nixl": ratio(idle, "ours_tcp+sums_late", "nixl_tcp"),
        "tcp_vs_gloo": ratio(idle, "ours_tcp+sums", "gloo_blocks", "gloo_packed"),
        "tcp_vs_nixl": ratio(idle, "ours_tcp+sums", "nixl_tcp"),
        "tcp_vs_mooncake": ratio(idle, "ours_tcp+sums", "mooncake_tcp"),
        "busy_tcp_vs_idle": across(busy, idle, "ours_tcp+sums"),
        "busy_shm_vs_idle": across(busy, idle, "ours_shm+sums"),
        "busy_tcp_vs_raw": ratio(busy, "ours_tcp+sums", "raw_tcp"),
        "busy_shm_vs_nixl": ratio(busy, "ours_shm+sums", "nixl_host"),
        "busy_tcp_vs_nixl": ratio(busy, "ours_tcp+sums", "nixl_tcp"),
    }
    result: dict[str, Any] = {}
    for name, by_block in ratios.items():
        if by_block:
            result[name] = round(statistics.median(by_block.values()), 3)
            result[f"{name}_min"] = round(min(by_block.values()), 3)
    result |= {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release().split('-')[0]}",
        "congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "load_before": round(load, 1), "bytes": SIZE, "rounds": args.rounds, "absent": absent,
        "ratios_by_block": {name: {str(block): round(value, 3) for block, value in one.items()}
                            for name, one in ratios.items()},
        "idle": table(idle), "busy": table(busy),
    }
    print(json.dumps({name: value for name, value in result.items() if isinstance(value, float)}, indent=1))
    if args.write:
        (RESULTS / "kv.json").write_text(json.dumps(result, indent=1) + "\n")
        (RESULTS / "kv.svg").write_text(log_lines([(f"GB/s, {title}", {
            name: [(block, value["gb_per_s"]) for block, value in zip(BLOCKS, line.values(), strict=True)]
            for name, line in table(found).items()}) for title, found in (
                ("idle", idle), ("beside a thread that computes in each process", busy))],
            {block: f"{block >> 10} KiB" for block in BLOCKS}))


def across(one: dict[str, dict[int, list[tuple[float, float]]]], other: dict[str, dict[int, list[tuple[float, float]]]],
           name: str) -> dict[int, float]:
    """By block: median GB/s of one condition / of another."""
    if name not in one or name not in other:
        return {}
    return {block: statistics.median(s for s, _ in other[name][block]) / statistics.median(s for s, _ in one[name][block])
            for block in BLOCKS}


def table(found: dict[str, dict[int, list[tuple[float, float]]]]) -> dict[str, dict[str, dict[str, float]]]:
    """By contender and block: median GB/s and processor seconds per GB (threads that only compute included)."""
    return {name: {str(block): {
        "gb_per_s": round(SIZE / 1e9 / statistics.median(seconds for seconds, _ in rows), 2),
        "cpu_s_per_gb": round(statistics.median(cpu for _, cpu in rows) / (SIZE / 1e9), 3)}
        for block, rows in by_block.items()} for name, by_block in found.items()}


if __name__ == "__main__":
    main()
