"""The conditions of a service, each with a reason that a program can compare and words that a person can act on.

    Ready        a request is answered now: a router that clients reach, and prefill (where it is wanted) and decode of one
                 fingerprint that serve. It does not say that all wanted instances serve: ``AllReady`` does, and while fewer
                 do the reason is ``Serving``. So a crash of one of many, or a rollout that may be one short, is no outage.
    Progressing  something is done, moves or waits. ``Stuck`` (False): nothing will move before a person does something.
                 ``Queued``: all that is not there yet waits to be admitted by something outside
    Degraded     a person should look: what is wrong, of which instance; the first three are named
    Compatible   all that serve can pair: False while a rollout is held, or nothing that serves can pair; names fingerprints
    Disaggregating   decode receives the prompts that it was to receive (``disaggregating``)

The same state gives the same words: there are no ages in them. Messages have at most ``LONGEST`` characters.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from xpyd_operator.api.status import Condition, RolesStatus
from xpyd_operator.plan.actions import Plan
from xpyd_operator.plan.backoff import LOOPING
from xpyd_operator.plan.balance import group
from xpyd_operator.plan.canary import RoleView, Stage, clash, hopeless, stage, view
from xpyd_operator.plan.desired import Desired
from xpyd_operator.plan.disaggregating import disaggregating
from xpyd_operator.plan.observed import QUEUED, Instance, Observed, Phase, Problem
from xpyd_sidecar.contract.ids import Role

LONGEST = 1000
"""Characters of a message."""
_NAMED = 3

Views = tuple[RoleView, RoleView]


def conditions(desired: Desired, observed: Observed, plan: Plan, roles: RolesStatus) -> tuple[Condition, ...]:
    """Ready, Progressing, Degraded, Compatible, Disaggregating."""
    views = (
        view(Role.PREFILL, desired.prefill, observed.instances),
        view(Role.DECODE, desired.decode, observed.instances),
    )
    held = _clash(views, observed)
    return (
        _ready(desired, observed, views, roles),
        _progressing(desired, observed, plan, held),
        _degraded(observed, held),
        _compatible(views, held),
        disaggregating(observed, prefill=desired.prefill.replicas > 0),
    )


def bounded(text: str) -> str:
    """At most ``LONGEST`` characters, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else line[: LONGEST - 2] + " …"


def _ready(desired: Desired, observed: Observed, views: Views, roles: RolesStatus) -> Condition:
    if desired.stopping:
        return _say("Ready", "False", "Stopping", "the service ends")
    late = _unreached(desired, observed)
    if late is not None and desired.router is not None:
        return _say("Ready", "False", *late)
    short = ", ".join(
        f"{counts.ready} of {counts.wanted} {role} instances ready"
        for role, counts in ((Role.PREFILL, roles.prefill), (Role.DECODE, roles.decode))
        if counts.ready < counts.wanted
    )
    crashed = _names([instance for instance in observed.instances if instance.phase is Phase.CRASHED])
    queued, others = _queued(observed)
    for what, names in (("crashed", crashed), ("queued", _names(queued))):
        if short and names:
            short += f"; {what}: {names}"
    if not _pairs(views):
        if short:
            reason = "Crashed" if crashed else QUEUED if queued and not others else "Starting"
            return _say("Ready", "False", reason, short)
        return _say("Ready", "False", "Incompatible", "prefill and decode serve, but have no fingerprint in common")
    if late is not None:
        return _say("Ready", "False", *late)
    if short:
        return _say("Ready", "True", "Serving", short)
    return _say("Ready", "True", "AllReady", f"{desired.shape} ready")


def _queued(observed: Observed) -> tuple[list[Instance], list[Instance]]:
    """Those that wait to be admitted, and the others that do not serve yet."""
    coming = [one for one in observed.instances if not one.ready and not one.leaving]
    return [one for one in coming if one.queued], [one for one in coming if not one.queued]


