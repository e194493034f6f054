"""The condition ``AdaptersLoaded``, of services that have adapters: whether every instance that serves has them.

    True      ``Loaded``
    False     ``Loading``: some are on their way; ``NotLoaded``: some could not be loaded, each named with its reason
    Unknown   ``NoRouter``: no router that knows the fleet tells; ``NoInstance``: none serves

It says nothing of ``Ready``: the model and the other adapters are served without them. A request for an adapter goes where
it is loaded; where no pair has it, it is answered with 404.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from xpyd_operator.api.status import Condition
from xpyd_operator.plan.observed import Instance, ObservedService

KIND: Final = "AdaptersLoaded"
_NAMED: Final = 3


def adapters_loaded(observed: ObservedService, order: str, count: int) -> Condition:
    """Say it. ``order``: digest of what is wanted; ``count``: adapters in it."""
    serving = [one for one in observed.instances if one.ready]
    if not observed.fleet_known:
        return Condition(type=KIND, status="Unknown", reason="NoRouter",
                         message="no router that knows the fleet tells which adapters are loaded")
    if not serving:
        return Condition(type=KIND, status="Unknown", reason="NoInstance", message="no instance serves")
    if problems := list(_problems(serving, order)):
        more = f" and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        return Condition(type=KIND, status="False", reason="NotLoaded", message="; ".join(problems[:_NAMED]) + more)
    waiting = [one for one in serving if one.adapters is None or one.adapters.order != order or one.adapters.waiting]
    if waiting:
        words = ", ".join(one.name for one in waiting[:_NAMED]) + (", …" if len(waiting) > _NAMED else "")
        return Condition(type=KIND, status="False", reason="Loading", message=f"adapters are being loaded by {words}")
    return Condition(type=KIND, status="True", reason="Loaded",
                     message=f"{count} adapter{'s' if count != 1 else ''} on {len(serving)} instances")


def _problems(serving: Iterable[Instance], order: str) -> Iterable[str]:
    """In words, each with the instances that tell it."""
    found: dict[tuple[str, str], list[str]] = {}
    for one in serving:
        if one.adapters is not None and one.adapters.order == order:
            for problem in one.adapters.problems:
                found.setdefault((problem.name, problem.reason), []).append(one.name)
    for (name, reason), where in sorted(found.items()):
        on = ", ".join(where[:_NAMED]) + (", …" if len(where) > _NAMED else "")
        yield f"{name} on {on}: {reason}"
