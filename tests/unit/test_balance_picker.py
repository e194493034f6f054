from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from beats import SERVICE, beat

from xpyd_sidecar.contract.adapters import AdapterReport
from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Incarnation, InstanceName, Role, State
from xpyd_sidecar.contract.pair_notes import RefusedPeer
from xpyd_sidecar.router.api.prompt import PromptPrefix
from xpyd_sidecar.router.balance import policies
from xpyd_sidecar.router.balance.picker import Picker
from xpyd_sidecar.router.fleet.member import FleetMember, Pair
from xpyd_sidecar.router.fleet.roster import Roster

RAW = PromptPrefix(b"")
A, B = Fingerprint("a" * 32), Fingerprint("b" * 32)


def picker(prefills: dict[str, Any], decodes: dict[str, Any]) -> Picker:
    roster = Roster(SERVICE, started=0.0, settle_s=0.0, missed_beats=3)
    for role, instances in ((Role.PREFILL, prefills), (Role.DECODE, decodes)):
        for name, fields in instances.items():
            roster.on_message(0.0, beat(name, role, **fields))
    return Picker(roster, policies.make("round_robin", {}, float))


def both(pair: Pair | None) -> tuple[str | None, str]:
    assert pair is not None
    return (pair.prefill.instance if pair.prefill else None, pair.decode.instance)


def test_two_by_two_uses_all_four_pairs() -> None:
    pick = picker({"p0": {}, "p1": {}}, {"d0": {}, "d1": {}})
    assert Counter(both(pick.selection(RAW).pair(alone=False)) for _ in range(8)) == {
        (p, d): 2 for p in ("p0", "p1") for d in ("d0", "d1")}


def test_pairs_are_made_only_within_one_fingerprint() -> None:
    pick = picker({"pa": {"fingerprint": A}, "pb": {"fingerprint": B}},
                  {"da": {"fingerprint": A}, "db": {"fingerprint": B}})
    assert {both(pick.selection(RAW).pair(alone=False)) for _ in range(8)} == {("pa", "da"), ("pb", "db")}


def test_decode_instances_with_a_possible_partner_come_first() -> None:
    pick = picker({"pa": {"fingerprint": A}}, {"da": {"fingerprint": A}, "db": {"fingerprint": B}})
    assert {both(pick.selection(RAW).pair(alone=False)) for _ in range(4)} == {("pa", "da")}
    assert {both(pick.selection(RAW).pair(alone=True)) for _ in range(4)} == {(None, "da"), (None, "db")}


def test_an_adapter_goes_to_those_who_have_it() -> None:
    fluent = {"also": ("fluent",)}
    pick = picker({"p0": {}, "p1": fluent}, {"d0": fluent, "d1": {}, "d2": fluent})
    assert {both(pick.selection(RAW, name="fluent").pair(alone=False)) for _ in range(8)} == {("p1", "d0"), ("p1", "d2")}
    assert {both(pick.selection(RAW, name="tiny").pair(alone=False))[1] for _ in range(8)} == {"d0", "d1", "d2"}
    pair = pick.selection(RAW, name="fluent").pair(alone=False, not_decode={InstanceName("d0")})
    assert both(pair) == ("p1", "d2")
    assert pair is not None
    assert pick.selection(RAW, name="fluent").prefill_for(pair.decode, {InstanceName("p1")}) is None
    assert pick.selection(RAW, name="fluent").pair(alone=False, not_decode={InstanceName("d0"), InstanceName("d2")}) is None