def _unreached(desired: Desired, observed: Observed) -> tuple[str, str] | None:
    """Reason and words where clients reach no router that could answer."""
    router, front = observed.router, observed.front
    if desired.router is not None:
        if router is None or not router.unit.alive:
            return "RouterDown", "no router process runs"
        if not router.ready:
            return "RouterNotReady", "the router does not answer yet or still learns the roster"
        return None
    if front is None:
        return "NoRouter", "nothing is known of routers"
    return None if front.ready else (front.reason, front.message or "no router that clients reach can answer yet")


def _pairs(views: Views) -> bool:
    """A request could be answered: decode serves, and prefill of the same fingerprint where prefill is wanted."""
    prefill, decode = views
    if not decode.ready or (prefill.wanted and not prefill.ready):
        return False
    ours, theirs = group(prefill.serving), group(decode.serving)
    return not prefill.wanted or not ours or not theirs or bool(ours.keys() & theirs.keys())


def _progressing(desired: Desired, observed: Observed, plan: Plan, held: str) -> Condition:
    away = [one for one in observed.instances if not one.ready and one.phase is not Phase.LOST]
    queued, _ = _queued(observed)
    stuck = [instance for instance in away if not instance.leaving and not instance.queued and hopeless(instance)]
    moving = [instance for instance in away if instance.leaving or not hopeless(instance)]
    moving += [instance for instance in observed.instances if instance.ready and instance.switching]
    if desired.stopping:
        return _say("Progressing", "True", "Stopping", "the service ends")
    limit = f"; {desired.held}" if desired.held else ""
    if plan.settled and not moving and not stuck and not queued:
        return _say("Progressing", "False", "Settled", f"everything is as asked for{limit}")
    parts = [str(part) for part in (*plan.actions, *plan.waits)]
    if queued:
        parts.append(f"queued: {_names(queued)}")
        if not plan.actions and not moving and not stuck and not held:
            return _say("Progressing", "True", QUEUED, "; ".join(parts) + limit)
    if not plan.actions and not moving and (stuck or held):
        parts += [f"in trouble: {_names(stuck)}"] if stuck else []
        return _say("Progressing", "False", "Stuck", "; ".join(parts) + limit)
    if moving:
        parts.append(f"changing: {_names(moving)}")
    return _say("Progressing", "True", "Changing", "; ".join(parts) + limit)


def _degraded(observed: Observed, held: str) -> Condition:
    found = [(problem.reason, problem.message) for problem in observed.problems if problem.lasting]
    if held:
        found.append(("Incompatible", held))
    for instance in observed.instances:
        trouble = _trouble(instance)
        if trouble is not None:
            found.append((trouble.reason, f"{instance.name}: {trouble.message}"))
    router = observed.router
    if router is not None and not router.unit.alive and not router.stopping:
        found.append(("CrashLoop", f"router: {router.unit.exit or 'it ended'}"))
    if not found:
        return _say("Degraded", "False", "Healthy", "nothing needs a person")
    several = len({reason for reason, _ in found}) > 1
    said = [f"{words} ({reason})" if several else words for reason, words in found[:_NAMED]]
    if len(found) > _NAMED:
        rest = Counter(reason for reason, _ in found[_NAMED:])
        said.append("and " + ", ".join(f"{count} more with {reason}" for reason, count in sorted(rest.items())))
    each = LONGEST // (_NAMED + 1)
    return _say("Degraded", "True", found[0][0], "; ".join(_cut(words, each) for words in said))


def _trouble(instance: Instance) -> Problem | None:
    """What a person should know of an instance; not of one that only leaves."""
    if instance.leaving and instance.phase is not Phase.LOST:
        return None
    problem = instance.problem
    if problem is not None and problem.lasting:
        return problem
    if instance.crashes < LOOPING or instance.phase is Phase.LOST:
        return None
    if instance.units:
        worst = max(instance.units, key=lambda unit: unit.crashes)
        return Problem(
            "CrashLoop", f"{worst.name} crashed {worst.crashes} times in a row ({worst.exit or 'it ended'})"
        )
    if instance.ready:
        return None
    cause = f" ({problem.message})" if problem is not None else ""
    return Problem("CrashLoop", f"it crashed {instance.crashes} times in a row{cause}")


def _clash(views: Views, observed: Observed) -> str:
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
    if not prefill.wanted:
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
    return Condition(type=kind, status=holds, reason=reason, message=bounded(message))
