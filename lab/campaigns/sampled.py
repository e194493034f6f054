"""Whether sampled streams that go on have the distribution of whole ones: a campaign, into a results file.

    python -m lab campaign-sampled --scripted               2,000 streams of a toy model, four planted errors (a minute)
    python -m lab campaign-sampled --real --streams 2000    2,000 streams of two real engines with different --seed

Every second stream is cut at a random byte between router and engine; no engine is killed. Real engines have a tokenizer of
bytes and may give six letters and the two bytes of é. Exit code 1: a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support")]

from beats import beat  # noqa: E402 (tests/support is not on the path before)
from cutting_relay import Cut, CuttingRelay  # noqa: E402
from engines import MODEL_NAME, Engine  # noqa: E402
from make_model import ensure_model  # noqa: E402
from router_fleet import RouterFleet, fleet  # noqa: E402
from sampled_streams import MAX_TOKENS, PLANTS, run, seam_of  # noqa: E402
from seam_judge import Sample, Verdict, judge  # noqa: E402

from xpyd_sidecar.contract.membership import Sampling  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "campaign_sampled.json"
TEXT = "abcdefé"
BYTES = MAX_TOKENS * 300
AT_ONCE = 8
HEAD = 200


def told(verdict: Verdict, samples: list[Sample]) -> dict[str, Any]:
    """The figures of a verdict."""
    name, p = verdict.worst
    return {"streams": len(samples), "cut": sum(one.cut and one.seam is not None for one in samples), "worst_test": name,
            "worst_p": p, "around_the_seam_p": verdict.p["around the seam"], "rejected": int(verdict.rejects)}


def scripted(streams: int, seed: int) -> dict[str, Any]:
    """Of the toy model: nothing planted, and each error."""
    found: dict[str, Any] = {}
    for name, plant in {"none": None, **PLANTS}.items():
        samples = run(streams, seed, plant)
        found[name] = told(judge(samples, MAX_TOKENS), samples)
    return found


@asynccontextmanager
async def before(engines: list[Engine], cuts: dict[str, Cut]) -> AsyncIterator[RouterFleet]:
    """A router before relays before real engines."""
    async with fleet(0, 0) as f:
        relays = [await CuttingRelay(one.port, lambda body: cuts.pop(str(body.get("user")), None)).start()
                  for one in engines]
        try:
            for engine, relay in zip(engines, relays, strict=True):
                f.context.watch.on_message(beat(engine.name, http=f"127.0.0.1:{relay.port}", interval_s=60.0,
                                           sampling=Sampling(), model=MODEL_NAME))
            yield f
        finally:
            for relay in relays:
                await relay.stop()


@contextmanager
def engines_of(folder: Path) -> Any:
    """Two real ones with different seeds."""
    with ExitStack() as stack:
        yield [stack.enter_context(Engine(f"e{seed}", folder, connector=False,
                                          args=("--seed", str(seed), "--generation-config", "vllm")))
               for seed in (1, 2)]


async def real(engines: list[Engine], streams: int, seed: int) -> dict[str, Any]:
    """Their streams."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(ensure_model() / "tokenizer.json"))
    allowed = sorted(set(tokenizer.encode(TEXT).ids))
    prompt = "once upon a time there was"
    draw = random.Random(seed)
    body = {"model": MODEL_NAME, "prompt": prompt, "stream": True, "temperature": 0.7, "max_tokens": MAX_TOKENS,
            "min_tokens": MAX_TOKENS // 2, "allowed_token_ids": [*allowed, 1], "repetition_penalty": 1.1,
            "return_token_ids": True}
    cut_of = [Cut(HEAD + draw.randrange(BYTES), number % 2 == 0) for number in range(streams)]
    cuts = {str(number): cut for number, cut in enumerate(cut_of)}
    lost = went_on = 0
    samples: list[Sample] = []

    async with before(engines, cuts) as f:
        async def ask(number: int) -> None:
            nonlocal lost, went_on
            answer = await f.post("/v1/completions", {**body, "user": str(number)})
            if answer.events[-1] != "[DONE]":
                lost += 1
                print(number, answer.events[-1])
                return
            choices = [(one, one["choices"][0]) for one in answer.events[:-1]]
            tokens = tuple(token for _, choice in choices for token in choice["token_ids"] or ())
            went_on += max(event.get("xpyd_continued", 0) for event, _ in choices)
            cut = cut_of[number]
            samples.append(Sample(tokens, seam_of(cut.body) if cut.reached else None, cut.real))

        for start in range(0, streams, AT_ONCE):
            await asyncio.gather(*[ask(number) for number in range(start, min(start + AT_ONCE, streams))])
        await f.wait_quiet()
    return {**told(judge(samples, MAX_TOKENS), samples), "ended_with_an_error": lost, "went_on": went_on}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripted", action="store_true")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wrong: list[str] = []
    if options.scripted:
        found["scripted"] = scripted(options.streams, options.seed)
        wrong += [name for name, one in found["scripted"].items() if bool(one["rejected"]) is (name == "none")]
    if options.real:
        with tempfile.TemporaryDirectory() as folder, engines_of(Path(folder)) as engines:
            for engine in engines:
                engine.wait_ready()
            found["real"] = asyncio.run(real(engines, options.streams, options.seed))
        if found["real"]["rejected"] or found["real"]["ended_with_an_error"] > options.streams / 100:
            wrong.append("real")
    RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(found, indent=1, ensure_ascii=False))
    sys.exit(f"missed: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
