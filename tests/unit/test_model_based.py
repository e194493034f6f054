"""The planner over random histories of a simulated cluster: laws after every step, rest when it is left alone.

10,000 steps in all. A history is made from its seed alone; a failure names the seed and the step. Planners that are broken
on purpose must be caught by the same laws.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from random import Random

import msgspec
import pytest
from pod_world import ROLES, PodWorld, bounded, wish

from xpyd_operator.api.operation import Rollout
from xpyd_operator.plan import balance, names, rollout, routers
from xpyd_operator.plan import step as planning
from xpyd_operator.plan import switch as switching
from xpyd_operator.plan.actions import Create, Drain, Label, Plan, Switch
from xpyd_operator.plan.canary import Stage
from xpyd_operator.plan.desired import DesiredService, Revision, RoleTarget
from xpyd_operator.plan.observed import ObservedService
from xpyd_operator.plan.step import step
from xpyd_sidecar.contract.ids import Role

HISTORIES, STEPS = 50, 200
pytestmark = pytest.mark.timeout(300)  # seconds of work at most, but a busy machine may take long
ROLLOUTS: list[dict[str, int | str]] = [
    {}, {}, {"max_surge": 2}, {"max_unavailable": 1}, {"max_surge": 0, "max_unavailable": 1},
    {"max_surge": 3, "max_unavailable": 2}, {"max_surge": "50%"}, {"max_surge": "100%", "max_unavailable": "34%"},
    {"max_surge": 0, "max_unavailable": "50%"},
]
REVISIONS = ("r1", "r2", "r3", "r4")


class Broken(AssertionError):
    """A law does not hold."""


class History:
    """One random history."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.world = PodWorld(
            start_s=random.choice([1, 4, 10]), drain_s=random.choice([0, 5, 40]), stop_s=random.choice([0, 2]),
            switch_s=random.choice([0.1, 0.5, 4.0, 500.0]),
        )
        self.rough = random.choice([0.0, 0.3, 1.0])
        kinds = random.choice([("a",), ("a", "b"), ("a", "b", "c")])
        self.world.prints = {revision: random.choice(kinds) * 32 for revision in REVISIONS}
        self.rollout = Rollout(**random.choice(ROLLOUTS))
        self.want = wish(
            1, 2, rollout=self.rollout, max_sidecars=random.choice([1, 2, 8]),
            switches=random.random() < 0.7, switch_window_s=random.choice([0.0, 5.0, 30.0]),
        )
        self.one_by_one = random.random() < 0.5
        """Counts are set by pools, so that a surplus waits."""

    def run(self, steps: int) -> None:
        """So many steps, then peace."""
        for number in range(steps):
            self._happen()
            try:
                self._round()
            except Broken as error:
                raise Broken(f"step {number}: {error}") from error
        self._peace()

    def _happen(self) -> None:
        random, world, rough = self.random, self.world, self.rough
        world.advance(random.choice([0.2, 1.0, 1.0, 3.0]))
        if random.random() < 0.03:
            self.want = self._edited()
        names = sorted(world.pods)
        if names and random.random() < 0.06 * rough:
            hit = random.choice([world.crash, world.crash, world.delete, world.fail, world.lose])
            hit(random.choice(names))
        if random.random() < 0.1:
            world.nodes_back()
        if random.random() < 0.01:
            world.broken = {random.choice(REVISIONS)} if random.random() < rough else set()
        if random.random() < 0.01:
            world.slow = {random.choice(REVISIONS)} if random.random() < rough else set()
        if random.random() < 0.02:
            world.room = random.choice([4, 6, 8]) if random.random() < rough else 1000
        world.answers = random.random() > 0.1 * rough
        for pod in world.pods.values():
            pod.load = random.randrange(9)

    def _edited(self) -> DesiredService:
        random, want = self.random, self.want
        what = random.randrange(7)
        prefill, decode = want.prefill, want.decode
        if self.one_by_one:
            want = msgspec.structs.replace(want, counts_since=self.world.now)
        if what == 0:
            prefill = RoleTarget(random.randrange(0, 4), prefill.revision)
        elif what == 1:
            decode = RoleTarget(random.randrange(1, 6), decode.revision)
        elif what == 2:
            prefill = RoleTarget(prefill.replicas, Revision(random.choice(REVISIONS)))
        elif what == 3:
            decode = RoleTarget(decode.replicas, Revision(random.choice(REVISIONS)))
        elif what == 4:
            both = Revision(random.choice(REVISIONS))
            prefill, decode = RoleTarget(prefill.replicas, both), RoleTarget(decode.replicas, both)
        elif what == 5:
            shift = random.choice([-1, 1])
            prefill = RoleTarget(max(0, prefill.replicas + shift), prefill.revision)
            decode = RoleTarget(max(1, decode.replicas - shift), decode.revision)
        else:
            self.rollout = Rollout(**random.choice(ROLLOUTS))
        prefill, decode = (bounded(target, self.rollout) for target in (prefill, decode))
        return msgspec.structs.replace(want, prefill=prefill, decode=decode)

    def _round(self) -> None:
        """A round of the operator. It may end in the middle, and an action may fail, whether it was carried out or not."""
        random, world, want = self.random, self.world, self.want
        seen = world.observe()
        plan = step(want, seen, world.now)
        assert plan == step(want, seen, world.now), "two answers to one question"
        check_switches(want, seen, plan)
        before = Sight(world)
        killed = random.randrange(len(plan.actions) + 1) if random.random() < 0.05 else len(plan.actions)
        failing = 0.3 if random.random() < 0.1 else 0.0
        whole = killed == len(plan.actions) and not failing
        for action in plan.actions[:killed]:
            if random.random() >= failing or random.random() < 0.5:
                world.apply(action)
        check(world, want, before, Sight(world), whole=whole)
        if whole:
            again = step(want, world.observe(), world.now)
            repeated = [str(action) for action in again.actions if action in plan.actions]
            law(not repeated, f"done twice: {repeated}")

    def _peace(self) -> None:
        """Without faults everything comes to rest as asked for."""
        world, want = self.world, self.want
        world.broken, world.slow, world.room, world.answers = set(), set(), 1000, True
        world.nodes_back()
        still = 0
        for _ in range(3000):
            before = Sight(world)
            plan = step(want, world.observe(), world.now)
            for action in plan.actions:
                world.apply(action)
            check(world, want, before, Sight(world), whole=True)
            still = 0 if plan.actions else still + 1
            if still > 150:
                break
            world.advance(1.0)
        law(still > 150, f"no rest: {[str(action) for action in plan.actions]}")
        clash = want.prefill.replicas > 0 and len({world.prints[want.target(role).revision] for role in ROLES}) > 1
        for role in ROLES:
            target, there = want.target(role), world.existing(role)
            serving = world.serving(role)
            law(bool(serving) or not target.replicas, f"no {role} serves")
            if not clash:
                law(len(serving) == target.replicas, f"{role}: {len(serving)} serve")
                law(len(there) == target.replicas, f"{role}: {len(there)} of {target.replicas}")
                law(all(pod.revision == target.revision for pod in there), f"{role}: an old revision stays")
        law(bool(world.routing()), "clients reach no router")


