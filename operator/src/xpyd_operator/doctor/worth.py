"""Whether disaggregation (P/D: prefill and decode on separate engines) pays with the traffic, and which role is short.

    pays          a prompt's prefill takes longer than the hand-over of its KV; decode computes shorter ones sooner itself
    decode short  KV finds no room in decode, or comes late over links that are not busy
    prefill short requests wait for prefill longer than their prompts take to compute
    plain         the same requests simulated on as many engines that do both (``replay``)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from xpyd_operator.doctor.finding import Ailment
from xpyd_operator.doctor.learned import LEAST, LearnedFigures
from xpyd_operator.doctor.links import ROOM, LinkUse
from xpyd_operator.doctor.reading import ServiceReading
from xpyd_operator.doctor.replay import LatencyFigures, as_pd, as_plain, measured_latency
from xpyd_sidecar.contract.fleet import FleetInstance
from xpyd_sidecar.contract.ids import Role

MOSTLY: Final = 0.7
"""Of the tokens of prompts: if as many are too short to pay, prefill does."""
SOME: Final = 0.1
LATE_S: Final = 1.0
"""Hand-overs of decode that has no room."""
SHORT: Final = 2.0
"""Requests wait for prefill so many times as long as their prompts take it."""
SHORT_S: Final = 0.2
TOGETHER: Final = 1.5
"""Prompts at a time on a prefill instance: with fewer they do not wait for each other, and a slow one is slow by itself."""
LATELY_S: Final = 300.0
"""What of the sample says how it is now."""
BETTER: Final = 0.8
WORSE: Final = 1.25
"""Ratios of two outcomes that say something,"""
EQUAL: Final = 1.2
"""and what TPOT may cost where TTFT is better."""
FITS: Final = 2.0
"""A model that is off what was measured by more says nothing."""
HITS: Final = 0.3
VERDICTS: Final = ("plain", "equal", "keep")
"""From the best for plain engines on."""
MOST_PLAYED: Final = 1_000_000
"""Requests times engines; what is beyond is the oldest."""


class Comparison(msgspec.Struct, frozen=True):
    """Latencies of sampled requests, in seconds: as measured, and as simulated with P/D and with as many plain engines."""

    engines: int
    requests: int
    covers_s: float
    was: LatencyFigures
    as_pd: LatencyFigures
    """By the model, so that it is compared with its like."""
    as_plain: LatencyFigures
    """With the size of chunks that is better for them."""
    fits: bool
    """The model of what runs is near what was measured."""

    @property
    def verdict(self) -> str:
        """Which does better: ``keep`` (P/D), ``plain``, ``equal``; ``unknown`` where the model does not fit (``fits``)."""
        return VERDICTS[_rank(self.as_pd, self.as_plain)[0]] if self.fits else "unknown"


def compare(service: ServiceReading, learned: LearnedFigures | None) -> Comparison | None:
    """Simulate the sampled requests with P/D and on plain engines.

    None: there is no sample, nothing could be learned from it, or a role has no serving instance.
    """
    prefills, decodes = len(service.serving(Role.PREFILL)), len(service.serving(Role.DECODE))
    if learned is None or service.sample is None or not prefills or not decodes:
        return None
    engines = prefills + decodes
    requests = service.sample.requests[-(MOST_PLAYED // engines):]
    covers_s = service.sample.covers_s
    if len(requests) < len(service.sample.requests):
        covers_s -= requests[0].at
    was, pd = measured_latency(requests), as_pd(requests, learned, prefills, decodes)
    fits = all(mine and theirs and 1 / FITS <= mine / theirs <= FITS
               for mine, theirs in ((pd.ttft_p50, was.ttft_p50), (pd.tpot_p50, was.tpot_p50)))
    plain = min(as_plain(requests, learned, engines), key=lambda each: _rank(pd, each))
    return Comparison(engines, len(requests), covers_s, was, pd, plain, fits)


def _rank(pd: LatencyFigures, plain: LatencyFigures) -> tuple[int, float]:
    """The index of the verdict in ``VERDICTS``, and the sum of the p95 ratios, plain engines to P/D, of TTFT and TPOT."""
    first = plain.ttft_p95 / max(pd.ttft_p95, 1e-9)
    each = plain.tpot_p95 / max(pd.tpot_p95, 1e-9)
    if first >= WORSE or each >= WORSE:
        return 2, first + each
    return (0 if first <= BETTER and each <= EQUAL else 1), first + each


def worth_findings(service: ServiceReading, learned: LearnedFigures | None, use: LinkUse | None, compared: Comparison | None
                   ) -> Iterator[Ailment]:
    """Findings on whether P/D pays, which role is short, and whether prefill computes what decode has cached.

    Empty where a role has no serving instance; findings that need ``learned``, ``use`` or ``compared`` are left out where
    that is None.
    """
    prefills, decodes = service.serving(Role.PREFILL), service.serving(Role.DECODE)
    if not prefills or not decodes:
        return
    yield from _decode_short(service, decodes, use)
    if learned is not None:
        yield from _prefill_short(service, prefills, learned)
        yield from _payoff(service, learned, compared)
    yield from _cache(prefills, decodes)


def _decode_short(service: ServiceReading, decodes: tuple[FleetInstance, ...], use: LinkUse | None) -> Iterator[Ailment]:
    handover = service.fleet.latencies.get("handover")
    late = handover is not None and handover.count >= LEAST and handover.p50 >= LATE_S and (
        use is not None and not use.limits and use.now < 0.7 * use.had)
    full = [one for one in decodes if one.load.kv_usage >= ROOM]
    if len(full) < len(decodes) and not late:
        return
    usage = sum(one.load.kv_usage for one in decodes) / len(decodes)
    running, waiting = sum(one.load.running for one in decodes), sum(one.load.waiting for one in decodes)
    evidence = [f"{usage:.0%} of decode's KV blocks are in use on {len(decodes)} instances",
                f"{running} requests decode, {waiting} wait there"]
    if handover is not None and handover.count:
        evidence.append(f"hand-over {handover.p50:.3g} s in the median")
    more = max(1, round(len(decodes) * waiting / max(1, running)))
    yield Ailment("decode-short", "decode is short: prompts are ready and find no room", tuple(evidence),
                  f"{more} more decode instance{'s' if more > 1 else ''} (decode.replicas), or planner.mode: auto")


def _prefill_short(
    service: ServiceReading, prefills: tuple[FleetInstance, ...], learned: LearnedFigures
) -> Iterator[Ailment]:
    assert service.sample is not None
    lately = [one for one in service.sample.requests if one.at >= service.sample.covers_s - LATELY_S and one.prefill > 0]
    if len(lately) < LEAST:
        return
    own = sum(learned.prefill_s(one.prompt) for one in lately) / len(lately)
    wait = sum(max(0.0, one.prefill - learned.prefill_s(one.prompt)) for one in lately) / len(lately)
    ttfts = [one.ttft for one in lately if one.ttft > 0]
    over_s = max(1.0, min(LATELY_S, service.sample.covers_s))
    together = sum(one.prefill for one in lately) / over_s / len(prefills)  # Little: how many are there at a time
    if not ttfts or together < TOGETHER or wait < max(SHORT_S, SHORT * own) or wait < 0.5 * sum(ttfts) / len(ttfts):
        return
    yield Ailment("prefill-short", "prefill is short: requests wait for it longer than their prompts take",
                  (f"{wait:.3g} s of waiting for {own:.3g} s of prefill, in the mean of the last {len(lately)} requests",
                   f"TTFT {sum(ttfts) / len(ttfts):.3g} s",
                   f"{together:.2g} prompts are there at a time on each of {len(prefills)} prefill instances"),
                  "more prefill instances (prefill.replicas), or planner.mode: auto")


def _payoff(service: ServiceReading, learned: LearnedFigures, compared: Comparison | None) -> Iterator[Ailment]:
    assert service.sample is not None
    handed = [one for one in service.sample.requests if one.prefill > 0]
    short = [one for one in handed if one.prompt < learned.pays_from]
    tokens = sum(one.prompt for one in handed)
    share = sum(one.prompt for one in short) / tokens if tokens else 0.0
    below = _round(learned.pays_from)
    mean = f"prefill of the mean prompt of {learned.prompt:.0f} tokens {learned.prefill_s(learned.prompt) * 1e3:.3g} ms"
    evidence = (f"a hand-over takes {learned.handover * 1e3:.3g} ms, {mean}",
                f"{share:.0%} of the prompts' tokens are in prompts below {below} tokens, whose hand-over takes longer")
    keeps = compared is not None and compared.verdict == "keep"
    if share >= MOSTLY and not keeps:
        yield Ailment("no-payoff", "P/D cannot pay with this traffic: hand-overs take longer than the prompts",
                      evidence, f"router.skipPrefill.belowTokens: {below}; or end P/D: prefill.replicas: 0, and its GPUs "
                                "for decode")
    elif share < MOSTLY and len(short) >= SOME * len(handed) and below >= 16:
        yield Ailment("skip-short", f"prompts below {below} tokens are computed sooner by decode itself", evidence,
                      f"router.skipPrefill.belowTokens: {below}")
    if compared is not None and compared.verdict == "plain" and share < MOSTLY:
        yield Ailment("plain-engines", f"the same GPUs as {compared.engines} plain engines would do better",
                      (words_of(compared),),
                      "try it: prefill.replicas: 0 and all GPUs for decode is the same as plain engines")


def words_of(compared: Comparison) -> str:
    """The comparison as one sentence: the measured and the simulated latencies, and the verdict."""
    def pair(outcome: LatencyFigures) -> str:
        return f"TTFT p95 {outcome.ttft_p95:.3g} s, TPOT p95 {outcome.tpot_p95 * 1e3:.3g} ms"

    said = {"keep": "keep P/D", "plain": "plain engines would do better", "equal": "no great difference",
            "unknown": "which says nothing here, since the model of what runs does not fit what was measured"}
    return (f"{compared.requests} requests of the last {compared.covers_s / 60:.0f} minutes: {pair(compared.was)}; by the "
            f"model {pair(compared.as_pd)} as P/D and {pair(compared.as_plain)} as {compared.engines} plain engines: "
            f"{said[compared.verdict]}")


def _cache(prefills: tuple[FleetInstance, ...], decodes: tuple[FleetInstance, ...]) -> Iterator[Ailment]:
    ours, theirs = _hits(prefills), _hits(decodes)
    if ours is None or theirs is None or theirs < HITS or ours > theirs / 2:
        return
    yield Ailment("cache-elsewhere", "decode has the beginnings of prompts that prefill computes again",
                  (f"{theirs:.0%} of the prompts' tokens are in decode's prefix cache, {ours:.0%} in prefill's",
                   f"{len(prefills)} prefill instances, {len(decodes)} decode instances"),
                  "router.skipPrefill.belowTokens: 1024 lets decode go on with what it has; router.policy: cost leads a "
                  "conversation to who has it")


def _hits(those: tuple[FleetInstance, ...]) -> float | None:
    """Share of the prompts' tokens that were in the prefix caches; None: no instance reports it, or no prompt came."""
    told = [one.intake for one in those if one.intake is not None]
    all_s = sum(one.cached_s + one.computed_s + one.received_s for one in told)
    return sum(one.cached_s for one in told) / all_s if all_s else None


def _round(tokens: float) -> int:
    """A number of tokens, rounded up to a multiple of 16, the block size of most engines."""
    return -(-round(tokens) // 16) * 16