def test_an_adapter_that_comes_later_is_found_at_once() -> None:
    roster = Roster(SERVICE, started=0.0, settle_s=0.0, missed_beats=3)
    pick = Picker(roster, policies.make("round_robin", {}, float))
    roster.on_message(0.0, beat("d0", also=("fluent",)))
    roster.on_message(0.0, beat("d1"))
    assert {both(pick.selection(RAW, name="fluent").pair(alone=True))[1] for _ in range(4)} == {"d0"}
    roster.on_message(1.0, beat("d1", seq=2, also=("fluent",)))
    assert {both(pick.selection(RAW, name="fluent").pair(alone=True))[1] for _ in range(4)} == {"d0", "d1"}
    roster.on_message(2.0, beat("d0", seq=2))
    assert {both(pick.selection(RAW, name="fluent").pair(alone=True))[1] for _ in range(4)} == {"d1"}


def test_requests_for_an_adapter_stay_with_who_has_it_in_a_place() -> None:
    told = {"also": ("fluent", "terse"), "adapters": AdapterReport(slots=1)}
    pick = picker({"p0": told, "p1": told}, {"d0": told, "d1": told})
    pairs = {name: {both(pick.selection(RAW, name=name).pair(alone=False)) for _ in range(8)}
             for name in ("fluent", "terse")}
    assert [len(found) for found in pairs.values()] == [1, 1], "the policy is a round robin"
    assert not pairs["fluent"] & pairs["terse"]


def test_without_any_partner_decode_is_picked_alone() -> None:
    pick = picker({"pa": {"fingerprint": A}}, {"db": {"fingerprint": B}})
    assert both(pick.selection(RAW).pair(alone=False)) == (None, "db")
    assert both(picker({"p0": {"state": State.DRAINING}}, {"d0": {}}).selection(RAW).pair(alone=False)) == (None, "d0")


def refusing(*names: str) -> dict[str, Any]:
    """Of a decode instance that cannot take the KV of these, as they are now."""
    return {"refused": tuple(RefusedPeer(InstanceName(name), beat(name).incarnation, "why") for name in names)}


def test_a_pair_that_cannot_be_is_not_made_and_all_others_are() -> None:
    pick = picker({"p0": {}, "p1": {}}, {"d0": refusing("p0"), "d1": {}})
    assert {both(pick.selection(RAW).pair(alone=False)) for _ in range(16)} == {("p1", "d0"), ("p0", "d1"), ("p1", "d1")}
    pair = pick.selection(RAW).pair(alone=False, not_decode={InstanceName("d1")})
    assert both(pair) == ("p1", "d0")
    assert pair is not None
    assert pick.selection(RAW).prefill_for(pair.decode, {InstanceName("p1")}) is None
    found = pick.selection(RAW).prefill_for(pair.decode)
    assert found is not None
    assert found.instance == "p1"


def test_a_decode_instance_that_can_take_from_nobody_comes_last_and_alone() -> None:
    pick = picker({"p0": {}, "p1": {}}, {"d0": refusing("p0", "p1"), "d1": {}})
    assert {both(pick.selection(RAW).pair(alone=False))[1] for _ in range(8)} == {"d1"}
    assert both(pick.selection(RAW).pair(alone=False, not_decode={InstanceName("d1")})) == (None, "d0")
    assert both(pick.selection(RAW).pair(alone=False, not_prefill={InstanceName("p0"), InstanceName("p1")}))[0] is None
    tried = picker({"p0": {}, "p1": {}}, {"d0": refusing("p0"), "d1": refusing("p1")})
    again = {both(tried.selection(RAW).pair(alone=False, not_prefill={InstanceName("p1")})) for _ in range(4)}
    assert again == {("p0", "d1")}


def test_another_start_of_a_refused_instance_is_paired_again() -> None:
    refused = {"refused": (RefusedPeer(InstanceName("p0"), Incarnation("of before"), "why"),)}
    assert both(picker({"p0": {}}, {"d0": refused}).selection(RAW).pair(alone=False)) == ("p0", "d0")


def test_a_refusal_that_is_told_no_more_is_over() -> None:
    roster = Roster(SERVICE, started=0.0, settle_s=0.0, missed_beats=3)
    pick = Picker(roster, policies.make("round_robin", {}, float))
    roster.on_message(0.0, beat("p0", Role.PREFILL))
    for seq, (fields, prefill) in enumerate(((refusing("p0"), None), ({}, "p0"), (refusing("p0"), None)), 1):
        roster.on_message(0.0, beat("d0", seq=seq, **fields))
        assert both(pick.selection(RAW).pair(alone=False)) == (prefill, "d0")


