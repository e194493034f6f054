"""The same requests on the same GPUs, as prefill and decode engines and as plain engines: played by ``simulation``. Pure.

    P/D         prefill engines do one prompt after the other; its KV takes the hand-over; decode engines have the prompts
    plain       decode instances without prefill, which compute prompts in chunks beside their batches; of two sizes of
                chunks the better one counts

KV memory, links beyond the hand-over that was seen, and what differs in parallel sizes are left out: where memory is what
P/D or plain engines lack, this does not say it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from xpyd_operator.doctor.learned import LearnedFigures
from xpyd_operator.simulation.controllers import Static
from xpyd_operator.simulation.engine import EngineModel
from xpyd_operator.simulation.frontier import CHUNKS
from xpyd_operator.simulation.outcome import Pair
from xpyd_operator.simulation.rules import PATIENT
from xpyd_operator.simulation.trace import Arrival
from xpyd_operator.simulation.world import TAIL_S, World
from xpyd_operator.traffic.measures import percentile
from xpyd_sidecar.contract.sample import SampledRequest

BOUNDLESS: Final = 1 << 50
"""Tokens of KV: as much as there may be."""
LEAST_S: Final = 1e-9
"""What a step or a token takes, at least: a line through what was measured may say nothing at all."""


class LatencyFigures(msgspec.Struct, frozen=True):
    """What became of the requests, seconds."""

    ttft_p50: float
    ttft_p95: float
    tpot_p50: float
    tpot_p95: float


def engine_of(learned: LearnedFigures) -> EngineModel:
    """An engine that takes what was learned. The first step of decode, which is in every hand-over that was measured, is
    played by the simulation and not part of the hand-over here.
    """
    return EngineModel(
        prefill_start=learned.prefill_start, prefill_rate=1 / max(LEAST_S, learned.prefill_per_token),
        step_base=max(LEAST_S, learned.step_base), step_per_request=learned.step_per_request,
        handover=max(0.0, learned.handover - learned.step_s(learned.running)), kv_tokens=BOUNDLESS)


def as_plain(requests: Sequence[SampledRequest], learned: LearnedFigures, engines: int) -> list[LatencyFigures]:
    """On so many plain engines, for each size of chunks."""
    model = engine_of(learned)
    return [_play(requests, learned, msgspec.structs.replace(model, chunk=chunk), (0, engines)) for chunk in CHUNKS]


def as_pd(requests: Sequence[SampledRequest], learned: LearnedFigures, prefills: int, decodes: int) -> LatencyFigures:
    """On so many prefill and decode engines."""
    return _play(requests, learned, engine_of(learned), (prefills, decodes))


def measured_latency(requests: Sequence[SampledRequest]) -> LatencyFigures:
    """The latencies that the sampled requests had."""
    streams = [one for one in requests if one.ttft > 0]
    tpots = [(one.total - one.ttft) / (one.output - 1) for one in streams if one.output > 1]
    return _quantiles([one.ttft for one in streams], tpots)


def _play(requests: Sequence[SampledRequest], learned: LearnedFigures, model: EngineModel, counts: Pair) -> LatencyFigures:
    """A request without an answer within ``TAIL_S`` after the last one came has waited for its first token until then."""
    mean = max(1, round(learned.output))
    trace = [Arrival(one.at, max(1, one.prompt), one.output if one.output > 0 else mean)
             for one in sorted(requests, key=lambda one: one.at)]
    run = World(trace, model, counts, Static(), rules=PATIENT).play()
    ttfts = [min(ttft, run.ends_at + TAIL_S - one.at) for ttft, one in zip(run.ttft, trace, strict=True)]
    tpots = [tpot for tpot, one in zip(run.tpot, trace, strict=True) if one.output > 1 and tpot < math.inf]
    return _quantiles(ttfts, tpots)


def _quantiles(ttfts: list[float], tpots: list[float]) -> LatencyFigures:
    ttfts.sort()
    tpots.sort()
    return LatencyFigures(percentile(ttfts, 50), percentile(ttfts, 95), percentile(tpots, 50), percentile(tpots, 95))
