"""A canary shows what KV a new revision computes; what follows, in exact sequences over a cluster of pods."""

from __future__ import annotations

import pytest
from pod_world import PodWorld, wish

from xpyd_operator.api.operation import Rollout
from xpyd_operator.plan.absent import UNPLACED, Breakage, Waiting
from xpyd_operator.plan.canary import Stage, stage, view
from xpyd_operator.plan.desired import STARTUP_S, DesiredService
from xpyd_operator.plan.observed import Instance, Phase
from xpyd_operator.plan.status import is_true, status
from xpyd_operator.plan.step import step
from xpyd_sidecar.contract.ids import InstanceName, Role

WITHOUT_SURGE = Rollout(max_surge=0, max_unavailable=1)
OTHER = {"r2": "b" * 32}


def waits(world: PodWorld, want: DesiredService) -> list[str]:
    return [str(wait) for wait in step(want, world.observe(), world.now).waits]


def served(prefill: int = 1, decode: int = 3, **more: object) -> PodWorld:
    world = PodWorld()
    world.run(wish(prefill, decode, **more))
    return world


def test_one_canary_even_where_surge_has_room_for_more() -> None:
    world = served(rollout=Rollout(max_surge=3))
    want = wish(1, 3, "r2", rollout=Rollout(max_surge=3))
    plan = world.tick(want)
    assert [str(action) for action in plan.actions] == ["create qwen-e4 as prefill", "create qwen-e5 as decode"]
    assert not any("create" in str(action) for action in world.tick(want).actions)
    assert waits(world, want) == ["creating 2 more of decode waits: the new revision is tried on qwen-e5 first"]


def test_the_same_kv_rolls_pod_by_pod_and_leaves_the_other_role_alone() -> None:
    world = served()
    assert world.run(wish(1, 3, "r1", "r2")) == [
        "create qwen-e4 as decode",
        "drain qwen-e3: of an old revision, replaced",
        "create qwen-e3 as decode",
        "drain qwen-e2: of an old revision, replaced",
        "create qwen-e2 as decode",
        "drain qwen-e1: of an old revision, replaced",
    ]


def test_the_same_kv_needs_nothing_of_the_other_role() -> None:
    """No prefill serves, and a decode rollout goes on all the same."""
    world = served()
    world.broken.add("r1")
    world.crash("qwen-e0")
    want = wish(1, 3, "r1", "r2")
    for _ in range(120):
        world.tick(want)
    assert {pod.revision for pod in world.serving(Role.DECODE)} == {"r2"}
    assert len(world.serving(Role.DECODE)) == 3


def test_other_kv_comes_up_beside_the_old_and_the_last_of_the_old_go_together() -> None:
    world = served()
    world.prints = OTHER
    assert world.run(wish(1, 3, "r2")) == [
        "create qwen-e4 as prefill",
        "create qwen-e5 as decode",
        "drain qwen-e3: of an old revision, replaced",
        "create qwen-e3 as decode",
        "drain qwen-e2: of an old revision, replaced",
        "create qwen-e2 as decode",
        "drain qwen-e0: of an old revision, replaced",
        "drain qwen-e1: of an old revision, replaced",
    ]


def test_other_kv_in_one_role_alone_is_held_and_both_fingerprints_are_named() -> None:
    world = served()
    world.prints = OTHER
    want = wish(1, 3, "r1", "r2")
    assert world.run(want) == ["create qwen-e4 as decode"]
    observed = world.observe()
    said = status(want, observed, step(want, observed, world.now), world.now)
    for kind, holds in (("Compatible", "False"), ("Degraded", "True")):
        condition = next(one for one in said.conditions if one.type == kind)
        assert (condition.status, condition.reason) == (holds, "Incompatible")
        assert "b" * 32 in condition.message
        assert "f" * 32 in condition.message
    assert is_true(said, "Ready")
    assert world.run(wish(1, 3)) == ["drain qwen-e4: of an old revision, replaced"]


def test_held_goes_on_once_the_other_role_follows() -> None:
    world = served()
    world.prints = OTHER
    world.run(wish(1, 3, "r1", "r2"))
    world.run(wish(1, 3, "r2"))
    assert {pod.revision for pod in world.pods.values()} == {"r2"}


@pytest.mark.parametrize("kind", ["broken", "slow"])
def test_a_revision_that_never_serves_takes_nothing_down(kind: str) -> None:
    world = served()
    getattr(world, kind).add("r2")
    want = wish(1, 3, "r2")
    for _ in range(400):
        world.tick(want)
        assert len(world.serving(Role.PREFILL)) == 1
        assert len(world.serving(Role.DECODE)) == 3
    assert {line for line in world.run(wish(1, 3)) if "old revision and not serving" not in line} == set()


def test_a_canary_without_a_node_waits_for_one_and_is_degraded_once_the_time_of_a_start_is_over() -> None:
    world = served()
    world.room = 4
    want = wish(1, 3, "r2")
    world.run(want)
    for late in (False, True):
        observed = world.observe()
        said = status(want, observed, step(want, observed, world.now), world.now)
        degraded, progressing = said.conditions[2], said.conditions[1]
        assert (progressing.status, progressing.reason) == ("True", "WaitingForNode")
        assert "without a node: qwen-e4, qwen-e5; no node has room" in progressing.message
        assert (degraded.status, degraded.reason) == (("True", "Unschedulable") if late else ("False", "Healthy"))
        assert is_true(said, "Ready")
        world.advance(STARTUP_S)
    assert degraded.message == "qwen-e4: no node has room; qwen-e5: no node has room"