def test_who_was_tried_is_left_out() -> None:
    pick = picker({"p0": {}, "p1": {}}, {"d0": {}, "d1": {}})
    pair = pick.selection(RAW).pair(alone=False, not_prefill={InstanceName("p0")}, not_decode={InstanceName("d1")})
    assert both(pair) == ("p1", "d0")
    assert pick.selection(RAW).pair(alone=False, not_decode={InstanceName("d0"), InstanceName("d1")}) is None


def test_another_prefill_fits_the_waiting_decode() -> None:
    pick = picker({"pa": {"fingerprint": A}, "pb": {"fingerprint": B}, "pc": {"fingerprint": A}},
                  {"da": {"fingerprint": A}})
    pair = pick.selection(RAW).pair(alone=False)
    assert pair is not None
    found = pick.selection(RAW).prefill_for(pair.decode, {InstanceName("pa")})
    assert found is not None
    assert found.instance == "pc"
    assert pick.selection(RAW).prefill_for(pair.decode, {InstanceName("pa"), InstanceName("pc")}) is None


def test_nobody_decodes() -> None:
    pick = picker({"p0": {}}, {})
    assert pick.selection(RAW).pair(alone=False) is None
    assert pick.selection(RAW).why_not(Role.DECODE) == "no decode instance is known"


def test_ranks_behind_one_door_take_turns_and_are_named() -> None:
    control = tuple(HostPort(f"10.0.0.1:{port}") for port in (1, 2))
    pick = picker({}, {"d0": {"control": control}})
    targets = [pair.decode for _ in range(3) if (pair := pick.selection(RAW).pair(alone=True))]
    assert [(t.http, t.control, t.dp_rank) for t in targets] == [
        ("127.0.0.1:1", "10.0.0.1:1", 0), ("127.0.0.1:1", "10.0.0.1:2", 1), ("127.0.0.1:1", "10.0.0.1:1", 0)]


def test_ranks_of_prefill_take_turns_too_whoever_decodes() -> None:
    ranks = {"control": tuple(HostPort(f"10.0.0.2:{port}") for port in (1, 2, 3))}
    pick = picker({"p0": ranks}, {"d0": {"control": (HostPort("10.0.0.1:1"), HostPort("10.0.0.1:2"))}})
    pairs = [pair for _ in range(6) if (pair := pick.selection(RAW).pair(alone=False))]
    assert [(pair.prefill.dp_rank, pair.decode.dp_rank) for pair in pairs if pair.prefill] == [
        (0, 0), (1, 1), (2, 0), (0, 1), (1, 0), (2, 1)]
    again = [found.dp_rank for _ in range(3) if (found := pick.selection(RAW).prefill_for(pairs[0].decode))]
    assert again == [0, 1, 2], "whoever takes over is asked by rank, too"


def test_ranks_with_doors_of_their_own_need_no_name() -> None:
    pick = picker({}, {"d0": {"control": (HostPort("h:1"), HostPort("h:2")), "http": (HostPort("h:8"), HostPort("h:9"))}})
    targets = [pair.decode for _ in range(2) if (pair := pick.selection(RAW).pair(alone=True))]
    assert [(t.http, t.control, t.dp_rank) for t in targets] == [("h:8", "h:1", None), ("h:9", "h:2", None)]


