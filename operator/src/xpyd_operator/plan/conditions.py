"""The conditions of a service, each with a reason that a program can compare and words that a person can act on.

    Ready        a request is answered now: a router that clients reach, and prefill (where it is wanted) and decode of one
                 fingerprint that serve. It does not say that all wanted instances serve: ``AllReady`` does, and while fewer
                 do the reason is ``Serving``. So a crash of one of many, or a rollout that may be one short, is no outage.
    Progressing  something is done, moves or waits. ``Stuck`` (False): nothing will move before a person does something.
                 ``Queued``, ``WaitingForNode``: all that is not there yet waits for a place that somebody outside gives
    Degraded     a person should look: what is wrong, of which instance; the first three are named
    Compatible   all that serve can pair: False while a rollout is held, or nothing that serves can pair; names fingerprints
    Suspended    only of a service that is suspended, in place of the two below and, once nothing runs, of Ready
    Disaggregating   decode receives the prompts that it was to receive (``disaggregating``)
    AdaptersLoaded   of a service with adapters: every instance that serves has them (``adapters``)

Ready of what does not serve has the reason of what is broken, if anything is. All are folds over what is not there
(``absent``), with what came of the round added (``after``).

The same state gives the same words: there are no ages in them. Messages have at most ``LONGEST`` characters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from xpyd_operator.api.status import Condition, RolesStatus
from xpyd_operator.plan.absent import PUT_OFF, QUEUED, Absence, Breakage, Waiting
from xpyd_operator.plan.actions import Plan
from xpyd_operator.plan.adapters import adapters_loaded
from xpyd_operator.plan.balance import group
from xpyd_operator.plan.canary import RoleView, Stage, clash, stage, view
from xpyd_operator.plan.desired import DesiredService
from xpyd_operator.plan.disaggregating import disaggregating
from xpyd_operator.plan.observed import STARTS, Instance, ObservedService, Phase
from xpyd_operator.plan.suspension import suspension_conditions
from xpyd_sidecar.contract.ids import Role

LONGEST = 1000
"""Characters of a message."""
_NAMED = 3
NO_NODE = "WaitingForNode"
"""Reason of a service of which all that is not there waits for a node."""
FAILED = "Failed"
"""Reason of what a round could not carry out."""

Views = tuple[RoleView, RoleView]


def conditions(
    desired: DesiredService, observed: ObservedService, plan: Plan, roles: RolesStatus, after: Sequence[Absence] = ()
) -> tuple[Condition, ...]:
    """Ready, Progressing, Degraded, Compatible, Disaggregating, with adapters AdaptersLoaded; of a suspended service those
    of ``suspension``.

    ``after``: what a round could not do, and what it put off.
    """
    if desired.suspended_since:
        found = suspension_conditions(observed, plan, _degraded(observed, "", after), after)
        return tuple(msgspec.structs.replace(each, message=shorten(each.message)) for each in found)
    views = (
        view(Role.PREFILL, desired.prefill, observed.instances),
        view(Role.DECODE, desired.decode, observed.instances),
    )
    held, order = _clash(views, observed), desired.adapters
    return (
        _ready(desired, observed, views, roles),
        _progressing(desired, observed, plan, held, after),
        _degraded(observed, held, after),
        _compatible(views, held),
        disaggregating(observed, prefill=desired.prefill.replicas > 0),
        *([adapters_loaded(observed, order.digest, len(order.adapters))] if order.adapters else []),
    )


def shorten(text: str, most: int = LONGEST) -> str:
    """The text in one line of at most ``most`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 2] + " …"


def _ready(desired: DesiredService, observed: ObservedService, views: Views, roles: RolesStatus) -> Condition:
    if desired.stopping:
        return _say("Ready", "False", "Stopping", "the service ends")
    late = _unreached(desired, observed)
    if late is not None and desired.router is not None:
        return _say("Ready", "False", *late)
    if late is None and not desired.decode.replicas:
        return _say("Ready", "True", "AtZero", "no instance runs, and none is asked for: the next request starts them")
    short = ", ".join(
        f"{counts.ready} of {counts.wanted} {role} instances ready"
        for role, counts in ((Role.PREFILL, roles.prefill), (Role.DECODE, roles.decode))
        if counts.ready < counts.wanted
    )
    coming = _coming(observed)
    crashed = [instance for instance in coming if instance.phase is Phase.CRASHED]
    queued = [one for one in coming if one.queued]
    without = [one for one in coming if one.placeless and not one.queued]
    for what, those in (("crashed", crashed), ("queued", queued), ("without a node", without)):
        if short and those:
            short += f"; {what}: {_names(those)}"
    if not _pairs(views):
        if short:
            return _say("Ready", "False", "Crashed" if crashed else _place(coming) or _worst(coming) or "Starting", short)
        return _say("Ready", "False", "Incompatible", "prefill and decode serve, but have no fingerprint in common")
    if late is not None:
        return _say("Ready", "False", *late)
    if short:
        return _say("Ready", "True", "Serving", short)
    return _say("Ready", "True", "AllReady", f"{desired.shape} ready")


def _coming(observed: ObservedService) -> list[Instance]:
    """Those that do not serve yet, and do not leave."""
    return [one for one in observed.instances if not one.ready and not one.leaving]


def _place(coming: Sequence[Instance]) -> str:
    """The reason where all of them wait for a place; empty where not all do, or there are none."""
    if not coming or not all(one.placeless for one in coming):
        return ""
    return QUEUED if all(one.queued for one in coming) else NO_NODE


def _worst(coming: Iterable[Instance]) -> str:
    """The reason of the first that is broken; empty where none is."""
    return next((why.reason for one in coming if isinstance(why := one.absence, Breakage)), "")


def _unreached(desired: DesiredService, observed: ObservedService) -> tuple[str, str] | None:
    """Reason and words where clients reach no router that could answer."""
    router, front = observed.router, observed.front
    if desired.router is not None:
        if router is None or not router.unit.alive:
            return "RouterDown", "no router process runs"
        if not router.ready:
            return "RouterNotReady", "the router does not answer yet or still learns the roster"
        return None
    return None if front is None else (front.reason, front.message)


def _pairs(views: Views) -> bool:
    """A request could be answered: decode serves, and prefill of the same fingerprint where prefill is wanted."""
    prefill, decode = views
    if not decode.ready or (prefill.wanted_count and not prefill.ready):
        return False
    ours, theirs = group(prefill.serving), group(decode.serving)
    return not prefill.wanted_count or not ours or not theirs or bool(ours.keys() & theirs.keys())


def _progressing(
    desired: DesiredService, observed: ObservedService, plan: Plan, held: str, after: Sequence[Absence]
) -> Condition:
    if desired.stopping:
        return _say("Progressing", "True", "Stopping", "the service ends")
    limit = f"; {desired.held}" if desired.held else ""
    off = [each.message for each in after if isinstance(each, Waiting)]
    away = [one for one in observed.instances if not one.ready and one.phase is not Phase.LOST]
    without = [one for one in away if one.placeless]
    stuck = [one for one in away if not one.leaving and not one.placeless and not one.serves_soon]
    moving = [one for one in away if one.leaving or one.serves_soon]
    moving += [one for one in observed.instances if one.ready and one.switching]
    routers = [each for each in observed.absent if isinstance(each, Waiting) and (each.ends_soon or each.place)]
    if plan.settled and not away and not moving and not routers and not off:
        return _say("Progressing", "False", "Settled", f"everything is as asked for{limit}")
    parts = [str(part) for part in (*plan.actions, *plan.waits)]
    for what, those in (("queued", [one for one in without if one.queued]),
                        ("without a node", [one for one in without if not one.queued]),
                        ("changing", moving)):
        if those:
            parts.append(f"{what}: {_names(those)}")
    if stuck and not plan.actions and not moving:
        parts.append(f"in trouble: {_names(stuck)}")
    parts += _why([one.absence for one in (*without, *moving)])
    parts += [_cut(each.message, LONGEST // _NAMED) for each in routers[:1]]
    words = "; ".join((*parts, *off)) + limit
    if off:
        return _say("Progressing", "True", PUT_OFF, words)
    if not plan.actions and not moving and (stuck or held):
        return _say("Progressing", "False", "Stuck", words)
    if not plan.actions and not moving and (without or any(each.place for each in routers)):
        return _say("Progressing", "True", _place(without) or NO_NODE, words)
    return _say("Progressing", "True", "Changing", words)


def _why(those: Iterable[Absence | None]) -> list[str]:
    """What is waited for, in the words of the first of each reason; of queues and plain starts the names say it."""
    first: dict[str, str] = {}
    for each in those:
        if each is not None and each.reason != QUEUED and each.message != STARTS:
            first.setdefault(each.reason, each.message)
    return [_cut(words, LONGEST // (_NAMED + 1)) for words in list(first.values())[:_NAMED]]


def _degraded(observed: ObservedService, held: str, after: Sequence[Absence]) -> Condition:
    found = [(each.reason, each.message) for each in observed.absent if each.person]
    if held:
        found.append(("Incompatible", held))
    for instance in observed.instances:
        why = instance.absence
        if why is not None and why.person:
            found.append((why.reason, f"{instance.name}: {why.message}"))
    router = observed.router
    if router is not None and not router.unit.alive and not router.stopping:
        found.append(("CrashLoop", f"router: {router.unit.exit or 'it ended'}"))
    failed = [each.message for each in after if isinstance(each, Breakage)]
    if not found:
        if failed:
            return _say("Degraded", "True", FAILED, "; ".join(failed))
        return _say("Degraded", "False", "Healthy", "nothing needs a person")
    several = len({reason for reason, _ in found}) > 1
    said = [f"{words} ({reason})" if several else words for reason, words in found[:_NAMED]]
    if len(found) > _NAMED:
        rest = Counter(reason for reason, _ in found[_NAMED:])
        said.append("and " + ", ".join(f"{count} more with {reason}" for reason, count in sorted(rest.items())))
    each = LONGEST // (_NAMED + 1)
    return _say("Degraded", "True", found[0][0], "; ".join([*(_cut(words, each) for words in said), *failed]))


def _clash(views: Views, observed: ObservedService) -> str:
    """Why a rollout is held for good; empty where none is."""
    for mine, other in (views, views[::-1]):
        if stage(mine, other, fleet_known=observed.fleet_known) is Stage.HELD:
            return clash(mine, other)
    return ""


def _compatible(views: Views, held: str) -> Condition:
    prefill, decode = views
    ours, theirs = group(prefill.serving), group(decode.serving)
    if held:
        return _say("Compatible", "False", "Incompatible", held)
    if not prefill.wanted_count:
        return _say("Compatible", "True", "DecodeAlone", "no prefill instance is wanted")
    if not ours or not theirs:
        return _say("Compatible", "Unknown", "FingerprintsUnknown", "the fingerprints of both roles are not known yet")
    named = f"prefill serves {_list(sorted(ours))}, decode {_list(sorted(theirs))}"
    if not ours.keys() & theirs.keys():
        return _say("Compatible", "False", "Incompatible", named)
    if refused := _refused(views):
        words = _list([f"{decode} cannot take KV from {prefill}: {why}" for decode, prefill, why in refused])
        if len(refused) >= sum(ours[kind] * theirs[kind] for kind in ours.keys() & theirs.keys()):
            return _say("Compatible", "False", "PairsRefused", words)
        return _say("Compatible", "True", "SomePairsRefused", words)
    named += "".join(f"; {words}" for words in _linked(views))
    if ours.keys() == theirs.keys() and len(ours) == 1:
        return _say("Compatible", "True", "SameFingerprint", named)
    return _say("Compatible", "True", "SeveralFingerprints", f"{named}; pairs are made only within one")


def _refused(views: Views) -> list[tuple[str, str, str]]:
    """Decode and prefill instances that serve, of one fingerprint, and have found that they cannot pair; and why."""
    prefill, decode = views
    serving = {one.name: one.fingerprint for one in prefill.serving}
    return [(one.name, name, why) for one in decode.serving for name, why in one.refuses
            if serving.get(name) == one.fingerprint]


def _linked(views: Views) -> list[str]:
    """What instances that serve say of links that are worse than they could be, each with their names."""
    by_words: dict[str, list[str]] = {}
    for instance in (*views[0].serving, *views[1].serving):
        for words in instance.links:
            by_words.setdefault(words, []).append(instance.name)
    return [f"{_list(names)}: {words}" for words, names in sorted(by_words.items())]


def _list(words: list[str]) -> str:
    more = len(words) - _NAMED
    return ", ".join(words[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _names(instances: list[Instance]) -> str:
    return _list([instance.name for instance in instances])


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _say(kind: str, holds: Literal["True", "False", "Unknown"], reason: str, message: str) -> Condition:
    return Condition(type=kind, status=holds, reason=reason, message=shorten(message))