def test_a_revert_in_the_middle_keeps_capacity() -> None:
    world = served(2, 4)
    world.prints = OTHER
    for _ in range(40):
        world.tick(wish(2, 4, "r2"))
    assert 0 < sum(pod.revision == "r2" for pod in world.serving(Role.DECODE)) < 4
    kept = {pod.name for pod in world.serving(Role.DECODE) if pod.revision == "r1"}
    back = wish(2, 4)
    for _ in range(200):
        world.tick(back)
        assert len(world.serving(Role.DECODE)) >= 4
        assert len(world.serving(Role.PREFILL)) >= 2
    assert kept <= {pod.name for pod in world.serving(Role.DECODE)}
    assert {pod.revision for pod in world.pods.values()} == {"r1"}


def test_without_surge_the_first_goes_before_its_canary_comes() -> None:
    world = served(2, 2, rollout=WITHOUT_SURGE)
    log = world.run(wish(2, 2, "r2", rollout=WITHOUT_SURGE))
    assert log[:4] == [
        "drain qwen-e1: of an old revision, replaced",
        "drain qwen-e3: of an old revision, replaced",
        "create qwen-e1 as prefill",
        "create qwen-e3 as decode",
    ]


def test_without_surge_and_one_of_each_prefill_is_tried_first() -> None:
    world = served(1, 1, rollout=WITHOUT_SURGE)
    world.prints = OTHER
    want = wish(1, 1, "r2", rollout=WITHOUT_SURGE)
    world.broken.add("r2")
    for _ in range(60):
        world.tick(want)
        assert len(world.serving(Role.DECODE)) == 1
    world.broken.clear()
    assert world.run(want) == ["drain qwen-e1: of an old revision, replaced", "create qwen-e1 as decode"]


def test_without_an_answer_from_a_router_nothing_old_is_drained() -> None:
    world = served()
    want = wish(1, 3, "r2")
    world.answers = False
    for _ in range(60):
        world.tick(want)
    assert len(world.pods) == 6
    assert "draining" not in " ".join(waits(world, want))
    world.answers = True
    world.run(want)
    assert {pod.revision for pod in world.pods.values()} == {"r2"}


def test_an_evicted_pod_is_removed_and_made_anew_and_a_crashed_one_left_to_its_node() -> None:
    world = served()
    world.crash("qwen-e2")
    assert world.run(wish(1, 3)) == []
    world.fail("qwen-e3")
    for _ in range(10):
        assert not world.tick(wish(1, 3)).actions, "replaced at once: one that is always evicted would be made in a storm"
    assert world.run(wish(1, 3)) == ["remove qwen-e3: it will never run again: Evicted", "create qwen-e4 as decode"]


def test_a_lost_pod_counts_for_its_ordinal_alone() -> None:
    world = served()
    world.lose("qwen-e2")
    assert world.run(wish(1, 3)) == ["create qwen-e4 as decode"]
    world.nodes_back()
    assert world.run(wish(1, 4)) == ["create qwen-e2 as decode"]


def test_pods_that_end_are_never_taken_back() -> None:
    world = served(1, 3)
    world.drain_s = 100
    for _ in range(3):
        world.tick(wish(1, 1))
    assert not any("undrain" in line for line in world.run(wish(1, 3), quiet=120))


def test_stages_from_fingerprints() -> None:
    def one(ordinal: int, role: Role, revision: str, print_: str, phase: Phase = Phase.READY) -> Instance:
        return Instance(InstanceName(f"q-e{ordinal}"), ordinal, role, revision, phase, fingerprint=print_)  # type: ignore[arg-type]

    def at(*instances: Instance, want: DesiredService, fleet_known: bool = True) -> Stage:
        prefill, decode = (view(role, want.target(role), instances) for role in Role)
        return stage(decode, prefill, fleet_known=fleet_known)

    prefill, old = one(0, Role.PREFILL, "r1", "a"), one(1, Role.DECODE, "r1", "a")
    want = wish(1, 1, "r1", "r2")
    assert at(prefill, want=want) is Stage.FREE
    assert at(prefill, old, want=want) is Stage.PROBING
    assert at(prefill, old, one(2, Role.DECODE, "r2", "a", Phase.STARTING), want=want) is Stage.PROBING
    assert at(prefill, old, one(2, Role.DECODE, "r2", "a"), want=want) is Stage.SAME
    assert at(prefill, old, one(2, Role.DECODE, "r2", "b"), want=want) is Stage.HELD
    assert at(prefill, old, one(2, Role.DECODE, "r2", "b"), want=wish(1, 1, "r2")) is Stage.DIFFERENT
    assert at(prefill, old, one(2, Role.DECODE, "r2", "b"), want=wish(0, 1, "r2")) is Stage.DIFFERENT
    blind = (one(0, Role.PREFILL, "r1", ""), one(1, Role.DECODE, "r1", ""))
    assert at(*blind, want=want) is Stage.BLIND
    assert at(*blind, want=want, fleet_known=False) is Stage.PROBING


def test_what_will_serve_soon() -> None:
    instance = Instance(InstanceName("q-e0"), 0, Role.DECODE, wish(1, 1).decode.revision, Phase.STARTING)
    assert instance.serves_soon
    for why, soon in ((Breakage("ImagePull", "no"), False), (Waiting("Starting", "no"), True),
                      (Waiting("Starting", "no", late=True), False), (Waiting(UNPLACED, "no", place=True), False),
                      (Breakage("Evicted", "no", replaced=True), True)):
        changed = Instance(instance.name, 0, instance.role, instance.revision, instance.phase, absent=why)
        assert changed.serves_soon is soon
