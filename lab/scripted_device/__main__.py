"""1P1D on a scripted device beside one engine: ``python -m lab scripted-device``, into ``results/scripted_device.json``.

Prompts of six lengths one after the other, each plain and handed over; prompts of one length in a row, for the threads'
shares of a core; and decode's streams beside four that arrive at once, with a hand-over and without.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab.scripted_device import parameters, report

ENVIRON = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
RESULT = parameters.RESULTS / "scripted_device.json"
LENGTHS = tuple(tokens for tokens, _ in parameters.PLAIN_TTFT)
IN_A_ROW = 13
"""So many prompts for the threads' shares."""
STREAMS, STREAM_TOKENS, STREAM_PROMPT, ARRIVING = 4, 1200, 512, 4
MEMORY = ("stated", "room")
"""Of the device, that vLLM leaves to the connector: nothing, where the size of its cache is stated, as in the run that is
predicted; then it takes the least. Or as much as it asks for.
"""
SETTLE_S = 0.2
"""In which nothing more of a prompt happens, once it is over."""


def lengths(pair: Any, wanted: list[int], rounds: int) -> dict[str, Any]:
    """Figures by prompt length."""
    out = {}
    for tokens in wanted:
        plain, handed = [], []
        for _ in range(rounds):
            plain.append(pair.plain(tokens, 3).wait())
            before = pair.settled(SETTLE_S)
            pair.anew()
            answer = pair.handed(tokens, 3)
            times = answer.wait()
            counts = difference(pair.settled(SETTLE_S), before)
            handed.append(report.Handed(answer.began, times, counts))
            if again := counts["decode"].get("prompt tokens", 0):
                raise RuntimeError(f"decode computed {again:.0f} tokens of {tokens} itself: they were not handed over")
        out[str(tokens)] = report.length_figures(tokens, plain, handed)
        print(f"{tokens} tokens: {out[str(tokens)]['ttft_ms']} ms", file=sys.stderr, flush=True)
    return out


def shares(pair: Any, prompts: int) -> dict[str, Any]:
    """Of threads, while prompts come one after the other."""
    before, began = pair.counted(), time.monotonic()
    for _ in range(prompts):
        pair.handed(parameters.PROFILED_TOKENS, 2).wait()
    return report.shares(difference(pair.counted(), before), time.monotonic() - began, prompts)


def beside(pair: Any, streams: int, length: int, arriving: int) -> dict[str, Any]:
    """Inter-token times of decode's streams beside arriving prompts, and what these take."""
    out = {}
    for name, ask in (("without hand-over", pair.plain), ("with hand-over", pair.handed)):
        answers = [pair.handed(STREAM_PROMPT, length) for _ in range(streams)]
        while not all(len(one.times) > 10 for one in answers):
            time.sleep(0.01)
        began = time.monotonic()
        prompts = [ask(parameters.ROW_TOKENS, 2) for _ in range(arriving)]
        for one in prompts:
            one.wait()
        ended = time.monotonic()
        for one in answers:
            one.wait()
        out[name] = {"prompts_s": round(ended - began, 2)} | report.gaps([one.times for one in answers], began, ended)
    out["ratio"] = {"p99": round(out["with hand-over"]["p99_ms"] / out["without hand-over"]["p99_ms"], 2)}
    return out


def difference(after: Any, before: Any) -> Any:
    """Of both sides' counters."""
    from lab.scripted_device import counting  # noqa: PLC0415 (after ENVIRON is set)
    return {side: counting.difference(after[side], before[side]) for side in after}


def run(given: argparse.Namespace) -> dict[str, Any]:
    """All of it. ``given.memory``: what vLLM leaves to the connector, see ``MEMORY``."""
    load, result = os.getloadavg()[0], dict[str, Any]()
    if "stated" in given.memory:
        with engines(0) as both:
            result["lengths"] = lengths(both, given.lengths, given.rounds)
            if given.row:
                result["shares"] = shares(both, given.row)
            if not given.no_streams:
                result["beside"] = beside(both, STREAMS, STREAM_TOKENS, ARRIVING)
            result["waits_late_us"] = {side: round(late * 1e6, 1) for side, late in both.late_s.items()}
            result["rss_mib"] = {side: int(one["rss"]) >> 20 for side, one in both.counted().items()}
    if "room" in given.memory:
        from xpyd_sidecar.engine.worker import device_room  # noqa: PLC0415 (as of ``engines``)
        with engines(device_room.device_bytes({}, parameters.CHUNK_TOKENS * parameters.TOKEN_BYTES)) as both:
            result["with_room"] = lengths(both, given.lengths, given.rounds)
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"), "commit": _commit(),
        "machine": {"processors": os.cpu_count(), "python": sys.version.split()[0], "kernel": os.uname().release},
        "load_before": round(load, 2), "load_after": round(os.getloadavg()[0], 2), "rounds": given.rounds,
        "off": report.verdict(result), **result, "parameters": _parameters()}


@contextmanager
def engines(room: int) -> Iterator[Any]:
    """Both, with a session between them and what Python keeps. ``room``: as of ``device.install``."""
    from lab.scripted_device.router_legs import pair  # noqa: PLC0415 (vLLM reads ENVIRON as it is imported)
    from xpyd_sidecar.contract.launch import KvOptions  # noqa: PLC0415
    with tempfile.TemporaryDirectory(prefix="xpyd-scripted-") as folder, pair(Path(folder), KvOptions(), room) as both:
        for tokens in (LENGTHS[0], parameters.CHUNK_TOKENS):
            both.handed(tokens, 2).wait()
        yield both


def _commit() -> str:
    return subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=10"], capture_output=True, text=True,
                          check=True, cwd=parameters.RESULTS).stdout.strip()


def _parameters() -> dict[str, Any]:
    names = ("RUN", "PLAIN_TTFT", "DECODE_STEP_S", "EAGER_STEP_S", "GRAPH_STEP_S", "GATHER_HOST", "GATHER", "SCATTER_HOST",
             "SCATTER", "BRING_HOST_S", "MAPPED_READ", "PINNED_READ", "DRIVER_READ", "REGISTER", "MARK_LATE_S",
             "FIRST_TOUCH", "ROUTER_S")
    return {name.lower(): getattr(parameters, name) for name in names}


def main(arguments: list[str]) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=5, help="prompts of each length")
    parser.add_argument("--row", type=int, default=IN_A_ROW, help="prompts in a row, for the threads' shares; 0: none")
    parser.add_argument("--memory", nargs="+", choices=MEMORY, default=MEMORY, help="that vLLM leaves to the connector")
    parser.add_argument("--no-streams", action="store_true", help="leave decode's streams out")
    parser.add_argument("--out", type=Path, help="a file for the figures")
    parser.add_argument("--write", action="store_true", help=f"into {RESULT.name}")
    given = parser.parse_args(arguments)
    os.environ |= ENVIRON
    result = run(given)
    print(report.table(result))
    for file in ([RESULT] if given.write else []) + ([given.out] if given.out else []):
        file.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