def test_ranks_of_several_members_are_named_as_the_server_of_their_member_counts_them() -> None:
    control = tuple(HostPort(f"10.0.0.{1 + rank // 2}:{5 + rank}") for rank in range(4))
    doors = tuple(HostPort(f"10.0.0.{1 + rank // 2}:8000") for rank in range(4))
    pick = picker({"p0": {"control": control, "http": doors}}, {"d0": {"control": control, "http": doors}})
    pairs = [pair for _ in range(4) if (pair := pick.selection(RAW).pair(alone=False))]
    wanted = [("10.0.0.1:8000", "10.0.0.1:5", 0), ("10.0.0.1:8000", "10.0.0.1:6", 1),
              ("10.0.0.2:8000", "10.0.0.2:7", 0), ("10.0.0.2:8000", "10.0.0.2:8", 1)]
    assert [(t.http, t.control, t.dp_rank) for t in (pair.decode for pair in pairs)] == wanted
    assert [(t.http, t.control, t.dp_rank) for t in (pair.prefill for pair in pairs) if t is not None] == wanted


def test_an_instance_without_a_control_address_is_never_paired() -> None:
    assert both(picker({"p0": {}}, {"d0": {"control": ()}}).selection(RAW).pair(alone=False)) == (None, "d0")
    assert both(picker({"p0": {"control": ()}}, {"d0": {}}).selection(RAW).pair(alone=False)) == (None, "d0")


class Doors:
    """Room as a test says."""

    unlimited = False

    def __init__(self, *full: str) -> None:
        self.full = set(full)

    def free(self, candidates: Sequence[FleetMember]) -> Sequence[FleetMember]:
        return [m for m in candidates if m.name not in self.full] or candidates

    def has_room(self, candidates: Iterable[FleetMember]) -> bool:
        return any(m.name not in self.full for m in candidates)


def picker_with(prefills: dict[str, Any], decodes: dict[str, Any], policy: str = "round_robin", **options: Any) -> Picker:
    plain = picker(prefills, decodes)
    return Picker(plain._roster, policies.make(policy, {}, float), **options)


def test_who_has_no_room_is_left_out_unless_nobody_has() -> None:
    doors = Doors("p0", "d1")
    pick = picker_with({"p0": {}, "p1": {}}, {"d0": {}, "d1": {}}, room=doors)
    assert {both(pick.selection(RAW).pair(alone=False)) for _ in range(6)} == {("p1", "d0")}
    assert pick.has_room(alone=False)
    doors.full |= {"p1"}
    assert {both(pick.selection(RAW).pair(alone=False))[1] for _ in range(6)} == {"d0"}
    assert not pick.has_room(alone=False)
    assert pick.has_room(alone=True)


def prompt(text: str) -> PromptPrefix:
    return PromptPrefix(msgspec.json.encode(text))


def test_a_prompt_that_decode_holds_but_for_a_rest_goes_back_there_alone() -> None:
    pick = picker_with({"p0": {}}, {"d0": {}, "d1": {}, "d2": {}}, rest_tokens=200)
    first = pick.selection(prompt("x" * 2000), 500)
    assert not first.cached(), "though it could compute much of it: it holds nothing"
    _, home = both(first.pair(alone=False))
    longer = pick.selection(prompt("x" * 2000 + "y" * 500), 625)
    assert longer.cached(), "some 450 of 625 tokens are there"
    assert both(longer.pair(alone=True)) == (None, home)
    assert 150 < longer.uncached_tokens(InstanceName(home)) < 200
    assert not pick.selection(prompt("x" * 2000 + "y" * 2000), 1000).cached(), "500 tokens are too many"


def test_a_short_prompt_of_which_nothing_is_held_does_not_go_to_decode() -> None:
    pick = picker_with({"p0": {}}, {"d0": {}}, rest_tokens=200)
    assert not pick.selection(prompt("x" * 400), 100).cached()


def test_a_decode_instance_has_no_more_rests_at_once_than_one_step_takes() -> None:
    pick = picker_with({"p0": {}}, {"d0": {}}, rest_tokens=200)
    pick.selection(prompt("x" * 2000), 500).pair(alone=False)
    (member,) = pick._roster.pickable(Role.DECODE)
    member.uncached_tokens = 100
    assert not pick.selection(prompt("x" * 2000 + "y" * 500), 625).cached()
    assert pick.selection(prompt("x" * 2000), 500).cached()


