"""What a device, a core, a model and a router take: figures that were measured, each with its source, and the formulas.

Nothing here was fitted to what it predicts. Sources in ``bench/results``: ``gpu_device.json`` (copies of one H200: the
host's time for them and the device's), ``gpu_engines.json`` (whole engines on it, ``RUN``), ``gpu.json`` and
``router.json``. Of ``RUN`` the plain engine's times are taken as given, and 1P1D's are what is predicted. What has no
source says so.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parents[2] / "bench/results"


def _recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text("utf-8"))
    return found


_GPU: Final = _recorded("gpu.json")["checks"]
_DEVICE: Final = _recorded("gpu_device.json")
_ENGINES: Final = {run["sharing"]: run["result"] for run in _recorded("gpu_engines.json")["runs"]}
RUN: Final = "MPS"
"""Of gpu_engines.json: its engines' kernels run together, nearest to an engine with a device of its own."""

LAYERS, HEADS, HEAD_SIZE, BLOCK_TOKENS = 36, 8, 128, 16
"""Of the model ``big`` (``gpu_engines.models``): 144 KiB of KV a token. Keys and values of a layer are in one array."""
BLOCK_BYTES: Final = BLOCK_TOKENS * HEADS * 2 * HEAD_SIZE * 2
"""Of one layer, in 16 bits."""
TOKEN_BYTES: Final = LAYERS * BLOCK_BYTES // BLOCK_TOKENS
CHUNK_TOKENS: Final = 8192
CACHE_BYTES: Final = 8 << 30
MODEL_LEN: Final = 36_000
"""``--max-num-batched-tokens``, ``--kv-cache-memory-bytes`` and ``--max-model-len`` of that model."""
MACHINE_BYTES: Final = 128 << 30
"""Memory of the machine of RUN, from which the connector takes its sizes."""


def _ttft(sharing: str, contender: str) -> dict[int, float]:
    """Median seconds to the first token, by prompt tokens."""
    return {int(tokens): row[contender]["ttft_ms"]["median"] / 1e3
            for tokens, row in _ENGINES[sharing]["times"].items() if tokens.isdigit()}


PLAIN_TTFT: Final = tuple(sorted(_ttft(RUN, "plain").items()))
"""Prompt tokens and seconds to the first token of one engine alone (RUN)."""
MEASURED_TTFT: Final = {sharing: _ttft(sharing, "xpyd") for sharing in _ENGINES}
"""The same of 1P1D, by run and prompt tokens. RUN's are what is predicted; the others stand beside."""
PROFILED_TOKENS: Final = int(_ENGINES[RUN]["where"]["of_tokens"])
"""Of the prompts that came one after the other while threads were watched (RUN)."""
PROFILED_PROMPT_S: Final = _ENGINES[RUN]["where"]["ms_each"] / 1e3


def _share(side: str, nth: int) -> float:
    """Of a core, that a thread of an engine core had; most first, as they are recorded, all under one name."""
    thread = _ENGINES[RUN]["where"][side]["threads"][nth]
    return float(thread["user"] + thread["system"])


MEASURED_SHARES: Final = {"prefill engine": _share("prefill", 0), "decode engine": _share("decode", 0),
                          "decode receiver": _share("decode", 1)}
"""Of a core, by thread, meanwhile: which is which follows from whose stacks were seen how often. Predicted, too."""
MEASURED_BESIDE: Final = {name: {"p99_ms": _ENGINES[RUN]["beside"][side]["gap_p99_ms"]}
                          for name, side in (("without hand-over", "no_handover"), ("with hand-over", "xpyd"))}
"""Of four streams beside four arriving prompts of 8,192 tokens (RUN: all on one device, so no goal of a prediction)."""
ROW_TOKENS: Final = 8192
"""Of prompts that arrive beside streams."""

DECODE_STEP_S: Final[float] = _ENGINES[RUN]["times"]["256"]["plain"]["second_ms"]["median"] / 1e3
"""Of one stream: from the first token to the second one of the shortest prompts (RUN)."""
EAGER_STEP_S: Final = PLAIN_TTFT[0][1]
"""Python of the runner in a prefill step, eager, over all layers: all of the shortest prompt's time (RUN), since what holds
that one up are launches; one of four times as many tokens takes no longer. Processor time of the engine's thread was 48 ms
a prompt there (``where``); what of it is the scheduler's and the connector's comes on top here.
"""
GRAPH_STEP_S: Final = 1e-3
"""Python of the runner in a decode step that replays a graph. No source: some of DECODE_STEP_S, behind which it hides."""
STEP_NAP_S: Final = 1e-3
"""What vLLM's core sleeps after a step without tokens (``EngineCoreProc._process_engine_step``, which runs as it is)."""

