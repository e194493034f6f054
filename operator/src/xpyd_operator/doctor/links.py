"""The links that KV takes: whether they are the limit, with the GB/s that are needed and had; and better ones not used.

    needed    prompt tokens a second that decode is to receive, times bytes of KV for one, by decode instance
    had       the most bytes a second that ever came into one decode instance

A link is the limit where decode takes in nearly the most that it ever took, what is needed is as much or more, KV comes
late, and decode has room for it: without room the KV waits for decode and not for the link.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import msgspec

from xpyd_operator.doctor.finding import Ailment
from xpyd_operator.doctor.learned import LearnedFigures
from xpyd_operator.doctor.reading import ServiceReading
from xpyd_sidecar.contract.fleet import FleetInstance
from xpyd_sidecar.contract.ids import Role

USED: Final = 0.7
"""Of what ever came, from which on a link is nearly used up."""
NEEDED: Final = 0.9
ROOM: Final = 0.9
"""Share of decode's KV blocks from which on it has no room."""
LATE: Final = 3.0
"""Hand-overs of so many times what the bytes of a prompt take the link alone,"""
LATE_S: Final = 0.2
"""and of at least so long, are late."""
GB: Final = 1e9
_LOCK = re.compile(r"lock", re.IGNORECASE)
_NIXL = re.compile(r"nixl|rdma|ucx", re.IGNORECASE)
_SHARED = re.compile(r"shm|shared|process_vm|folder|ptrace", re.IGNORECASE)


class LinkUse(msgspec.Struct, frozen=True):
    """Of the busiest decode instance."""

    instance: str
    link: str
    now: float
    """Bytes a second that come in."""
    had: float
    needed: float
    """Bytes a second."""
    kv_bytes: float
    """KV of one token."""
    handover_s: float
    """Median."""
    alone_s: float
    """What the mean prompt would take the link, with nobody else on it."""
    free: bool
    """Decode has room for what comes."""

    @property
    def limits(self) -> bool:
        """The link is what requests wait for."""
        late = self.handover_s >= max(LATE_S, LATE * self.alone_s)
        return self.free and late and self.now >= USED * self.had and self.needed >= NEEDED * self.had


def link_use(service: ServiceReading, learned: LearnedFigures | None) -> LinkUse | None:
    """How the links into decode are used; None: nothing comes in, or nobody tells."""
    decodes = [one for one in service.serving(Role.DECODE) if one.intake is not None and one.intake.received_s > 0]
    if not decodes:
        return None
    received = sum(one.intake.received_s for one in decodes if one.intake is not None)
    came = sum(one.intake.bytes_s for one in decodes if one.intake is not None)
    if not came:
        return None
    kv_bytes = came / received
    busiest = max(decodes, key=_bytes)
    asked = received
    prompt = received / sum(one.intake.loads_s for one in decodes if one.intake is not None and one.intake.loads_s) if any(
        one.intake is not None and one.intake.loads_s for one in decodes) else 0.0
    if learned is not None:
        asked = max(asked, learned.rate * (1 - learned.alone) * learned.prompt * _uncached(decodes))
        prompt = learned.prompt
    had = max(one.intake.best_bytes_s for one in decodes if one.intake is not None)
    links = service.fleet.disaggregation.links
    return LinkUse(
        busiest.instance, links[0].link if links else "the link", _bytes(busiest), had, asked * kv_bytes / len(decodes),
        kv_bytes, service.fleet.latencies["handover"].p50 if "handover" in service.fleet.latencies else 0.0,
        prompt * kv_bytes / had if had else 0.0, all(one.load.kv_usage < ROOM for one in decodes))


def link_findings(service: ServiceReading, use: LinkUse | None) -> Iterator[Ailment]:
    """Of a service."""
    if use is not None and use.limits:
        yield Ailment(
            "link",
            f"the link into decode is the limit: {use.needed / GB:.3g} GB/s are needed, {use.had / GB:.3g} GB/s are had",
            ((f"{use.instance} takes in {use.now / GB:.3g} GB/s over {use.link}, of {use.had / GB:.3g} GB/s at best "
              f"({use.had * 8 / GB:.3g} Gb/s)"),
             f"a token of a prompt is {use.kv_bytes / 1e3:.4g} kB of KV",
             f"hand-over {use.handover_s:.3g} s in the median, {use.alone_s:.3g} s with nobody else on the link"),
            f"{_more(use)}; else a better link (docs/rdma.md), kv-cache-dtype fp8 (half the bytes), or plain engines")
    words = [(one, word) for one in service.fleet.instances for word in one.links]
    if words:
        yield Ailment("worse-link", "KV takes a worse link than it could",
                      tuple(f"{one.instance}: {word}" for one, word in words[:3]), _better(words[0][1]))


def _more(use: LinkUse) -> str:
    """How many times as many decode instances would take it in, with a tenth to spare."""
    times = max(use.needed, use.now) / (USED * use.had)
    return f"{times:.2g} times as many decode instances, each with a link of its own"


def _better(words: str) -> str:
    if _LOCK.search(words):
        return "raise the limit of locked memory: `ulimit -l unlimited`, LimitMEMLOCK=infinity of the container runtime"
    if _NIXL.search(words):
        return "an engine.image with NIXL (docs/rdma.md), and the RDMA device in both pods"
    if _SHARED.search(words):
        return "a folder that both pods share: kv.sharedMemory.hostPath, or another link for pods of two hosts"
    return "mend what is named, or name the link that is meant in kv.transport"


def _uncached(decodes: list[FleetInstance]) -> float:
    """Of the tokens of prompts, those that decode does not have itself."""
    cached = sum(one.intake.cached_s for one in decodes if one.intake is not None)
    rest = sum(one.intake.received_s + one.intake.computed_s for one in decodes if one.intake is not None)
    return rest / (rest + cached) if rest else 1.0


def _bytes(one: FleetInstance) -> float:
    return one.intake.bytes_s if one.intake is not None else 0.0
