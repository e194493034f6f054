"""Simulates the sampled requests on prefill and decode engines (P/D) and on plain engines, with ``simulation``. Pure.

    P/D         a prefill engine computes one prompt after the other; its KV is handed over; a decode engine generates
    plain       engines without prefill engines beside them, which compute prompts in chunks beside their decode batches;
                once for each size of chunks, of which the caller takes the better one

Left out are the memory that KV takes, what links can carry (beyond the hand-over time that was measured), and parallel
sizes that differ between roles. So the result does not show where P/D or plain engines lack memory.
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
    """Median and 95th percentile of TTFT and TPOT over a set of requests, in seconds; 0 where none has the measure."""

    ttft_p50: float
    ttft_p95: float
    tpot_p50: float
    tpot_p95: float


def engine_of(learned: LearnedFigures) -> EngineModel:
    """The model of an engine with the times that were learned, and room for any amount of KV. Every measured hand-over
    includes decode's first step, which the simulation adds by itself: so it is subtracted here.
    """
    return EngineModel(
        prefill_start=learned.prefill_start, prefill_rate=1 / max(LEAST_S, learned.prefill_per_token),
        step_base=max(LEAST_S, learned.step_base), step_per_request=learned.step_per_request,
        handover=max(0.0, learned.handover - learned.step_s(learned.running)), kv_tokens=BOUNDLESS)


def as_plain(requests: Sequence[SampledRequest], learned: LearnedFigures, engines: int) -> list[LatencyFigures]:
    """Simulated latencies of the requests on this many plain engines, one result for each chunk size of ``CHUNKS``."""
    model = engine_of(learned)
    return [_play(requests, learned, msgspec.structs.replace(model, chunk=chunk), (0, engines)) for chunk in CHUNKS]


def as_pd(requests: Sequence[SampledRequest], learned: LearnedFigures, prefills: int, decodes: int) -> LatencyFigures:
    """Simulated latencies of the requests on this many prefill and decode engines."""
    return _play(requests, learned, engine_of(learned), (prefills, decodes))


def measured_latency(requests: Sequence[SampledRequest]) -> LatencyFigures:
    """The latencies that were measured: TTFT of the sampled requests with streamed answers, and TPOT of those among them
    with two output tokens or more.
    """
    streams = [one for one in requests if one.ttft > 0]
    tpots = [(one.total - one.ttft) / (one.output - 1) for one in streams if one.output > 1]
    return _quantiles([one.ttft for one in streams], tpots)


def _play(requests: Sequence[SampledRequest], learned: LearnedFigures, model: EngineModel, counts: Pair) -> LatencyFigures:
    """Simulated latencies with ``counts`` prefill and decode engines. A request that has no first token ``TAIL_S``
    seconds after the last arrival counts as if it came then. One of unknown output length has the mean length.
    """
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
