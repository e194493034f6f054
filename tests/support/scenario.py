"""Random hand-overs of one prompt from prefill to decode with something that goes wrong, and what came of them.

    for one in draw(random.Random(seed), 25, SCRIPTED): …
    report.add(one.fault, "loaded")

One scenario is one request: its length, when its legs come, and one fault. Several run beside each other on the same
engines, so each also meets the faults of others. What may never be: an answer with another prompt's or attempt's KV
(``wrong``), bytes written into blocks that nobody holds (``stray``), something still held 5 s after the last answer
(``leaked``), a leg without an answer (``hangs``), and an engine that ends by itself (``deaths``).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

LEAK_S = 5.0
MUST_BE_ZERO = ("wrong", "stray", "leaked", "hangs", "deaths")


class Fault(StrEnum):
    """What goes wrong in a scenario."""

    NONE = "none"
    LATE_PREFILL = "prefill comes late"
    LATE_DECODE = "decode comes late"
    NO_PREFILL = "prefill never comes"
    NO_DECODE = "decode never comes"
    DECODE_LEAVES = "decode's client leaves"
    PREFILL_LEAVES = "prefill's leg is aborted"
    RETRIED = "prefill's leg is aborted and tried elsewhere"
    TWO_TRIES = "two tries at once"
    OTHER_PROMPT = "the legs are of different prompts"
    OTHER_LIFE = "another life of decode is meant"
    SECOND_LEG = "two decode legs"
    CORRUPT = "ruined block"
    CORRUPT_HEADER = "ruined header"
    HALF_FRAME = "connection ends within a frame"
    CUT = "connections are cut"
    HOLD = "nothing passes for a while"
    SLOW = "every frame is delayed"
    PREEMPTED = "prefill is preempted"
    BURST = "more than fits, at once"
    STALL = "an engine makes no steps for a while"
    STOP_PREFILL = "SIGSTOP of prefill"
    STOP_DECODE = "SIGSTOP of decode"
    KILL_PREFILL = "kill -9 of prefill"
    KILL_DECODE = "kill -9 of decode"


LEGS: Mapping[Fault, int] = {
    Fault.NONE: 6, Fault.LATE_PREFILL: 3, Fault.LATE_DECODE: 3, Fault.NO_PREFILL: 1, Fault.NO_DECODE: 1,
    Fault.DECODE_LEAVES: 4, Fault.PREFILL_LEAVES: 2, Fault.RETRIED: 4, Fault.TWO_TRIES: 3, Fault.OTHER_PROMPT: 2,
    Fault.OTHER_LIFE: 1, Fault.SECOND_LEG: 2}
"""Faults of the legs alone, with their weights."""
WIRE: Mapping[Fault, int] = {Fault.CORRUPT: 4, Fault.CORRUPT_HEADER: 2, Fault.HALF_FRAME: 2, Fault.CUT: 3, Fault.HOLD: 2,
                             Fault.SLOW: 3, Fault.BURST: 3}
SCRIPTED: Mapping[Fault, int] = {**LEGS, **WIRE, Fault.PREEMPTED: 5, Fault.STALL: 2, Fault.KILL_PREFILL: 1,
                                 Fault.KILL_DECODE: 1}
"""Without engines: preemption and pauses are made by hand, and a kill is the end of all of an engine's sockets."""
REAL: Mapping[Fault, int] = {**LEGS, **WIRE}
"""With engines: they preempt by themselves; signals are sent by the campaign, one after the other."""


TRIES: Mapping[Fault, int] = {Fault.TWO_TRIES: 8, Fault.RETRIED: 4, Fault.CUT: 5, Fault.LATE_DECODE: 2, Fault.HALF_FRAME: 2,
                              Fault.HOLD: 1}
"""With engines: tries that take each other over while links break."""


class Scenario(NamedTuple):
    """One request."""

    number: int
    fault: Fault
    size: float
    """Where its length lies, from 0 to 1."""
    at: float
    """When, and how far into the transfer, the fault comes: 0 to 1."""
    seconds: float
    """How long it lasts."""


def draw(source: random.Random, first: int, count: int, weights: Mapping[Fault, int]) -> list[Scenario]:
    """Scenarios with numbers from ``first`` on."""
    faults = source.choices(list(weights), list(weights.values()), k=count)
    return [Scenario(first + at, fault, source.random(), source.random(), source.uniform(0.05, 1.2))
            for at, fault in enumerate(faults)]


@dataclass
class Report:
    """What came of scenarios; figures of several runs add up."""

    scenarios: int = 0
    answers_200: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    near_ties: int = 0
    stray: int = 0
    leaked: int = 0
    hangs: int = 0
    deaths: int = 0
    late: int = 0
    """Answers that have taken longer than a hang may, by the clock, of engines that were kept waiting for a processor."""
    lives: int = 0
    """Of engines."""
    preemptions: int = 0
    transfers: Counter[str] = field(default_factory=Counter)
    """By outcome, as decode's engines have counted them."""
    links: Counter[str] = field(default_factory=Counter)
    """Bytes of KV that have come to decode's engines, by the link that moved them."""
    signals: dict[str, list[list[float]]] = field(default_factory=dict)
    """By signal, for each one sent: seconds until the other engines held no block, and nothing at all."""
    rejoined_s: list[float] = field(default_factory=list)
    """From a restarted engine's being ready until the router knows it so."""
    examples: list[str] = field(default_factory=list)
    """Of what may never be."""

    def add(self, scenario: Scenario, outcome: str) -> None:
        """A scenario is over."""
        self.scenarios += 1
        self.faults[str(scenario.fault)] += 1
        self.outcomes[outcome] += 1

    def blame(self, kind: str, words: str) -> None:
        """Something that may never be."""
        assert kind in MUST_BE_ZERO
        setattr(self, kind, getattr(self, kind) + 1)
        self.examples = [*self.examples, f"{kind}: {words}"][:20]

    @property
    def clean(self) -> bool:
        """Whether nothing was that may never be."""
        return not any(getattr(self, kind) for kind in MUST_BE_ZERO)

    def told(self) -> dict[str, Any]:
        """For a results file."""
        return {**asdict(self), "faults": dict(sorted(self.faults.items())),
                "outcomes": dict(sorted(self.outcomes.items())), "transfers": dict(sorted(self.transfers.items())),
                "links": dict(sorted(self.links.items()))}


def summed(before: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Two told reports together: numbers are added, examples and measurements joined."""
    found = dict(before)
    for name, value in more.items():
        old = found.get(name)
        if old is None:
            found[name] = value
        elif isinstance(value, Mapping):
            found[name] = summed(old, value)
        elif isinstance(value, list):
            found[name] = old + value
        else:
            found[name] = old + value
    return found
