"""The distribution of sampled streams that go on elsewhere, on real engines: half of them cut at a random byte by a relay.

    python tests/campaigns/sampled.py                    2,000 streams (10 minutes)
    python tests/campaigns/sampled.py --streams 400      fewer; planted errors are judged in full all the same

A prefill engine and two decode engines with different ``--seed``. Streams draw from eight letters and the bytes of longer
characters. The judge compares cut streams with whole ones, and the same judge must reject four planted errors
(``sampled_streams``). Exit code 1: a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support")]

from cluster import Cluster  # noqa: E402 (tests/support is not on the path before)
from cutting_relay import CuttingRelay  # noqa: E402
from engines import MODEL_NAME  # noqa: E402
from make_model import ensure_model  # noqa: E402
from processes import free_port  # noqa: E402
from router_fleet import Answer, read_answer, request_bytes  # noqa: E402
from sampled_streams import MAX_TOKENS, PLANTS, run, seam_of  # noqa: E402
from seam_judge import ALPHA, Sample, judge  # noqa: E402

from xpyd_sidecar.contract.ids import Role  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "campaign_sampled.json"
PLANTED = 2000
"""Streams by which the judge must tell each planted error."""
AT_ONCE, ANSWER_S = 8, 120.0
LONGER = "é日😀"
PROMPT = "once upon a time there was "


def byte_tokens(folder: Path) -> dict[int, int]:
    """Token ids by bytes, of the model's byte-level tokenizer."""
    vocabulary: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shown = {byte: chr(byte) for byte in plain}
    others = itertools.count(256)
    shown |= {byte: chr(next(others)) for byte in range(256) if byte not in shown}  # as GPT-2's tokenizer writes bytes
    return {byte: vocabulary[char] for byte, char in shown.items() if char in vocabulary}


def asked(tokens: dict[int, int]) -> dict[str, Any]:
    """The request of every stream."""
    several = sorted({tokens[byte] for char in LONGER for byte in char.encode()})
    letters = [tokens[ord(char)] for char in "abcdefgh"]
    return {"model": MODEL_NAME, "prompt": PROMPT, "stream": True, "temperature": 0.8, "min_tokens": 12,
            "max_tokens": MAX_TOKENS, "stop_token_ids": [letters[0]], "repetition_penalty": 1.1, "return_token_ids": True,
            "allowed_token_ids": [*letters, *several]}


async def ask(port: int, name: str, body: dict[str, Any]) -> Answer:
    """One stream, whole."""
    async with asyncio.timeout(ANSWER_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        try:
            writer.write(request_bytes("/v1/completions", body, headers={"X-Request-Id": name}))
            return await read_answer(reader)
        finally:
            writer.transport.abort()


def sample_of(name: str, answer: Answer, relays: list[CuttingRelay], *, cut: bool) -> Sample | None:
    """What the judge looks at; None of one that ended with an error event."""
    if answer.status != 200 or not answer.events or answer.events[-1] != "[DONE]":
        return None
    choices = [choice for event in answer.events[:-1] for choice in event["choices"]]
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    passed = next((relay.passed[name] for relay in relays if name in relay.passed), None)
    head, _, body = (passed or b"").partition(b"\r\n\r\n")
    seam = None if passed is None else seam_of(body) if head else 0
    return Sample(tuple(tokens), seam, cut and passed is not None)


async def real(streams: int, seed: int) -> dict[str, Any]:
    """On real engines; the figures."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder), prefill=1, decode=0)
        relays: list[CuttingRelay] = []
        for number in (1, 2):
            port = free_port()
            relays.append(await CuttingRelay(port).start())
            cluster.add(Role.DECODE, through=relays[-1].address, port=port, args=("--seed", str(number)))
        try:
            await asyncio.to_thread(cluster.start)
            await asyncio.to_thread(cluster.wait_ready)
            body = asked(byte_tokens(ensure_model()))
            first = await ask(cluster.port, "first", body)
            assert first.status == 200, first.body
            longest = len(first.body) + 400
            began = time.monotonic()
            samples: list[Sample] = []
            failed: list[str] = []
            continued = 0

            async def worker(mine: int) -> None:
                nonlocal continued
                for number in range(mine, streams, AT_ONCE):
                    name, cut = f"r{number}", number % 2 == 0
                    limit = draw.randrange(longest)
                    for relay in relays:
                        (relay.cut if cut else relay.looked)[name] = limit
                    answer = await ask(cluster.port, name, body)
                    for relay in relays:
                        relay.cut.pop(name, None)
                    sample = sample_of(name, answer, relays, cut=cut)
                    if sample is None:
                        failed.append(answer.body[-300:].decode(errors="replace"))
                        continue
                    samples.append(sample)
                    continued += sum(event.get("xpyd_continued", 0) for event in answer.events[:-1])

            await asyncio.gather(*map(worker, range(AT_ONCE)))
        finally:
            await asyncio.to_thread(cluster.__exit__, None, None, None)
            for relay in relays:
                await relay.stop()
    verdict = judge(samples, MAX_TOKENS)
    name, p = verdict.worst
    return {"streams": streams, "cut": sum(one.cut for one in samples), "continued": continued, "failed": len(failed),
            "failures": failed[:5], "tests": len(verdict.p), "worst": name, "worst_p": p, "rejected": verdict.rejects,
            "seconds": round(time.monotonic() - began, 1)}


def planted() -> dict[str, Any]:
    """What the judge makes of streams without and with errors, on engines that draw without sockets."""
    found = {"none": judge(run(PLANTED, seed=1), MAX_TOKENS)}
    found |= {name: judge(run(PLANTED, seed=1, plant=plant), MAX_TOKENS) for name, plant in PLANTS.items()}
    return {name: {"worst_p": verdict.worst[1], "rejected": verdict.rejects} for name, verdict in found.items()}


def main() -> int:
    """Run it, write the results; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    judged = planted()
    found = asyncio.run(real(args.streams, args.seed))
    results = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "alpha": ALPHA, "real": found, "planted": judged}
    RESULTS.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(results, indent=2, ensure_ascii=False))
    good = (not found["rejected"] and found["failed"] <= 0.01 * found["cut"] and not judged["none"]["rejected"]
            and all(one["rejected"] for name, one in judged.items() if name != "none"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
