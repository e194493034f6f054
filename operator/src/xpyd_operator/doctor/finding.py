"""Findings of ``xpyd doctor``: what is wrong with a host or a service, the evidence, what to do, and how harmful it is.

    broken    requests fail, or prefill/decode disaggregation does not work as it is asked for: exit code 1
    costly    the service works, and is slower or dearer than it has to be
    advice    another choice of settings may be better
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

Level = Literal["broken", "costly", "advice"]
HARM: Final[dict[str, Level]] = {
    "no-decode": "broken", "fingerprints": "broken", "pairs-refused": "broken", "no-prefill": "broken",
    "instances-fail": "broken", "requests-fail": "broken", "loads-fail": "broken", "not-received": "broken",
    "link": "costly", "decode-short": "costly", "prefill-short": "costly", "no-payoff": "costly",
    "prefill-idle": "costly", "cache-elsewhere": "costly", "worse-link": "costly", "memlock": "costly",
    "nixl-missing": "costly", "files": "costly", "memory": "costly", "clocks": "costly",
    "plain-engines": "advice", "skip-short": "advice",
}
"""What can be found, the most harmful first."""
_RANK: Final = {name: rank for rank, name in enumerate(HARM)}


class Ailment(msgspec.Struct, frozen=True):
    """One finding: what is wrong, by which evidence, and what a person would do about it. ``level`` always follows from
    ``name`` (``HARM``). Raises KeyError for a name that is not in ``HARM``.
    """

    name: str
    """Of ``HARM``."""
    what: str
    """In a sentence."""
    evidence: tuple[str, ...]
    """By which figures."""
    do: str
    """What a person would do about it."""
    level: Level = "advice"
    """How bad it is; follows from the name."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "level", HARM[self.name])


def order_by_harm(found: Iterable[Ailment | None]) -> tuple[Ailment, ...]:
    """Findings in the order of ``HARM``, the most harmful first; every None is left out."""
    return tuple(sorted((one for one in found if one is not None), key=lambda one: _RANK[one.name]))


def any_broken(found: Iterable[Ailment]) -> bool:
    """Whether at least one finding has the level ``broken``, for which ``xpyd doctor`` exits with 1."""
    return any(one.level == "broken" for one in found)