_COPIED: Final = [_DEVICE[name] for name in _DEVICE if name.endswith(" tokens")]


def _points(what: str, less: str = "") -> tuple[tuple[float, float], ...]:
    """Bytes and seconds (gpu_device.json)."""
    return tuple((float(one["MiB"] << 20), (one[what] - (one[less] if less else 0.0)) / 1e3) for one in _COPIED)


GATHER_HOST: Final = _points("gather, host")
SCATTER_HOST: Final = _points("scatter, host")
"""Bytes and seconds of the thread that calls ``DeviceCopies.gather`` and ``scatter`` (gpu_device.json)."""
GATHER: Final = _points("gather", "gather, host")
SCATTER: Final = _points("scatter", "scatter, host")
"""The same of the device from when the call has returned until the mark has passed."""
BRING_HOST_S: Final = _GPU["registered"]["figures"]["copy_host_ms"] / 1e3
"""Of the thread that enqueues one copy of memory that CUDA knows (gpu.json, ``registered``)."""
MAPPED_READ: Final = _DEVICE["mapped"]["GB/s then"] * 1e9
"""Bytes a second, of another process's memory that CUDA knows."""
PINNED_READ: Final = max(one["GB/s bring"] for one in _COPIED) * 1e9
"""The same of this process's own."""
DRIVER_READ: Final = _DEVICE["mapped"]["GB/s, CUDA does not know it"] * 1e9
"""The same of memory that CUDA does not know: by the core that asks for it."""
REGISTER: Final = (_DEVICE["mapped"]["registered"][0] << 20) / _DEVICE["mapped"]["registered"][2]
"""Bytes a second, of another process's memory of which CUDA is told in parts."""
MARK_LATE_S: Final = _GPU["marks"]["figures"]["late_ms"] / 1e3
"""From the event to the thread that waits for it (gpu.json, ``marks``)."""
FIRST_TOUCH: Final = 2.9e9
"""Bytes a second, of memory that a core of that machine touches for the first time: a run of real engines there."""
ROUTER_S: Final = _recorded("router.json")["ttft_added_us_xpyd"] / 1e6
"""That the router adds to the time to the first token (router.json). The engines' own HTTP is in PLAIN_TTFT."""


def straight(points: Sequence[tuple[float, float]], x: float) -> float:
    """Straight between points, and on as between the two at either end; never below 0."""
    for (low, short), (high, long) in itertools.pairwise(points):
        if x <= high or high == points[-1][0]:
            return max(0.0, short + (long - short) * (x - low) / (high - low))
    raise ValueError(f"{len(points)} points")


def plain_s(tokens: int) -> float:
    """Seconds in which one engine makes the first token of a prompt: PLAIN_TTFT, straight between its points.

    Shorter prompts take as long as the shortest: launches hold it up. Longer ones go on as between the last two points.
    """
    return straight(PLAIN_TTFT, max(tokens, PLAIN_TTFT[0][0]))


def forward_s(chunks: list[tuple[int, int]]) -> float:
    """Seconds of a step that computes so many tokens after so many, of each of its requests.

    One token is a decode step, which costs nothing beside a prompt's.
    """
    prompts = [plain_s(before + tokens) - (plain_s(before) if before else 0.0) for before, tokens in chunks if tokens > 1]
    return max(sum(prompts), DECODE_STEP_S)


def gather_s(size: int) -> float:
    """Seconds of the device for so many bytes out of the cache, with their sums."""
    return straight(GATHER, size)


def gather_host_s(size: int) -> float:
    """Seconds of the thread that enqueues that."""
    return straight(GATHER_HOST, size)


def scatter_s(size: int) -> float:
    """Seconds of the device for so many bytes into the cache, with their sums."""
    return straight(SCATTER, size)


def scatter_host_s(size: int) -> float:
    """Seconds of the thread that enqueues that."""
    return straight(SCATTER_HOST, size)