class Sight:
    """What the laws compare."""

    def __init__(self, world: PodWorld) -> None:
        self.exist = {role: len(world.existing(role)) for role in ROLES}
        self.ready = {role: len(world.serving(role)) for role in ROLES}
        self.groups = world.groups()
        self.routing = len(world.routing())


def law(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Broken(otherwise)


def check(world: PodWorld, want: DesiredService, before: Sight, after: Sight, *, whole: bool) -> None:
    """The laws of one round, in which no time passed: every difference was the planner's will."""
    law(len({pod.ordinal for pod in world.pods.values()}) == len(world.pods), "two instances of one ordinal")
    for role in ROLES:
        target = want.target(role)
        limit = target.replicas + target.max_surge
        law(after.exist[role] <= max(limit, before.exist[role]), f"{role}: {after.exist[role]} exist, at most {limit}")
        floor = min(before.ready[role], target.replicas - target.max_unavailable)
        law(after.ready[role] >= floor, f"{role}: {after.ready[role]} serve, not fewer than {floor}")
    law(not any(pod.roster or pod.router for pod in world.existing(Role.PREFILL)), "a prefill instance routes")
    heard = [pod for pod in world.existing(Role.DECODE) if pod.roster and pod.ends is None]
    most = max(want.max_sidecars, 2 if before.routing else 1)
    law(not whole or len(heard) <= most, f"{len(heard)} routers, at most {most}")
    if before.routing and after.ready[Role.DECODE]:
        law(after.routing > 0, "clients lost their last router")
    if want.prefill.max_surge > 0 and want.decode.max_surge > 0 and want.prefill.replicas and whole:
        for found, (prefill, decode) in before.groups.items():
            left = after.groups.get(found, (0, 0))
            law(not (prefill and decode) or bool(left[0]) == bool(left[1]), f"{found[:1]}: {left} of {(prefill, decode)}")
        paired = any(all(pair) for pair in before.groups.values())
        law(not paired or any(all(pair) for pair in after.groups.values()), "prefill and decode share no fingerprint")


def check_switches(want: DesiredService, seen: ObservedService, plan: Plan) -> None:
    """Running instances change their role where that serves, and only there."""
    made = {action.instance: action for action in plan.actions if isinstance(action, Switch)}
    there = {one.name: one for one in seen.instances}
    law(not made or (want.switches and seen.fleet_known), "a switch that nobody may make")
    law(all(there[name].ready and not there[name].switching for name in made), "a switch of who does not serve, or does")
    law(all(there[name].revision == want.target(role.role).revision for name, role in made.items()), "another revision")
    named = [action.instance for action in plan.actions]
    law(all(named.count(name) == 1 or there[name].role is Role.PREFILL for name in made), "a switch and something else")
    mixed = any(one.revision != want.target(one.role).revision for one in seen.instances if not one.leaving)
    busy = any(one.switching for one in seen.instances if one.ready)
    drained = {there[action.instance].role for action in plan.actions
               if isinstance(action, Drain) and there[action.instance].ready and not there[action.instance].switching}
    alike = want.switches and want.prefill.revision == want.decode.revision and seen.fleet_known
    if alike and not mixed:
        made_of = {action.role for action in plan.actions if isinstance(action, Create)}
        for role in (Role.PREFILL, Role.DECODE):
            idle = [one for one in seen.instances if one.role is role and one.ready and not one.switching]
            spare = len([one for one in idle if one.name not in made]) - want.target(role).replicas
            router = role is Role.DECODE  # the last one that clients reach may have to stay
            law(spare <= router or not made_of - {role}, f"{spare} {role} too many and others made: a switch would do")
    law(not (busy and drained), "a drain while an instance switches")


def complaint(seed: int) -> str:
    """Which law a history breaks; empty when it breaks none."""
    try:
        History(seed).run(STEPS)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_the_laws_hold_and_it_comes_to_rest(seed: int) -> None:
    assert not complaint(seed)


def _nothing(*_: object, **__: object) -> dict[str, str]:
    return {}


def _all(mine: rollout.RoleView, *_: object, **__: object) -> int:
    return mine.ready


def _no_surge(mine: rollout.RoleView, back: int, *, canary: bool = False) -> int:
    target = msgspec.structs.replace(mine.target, max_surge=1000)
    return rollout.missing(msgspec.structs.replace(mine, target=target), back, canary=canary)


def _nobody(*_: object) -> str:
    return ""


def _same(*_: object, **__: object) -> Stage:
    return Stage.SAME


def _restless(_: object, observed: ObservedService, *__: object) -> list[Label]:
    return [Label(one.name, not one.roster, False) for one in observed.instances[:1] if not one.leaving]


def _none(*_: object) -> int:
    return 0


def _any_ordinal(_: object) -> Iterator[int]:
    return itertools.count()


BREAKS: dict[str, tuple[tuple[tuple[object, str, Callable[..., object]], ...], str]] = {
    "drains below what is asked for": (((rollout, "_room", _all), (rollout, "_replaced", _all)), "serve, not fewer than"),
    "knows no surge": (((planning, "missing", _no_surge),), "exist, at most"),
    "leaves one role of a fingerprint": (((balance, "reasons_to_keep", _nothing),), r" of \("),
    "takes every revision for the same KV": (
        ((rollout, "stage", _same), (balance, "reasons_to_keep", _nothing)), r" of \("),
    "drains the last router": (((routers, "last_router", _nobody),), "last router"),
    "never rests": (((routers, "label", _restless),), "done twice|no rest|routes"),
    "drains and makes what could switch": (
        ((switching, "_deficit", _none), (switching, "waits", _nobody)),
        "a switch would do",
    ),
    "takes ordinals that are in use": (((names, "free_ordinals", _any_ordinal),), "exists"),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_a_broken_planner_is_caught(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The laws can fail: each planner breaks one of them, and a history shows it."""
    patches, message = BREAKS[broken]
    for where, name, replacement in patches:
        monkeypatch.setattr(where, name, replacement)
    assert any(re.search(message, complaint(seed)) for seed in range(HISTORIES)), "no history shows it"
