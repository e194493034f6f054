"""The condition ``Disaggregating``: whether decode receives the prompts that it was to receive, as a router judges it, with
the share of their tokens, the links in use and their GB/s.

    True     ``Receiving``
    False    ``LoadsFail``, ``NoPrefill``, ``NoPair``, ``Computed``, ``SkippedByRule``; ``DecodeAlone``: none is asked for
    Unknown  ``NoTraffic``, ``NoDecode``, ``NotTold``; ``NoRouter``: no router that knows the fleet tells

It says nothing of ``Ready``: answers are right without it, and cost what P/D was to save.
"""

from __future__ import annotations

from typing import Final

from xpyd_operator.api.status import Condition
from xpyd_operator.plan.observed import ObservedService

KIND: Final = "Disaggregating"
ASKED: Final = frozenset({"DecodeAlone", "SkippedByRule"})
"""Reasons of what the document asks for."""
BY_TRAFFIC: Final = frozenset({"Receiving", "LoadsFail", "Computed"})
REASONS: Final = ASKED | BY_TRAFFIC | {"NoPrefill", "NoPair", "NoTraffic", "NoDecode", "NotTold"}
"""That routers tell; one of another version may tell others."""


def disaggregating(observed: ObservedService, *, prefill: bool) -> Condition:
    """Say it. ``prefill``: prefill instances are asked for."""
    told = observed.disaggregation
    if not prefill:
        return Condition(type=KIND, status="False", reason="DecodeAlone",
                         message="no prefill instance is wanted, so decode computes all prompts")
    if told is None:
        return Condition(type=KIND, status="Unknown", reason="NoRouter",
                         message="no router that knows the fleet tells what decode receives")
    reason = told.reason if told.reason in REASONS else "NotTold"
    return Condition(type=KIND, status=told.holds, reason=reason, message=told.message)


def is_news(was: Condition | None, now: Condition) -> bool:
    """Whether a person is told: not of what is asked for, nor of instances that only come up (others tell of those)."""
    before = was.status if was is not None else "Unknown"
    if now.status == "True":
        return before == "False" and was is not None and was.reason not in ASKED
    if now.status == "Unknown" or now.reason in ASKED:
        return False
    return before == "True" or (now.reason == "LoadsFail" and (was is None or was.reason != now.reason))
