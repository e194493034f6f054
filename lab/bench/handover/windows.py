"""Stage ``windows``: are answers right where a window's edge falls on a block's? Ours and vLLM's NixlConnector, one model.

A model whose layers see 200 tokens but for one. Where ``(N - 200 + 1) % 128`` is 0, decode that asks for all N tokens of a
prompt lacks the block of the first token that the last one sees (docs/decisions/0040). What decode says after a hand-over
is compared with what prefill's engine says alone, by the log probability of the first token: text hides most of it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from client import PREFILLED
from engines import MODEL_NAME, Engine, HttpError, post
from harness import Bench, Parts
from model_pairs import PATIENCE_S, Answer, ModelPair, answer
from model_variants import ensure
from processes import ProcessFailed, free_port

MODEL, ARGS = "tiny-gemma-3", ("--max-num-batched-tokens", "512")
EDGES: Final = (327, 455, 583, 711)
OTHERS: Final = (326, 328, 454, 456, 700)
EACH: Final = 6
OFF: Final = 1e-4
"""Of log probabilities in float32; what is right differs by 0."""


def judged(handed: Callable[[list[int]], Answer], one: Engine) -> dict[str, Any]:
    """How many prompts are answered otherwise after a hand-over than by one engine."""
    found: dict[str, Any] = {}
    for name, lengths in (("at edges", EDGES), ("elsewhere", OTHERS)):
        wrong = texts = 0
        worst = 0.0
        for length in lengths:
            for seed in range(EACH):
                draw = random.Random(length * 100 + seed)
                prompt = [draw.randrange(2, 258) for _ in range(length)]
                got = handed(prompt)
                alone = answer(one, prompt, len(got.tokens))
                apart = abs(got.logprobs[0] - alone.logprobs[0]) if got.tokens[0] == alone.tokens[0] else 9.0
                wrong += apart > OFF
                texts += got.tokens != alone.tokens
                worst = max(worst, apart)
        found[name] = {"prompts": len(lengths) * EACH, "first_logprob_off": wrong, "other_text": texts, "worst": worst}
    return found


async def stage_windows(bench: Bench, parts: Parts, *, site: Path) -> None:
    """Both, one after the other; the other's part says why where it does not run."""
    pair = ModelPair(bench.folder, MODEL)
    with pair.wire, pair.p, pair.d:
        for engine in (pair.p, pair.d):
            _warmed(engine)
        parts.out["xpyd"] = judged(lambda prompt: pair.handed(prompt, 16), pair.p)
    parts.out["nixl"] = _nixl(bench.folder, site)


def _warmed(engine: Engine) -> None:
    """Ready, with what it compiles for its first log probabilities behind it."""
    engine.wait_ready().complete([2] * 300, 2, timeout_s=600.0, logprobs=1)


def _nixl(folder: Path, site: Path) -> dict[str, Any]:
    if not (site / "nixl").is_dir():
        return {"absent": f"nixl is not installed in {site} (python -m lab bench-kv installs it)"}
    config = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"})
    p, d = (Engine(name, folder, connector=False, model=ensure(MODEL), args=(*ARGS, "--kv-transfer-config", config),
                   env={"PYTHONPATH": str(site), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}) for name in ("nixl-p", "nixl-d"))

    def handed(prompt: list[int]) -> Answer:
        first = post(f"{p.url}/v1/completions", {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0,
                                                 "kv_transfer_params": PREFILLED}, PATIENCE_S)
        return answer(d, prompt, 16, kv_transfer_params=first["kv_transfer_params"])

    try:
        with p, d:
            for engine in (p, d):
                _warmed(engine)
            return judged(handed, p)
    except (ProcessFailed, HttpError, KeyError, OSError) as error:
        return {"absent": f"{type(error).__name__}: {error}"[-1500:]}
