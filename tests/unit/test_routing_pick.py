from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from beats import SERVICE, beat

from xpyd_sidecar.contract.ids import Fingerprint, HostPort, InstanceName, Role, State
from xpyd_sidecar.routing import policies
from xpyd_sidecar.routing.pick import Pair, Picker
from xpyd_sidecar.routing.roster import Roster

RAW = msgspec.Raw(b"")
A, B = Fingerprint("a" * 32), Fingerprint("b" * 32)


def picker(prefills: dict[str, Any], decodes: dict[str, Any]) -> Picker:
    roster = Roster(SERVICE, started=0.0, settle_s=0.0, missed_beats=3)
    for role, instances in ((Role.PREFILL, prefills), (Role.DECODE, decodes)):
        for name, fields in instances.items():
            roster.on_message(0.0, beat(name, role, **fields))
    return Picker(roster, policies.make("round_robin", {}, 0))


def both(pair: Pair | None) -> tuple[str | None, str]:
    assert pair is not None
    return (pair.prefill.instance if pair.prefill else None, pair.decode.instance)


def test_two_by_two_uses_all_four_pairs() -> None:
    pick = picker({"p0": {}, "p1": {}}, {"d0": {}, "d1": {}})
    assert Counter(both(pick.pair(RAW, alone=False)) for _ in range(8)) == {
        (p, d): 2 for p in ("p0", "p1") for d in ("d0", "d1")}


def test_pairs_are_made_only_within_one_fingerprint() -> None:
    pick = picker({"pa": {"fingerprint": A}, "pb": {"fingerprint": B}},
                  {"da": {"fingerprint": A}, "db": {"fingerprint": B}})
    assert {both(pick.pair(RAW, alone=False)) for _ in range(8)} == {("pa", "da"), ("pb", "db")}


def test_decode_instances_with_a_possible_partner_come_first() -> None:
    pick = picker({"pa": {"fingerprint": A}}, {"da": {"fingerprint": A}, "db": {"fingerprint": B}})
    assert {both(pick.pair(RAW, alone=False)) for _ in range(4)} == {("pa", "da")}
    assert {both(pick.pair(RAW, alone=True)) for _ in range(4)} == {(None, "da"), (None, "db")}


def test_without_any_partner_decode_is_picked_alone() -> None:
    pick = picker({"pa": {"fingerprint": A}}, {"db": {"fingerprint": B}})
    assert both(pick.pair(RAW, alone=False)) == (None, "db")
    assert both(picker({"p0": {"state": State.DRAINING}}, {"d0": {}}).pair(RAW, alone=False)) == (None, "d0")


def test_who_was_tried_is_left_out() -> None:
    pick = picker({"p0": {}, "p1": {}}, {"d0": {}, "d1": {}})
    pair = pick.pair(RAW, alone=False, not_prefill={InstanceName("p0")}, not_decode={InstanceName("d1")})
    assert both(pair) == ("p1", "d0")
    assert pick.pair(RAW, alone=False, not_decode={InstanceName("d0"), InstanceName("d1")}) is None


def test_another_prefill_fits_the_waiting_decode() -> None:
    pick = picker({"pa": {"fingerprint": A}, "pb": {"fingerprint": B}, "pc": {"fingerprint": A}},
                  {"da": {"fingerprint": A}})
    pair = pick.pair(RAW, alone=False)
    assert pair is not None
    found = pick.prefill_for(RAW, pair.decode, {InstanceName("pa")})
    assert found is not None
    assert found.instance == "pc"
    assert pick.prefill_for(RAW, pair.decode, {InstanceName("pa"), InstanceName("pc")}) is None


def test_nobody_decodes() -> None:
    pick = picker({"p0": {}}, {})
    assert pick.pair(RAW, alone=False) is None
    assert pick.why_not(Role.DECODE) == "no decode instance is known"


def test_ranks_behind_one_door_take_turns_and_are_named() -> None:
    control = tuple(HostPort(f"10.0.0.1:{port}") for port in (1, 2))
    pick = picker({}, {"d0": {"control": control}})
    targets = [pair.decode for _ in range(3) if (pair := pick.pair(RAW, alone=True))]
    assert [(t.http, t.control, t.dp_rank) for t in targets] == [
        ("127.0.0.1:1", "10.0.0.1:1", 0), ("127.0.0.1:1", "10.0.0.1:2", 1), ("127.0.0.1:1", "10.0.0.1:1", 0)]


def test_ranks_with_doors_of_their_own_need_no_name() -> None:
    pick = picker({}, {"d0": {"control": (HostPort("h:1"), HostPort("h:2")), "http": (HostPort("h:8"), HostPort("h:9"))}})
    targets = [pair.decode for _ in range(2) if (pair := pick.pair(RAW, alone=True))]
    assert [(t.http, t.control, t.dp_rank) for t in targets] == [("h:8", "h:1", None), ("h:9", "h:2", None)]


def test_an_instance_without_a_control_address_is_never_paired() -> None:
    assert both(picker({"p0": {}}, {"d0": {"control": ()}}).pair(RAW, alone=False)) == (None, "d0")
    assert both(picker({"p0": {"control": ()}}, {"d0": {}}).pair(RAW, alone=False)) == (None, "d0")
