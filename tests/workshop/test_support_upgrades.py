"""What is watched of an upgrade tells lives of one name apart."""

from __future__ import annotations

from typing import Any

from upgrades import Watch

from xpyd_sidecar.contract.fleet import Fleet, FleetInstance, FleetPair
from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.membership import Load

P, D = Role.PREFILL, Role.DECODE


def one(name: str, role: Role, fingerprint: str) -> FleetInstance:
    return FleetInstance(
        instance=InstanceName(name), role=role, epoch=1, state=State.READY, incarnation=Incarnation(f"{name}{fingerprint}"),
        fingerprint=Fingerprint(fingerprint), http=(HostPort("h:1"),), control=(), model="m", load=Load(), drained=False,
        in_flight=0, beat_age_s=0.0, suspended="")


def seen(*looks: tuple[list[FleetInstance], int]) -> Watch:
    """What a router shows in each look, and how often e0 has handed over to e1 by then."""
    watch: Any = Watch(lambda: None, {})  # type: ignore[arg-type, return-value]
    for instances, count in looks:
        pairs = (FleetPair(InstanceName("e0"), InstanceName("e1"), count, 0.0, 0.0),)
        watch._take(Fleet(service=ServiceName("t"), router="r", uptime_s=1.0, settled=True, instances=tuple(instances),
                          pairs=pairs))
    return watch


def test_a_pair_of_two_releases_that_are_there_together_is_seen() -> None:
    both = [one("e0", P, "new"), one("e1", D, "old")]
    assert seen((both, 0), (both, 1)).handed == {("new", "old"): 1}


def test_a_request_that_ends_when_its_engines_are_gone_and_one_name_is_taken_again_was_of_their_release() -> None:
    old, others = [one("e0", P, "old"), one("e1", D, "old")], [one("e2", P, "old"), one("e3", D, "old")]
    again = [one("e0", P, "new"), *others]
    assert seen((old, 0), (others, 0), (again, 0), (again, 1)).handed == {("old", "old"): 1}


def test_a_name_that_is_taken_again_between_two_looks_may_be_either_life() -> None:
    before, after = ([one("e0", P, "old"), one("e1", D, "new")], 0), ([one("e0", P, "new"), one("e1", D, "new")], 1)
    assert seen(before, after).handed == {("new", "new"): 1}