def test_a_holder_that_was_tried_or_is_overloaded_does_not_count() -> None:
    pick = picker_with({"p0": {}}, {"d0": {}, "d1": {}, "d2": {}}, rest_tokens=200)
    _, home = both(pick.selection(prompt("x" * 2000), 500).pair(alone=False))
    member = next(m for m in pick._roster.pickable(Role.DECODE) if m.name == home)
    member.in_flight = 9
    assert not pick.selection(prompt("x" * 2000), 500).cached()
    member.in_flight = 0
    asked = pick.selection(prompt("x" * 2000), 500)
    assert asked.cached()
    assert both(asked.pair(alone=True, not_decode={InstanceName(home)}))[1] != home


def test_what_need_not_be_computed_is_what_was_there_before_the_pick() -> None:
    pick = picker_with({"p0": {}}, {"d0": {}}, "cost")
    for expected in (500, 0):
        asked = pick.selection(prompt("x" * 2000), 500)
        assert both(asked.pair(alone=False)) == ("p0", "d0")
        assert asked.uncached_tokens(InstanceName("p0")) == expected
    assert asked.uncached_tokens(InstanceName("p9")) == 500, "nobody chose it"


def test_no_account_is_kept_that_nobody_looks_at() -> None:
    assert picker_with({"p0": {}}, {"d0": {}}).holdings is None
    assert picker_with({"p0": {}}, {"d0": {}}, "cost").holdings is not None
    assert picker_with({"p0": {}}, {"d0": {}}, rest_tokens=9).holdings is not None


def test_cost_keeps_pairs_with_their_prompt() -> None:
    pick = picker_with({f"p{n}": {} for n in range(4)}, {f"d{n}": {} for n in range(4)}, "cost")
    pairs = {number: both(pick.selection(prompt(f"{number}" * 2000)).pair(alone=False)) for number in range(9)}
    assert len(set(pairs.values())) > 3
    for number, pair in pairs.items():
        assert both(pick.selection(prompt(f"{number}" * 2100)).pair(alone=False)) == pair


def test_candidates_are_found_anew_when_the_roster_changes() -> None:
    pick = picker({"p0": {}}, {"d0": {}})
    assert both(pick.selection(RAW).pair(alone=False)) == ("p0", "d0")
    pick._roster.on_message(1.0, beat("p0", Role.PREFILL, state=State.DRAINING, seq=1))
    assert both(pick.selection(RAW).pair(alone=False)) == (None, "d0")
    pick._roster.on_message(1.0, beat("d1", Role.DECODE, seq=1))
    assert {both(pick.selection(RAW).pair(alone=False)) for _ in range(4)} == {(None, "d0"), (None, "d1")}


def test_a_conversation_stays_at_one_rank_of_each_role_where_prompts_are_looked_at() -> None:
    control = tuple(HostPort(f"10.0.0.2:{port}") for port in (1, 2, 3))
    pick = picker_with({"p0": {"control": control}}, {"d0": {"control": control}}, "cost")
    texts = [f"{number}" * 1000 for number in range(3)]
    for turn in range(4):
        pairs = [pick.selection(prompt(text)).pair(alone=False) for text in texts]
        ranks = [(pair.prefill.dp_rank, pair.decode.dp_rank) for pair in pairs if pair is not None and pair.prefill]
        assert ranks == [(0, 0), (1, 1), (2, 2)], turn
        texts = [text + f"{turn}" * 300 for text in texts]
    again = picker_with({"p0": {"control": control}}, {"d0": {"control": control}}, "cost")
    sessions = [again.selection(msgspec.structs.replace(prompt(text), named=7)).pair(alone=False) for text in "abc"]
    assert {(pair.prefill.dp_rank, pair.decode.dp_rank) for pair in sessions if pair and pair.prefill} == {(0, 0)}
