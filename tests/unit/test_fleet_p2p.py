from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from beats import beat

from xpyd_sidecar.contract import p2p
from xpyd_sidecar.contract.ids import HostPort, Incarnation, InstanceName, Role, ServiceName
from xpyd_sidecar.contract.p2p import P2pBeat
from xpyd_sidecar.router.api import bodies
from xpyd_sidecar.router.balance import policies
from xpyd_sidecar.router.balance.picker import Picker
from xpyd_sidecar.router.fleet import p2p as rp
from xpyd_sidecar.router.fleet.member import (
    BeatRefused,
    Changed,
    EngineTarget,
    FleetMember,
    InstanceLost,
    Probed,
    ProbeInstance,
)
from xpyd_sidecar.router.fleet.p2p import Guests, PairedById
from xpyd_sidecar.router.fleet.roster import Roster

SERVICE = ServiceName("s")


def made() -> tuple[Roster, Guests]:
    roster = Roster(SERVICE, started=0.0, settle_s=1.0, missed_beats=3)
    return roster, Guests(SERVICE, roster.members)


def said(http: str = "h:1", zmq: str = "h:2", role: Role = Role.DECODE) -> P2pBeat:
    return P2pBeat(role, HostPort(http), zmq)


def test_an_older_engine_is_picked_after_its_first_good_health_check() -> None:
    roster, guests = made()
    out = roster.on_message(0.0, guests.heartbeat(said()))
    name = InstanceName("p2p:h:1")
    assert [type(each) for each in out] == [Changed, ProbeInstance]
    assert roster.pickable(Role.DECODE) == ()
    roster.on_probe(0.1, name, Incarnation("h:2"), Probed.DEAD, "refused")
    roster.on_message(3.0, guests.heartbeat(said()))
    assert roster.pickable(Role.DECODE) == ()
    assert len(roster.on_tick(3.1)) == 1
    roster.on_probe(3.2, name, Incarnation("h:2"), Probed.HEALTHY, "")
    assert [m.name for m in roster.pickable(Role.DECODE)] == [name]
    assert roster.members()[0].fingerprint == p2p.FINGERPRINT


def test_without_a_goodbye_missed_beats_and_a_failed_probe_end_it() -> None:
    roster, guests = made()
    roster.on_message(0.0, guests.heartbeat(said()))
    name, incarnation = InstanceName("p2p:h:1"), Incarnation("h:2")
    roster.on_probe(0.1, name, incarnation, Probed.HEALTHY, "")
    assert roster.on_tick(9.0) == [], "one lost beat evicts nobody"
    assert len(roster.on_tick(9.1)) == 1
    roster.on_probe(9.2, name, incarnation, Probed.HEALTHY, "")
    assert roster.members()
    roster.on_tick(10.3)
    roster.on_probe(10.4, name, incarnation, Probed.DEAD, "refused")
    assert roster.members() == []


def test_the_dead_are_pruned_without_beats_of_their_role() -> None:
    """A demo proxy prunes when a beat of the same role comes, and looks at the oldest entry alone."""
    roster, guests = made()
    for index in range(3):
        roster.on_message(0.0, guests.heartbeat(said(f"p:{index + 1}", role=Role.PREFILL)))
        roster.on_probe(0.1, InstanceName(f"p2p:p:{index + 1}"), Incarnation("h:2"), Probed.HEALTHY, "")
    roster.on_message(9.0, guests.heartbeat(said("p:1", role=Role.PREFILL)))
    probed = [each.instance for each in roster.on_tick(9.5) if isinstance(each, ProbeInstance)]
    assert probed == ["p2p:p:2", "p2p:p:3"]
    for name in probed:
        roster.on_probe(9.6, name, Incarnation("h:2"), Probed.DEAD, "refused")
    assert [m.name for m in roster.members()] == ["p2p:p:1"]


def test_a_changed_role_is_a_new_epoch_and_a_changed_address_a_new_incarnation() -> None:
    roster, guests = made()
    roster.on_message(0.0, guests.heartbeat(said()))
    roster.on_message(1.0, guests.heartbeat(said(role=Role.PREFILL)))
    assert (roster.members()[0].role, roster.members()[0].epoch) == (Role.PREFILL, 2)
    out = roster.on_message(2.0, guests.heartbeat(said(zmq="h:3", role=Role.PREFILL)))
    assert [each.incarnation for each in out if isinstance(each, InstanceLost)] == ["h:2"]
    assert roster.members()[0].suspended


def test_strangers_cannot_fill_the_roster_and_those_who_left_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rp, "MAX_GUESTS", 2)
    roster, guests = made()
    for index in (1, 2):
        roster.on_message(0.0, guests.heartbeat(said(f"h:{index}")))
    with pytest.raises(BeatRefused, match=r"2 engines .* are known"):
        guests.heartbeat(said("h:3"))
    roster.on_message(0.0, guests.heartbeat(said("h:2")))
    roster.on_tick(9.1)
    roster.on_probe(9.2, InstanceName("p2p:h:1"), Incarnation("h:2"), Probed.DEAD, "refused")
    roster.on_message(9.3, guests.heartbeat(said("h:3")))
    assert [m.name for m in roster.members()] == ["p2p:h:2", "p2p:h:3"]


def target(fingerprint: str = "p2p", address: str = "10.0.0.1:2") -> EngineTarget:
    name = InstanceName("p2p:h:1")
    return EngineTarget(name, Incarnation("i"), p2p.Fingerprint(fingerprint), HostPort("h:1"), HostPort(address),
                        FleetMember(name), p2p=address)


@pytest.mark.parametrize(("api", "fields"), [
    ("completions", {"prompt": "hi", "stream": True, "stream_options": {"include_usage": True}}),
    ("completions", {"prompt": "hi", "max_tokens": 9, "min_tokens": 5, "logprobs": 3}),
    ("chat", {"messages": [], "max_completion_tokens": 9}),
])
def test_the_bodies_of_both_legs(api: Any, fields: dict[str, Any]) -> None:
    """max_tokens is set, never counted down: a request without it must not fail."""
    request = bodies.parse(api, msgspec.json.encode(fields))
    legs = PairedById()
    prefill = json.loads(legs.prefill(request, target(), HostPort("10.0.0.2:3"), "e" * 32))
    assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
    assert prefill.get("max_completion_tokens", 1) == 1
    assert ("max_completion_tokens" in prefill) == ("max_completion_tokens" in fields)
    assert not prefill.keys() & {"stream_options", "min_tokens", "logprobs", "kv_transfer_params"}
    legs.answered(b'{"choices": [], "kv_transfer_params": {"x": 1}}')
    assert json.loads(legs.decode(request, target())) == fields
    assert legs.request_id == b"___prefill_addr_10.0.0.1:2___decode_addr_10.0.0.2:3_" + b"e" * 32


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"kv_transfer_params": null}', b'{"kv_transfer_params": 5}'])
def test_parameters_that_prefill_did_not_give_are_not_made_up(answer: bytes) -> None:
    request = bodies.parse("completions", b'{"prompt": "hi"}')
    legs, engine = PairedById(), target("p2p-read-tp1")
    legs.prefill(request, engine, HostPort("d"), "e" * 32)
    legs.answered(answer)
    assert json.loads(legs.decode(request, engine))["kv_transfer_params"] == {
        "do_remote_prefill": True, "do_remote_decode": False}


def member(roster: Roster, guests: Guests, http: str, role: Role) -> None:
    roster.on_message(0.0, guests.heartbeat(said(http, f"z-{http}", role)))
    roster.on_probe(0.1, InstanceName(f"p2p:{http}"), Incarnation(f"z-{http}"), Probed.HEALTHY, "")


def test_older_engines_pair_among_themselves_and_never_serve_alone() -> None:
    roster, guests = made()
    picker = Picker(roster, policies.make("round_robin", {}, float))
    prompt = msgspec.Raw(b'"hi"')
    member(roster, guests, "d:1", Role.DECODE)
    assert picker.asked(prompt).pair(alone=False) is None
    assert "serve nothing without a prefill instance" in picker.asked(prompt).why_not(Role.DECODE)
    member(roster, guests, "p:1", Role.PREFILL)
    pair = picker.asked(prompt).pair(alone=False)
    assert pair is not None
    assert pair.prefill is not None
    assert (pair.prefill.p2p, pair.decode.p2p) == ("z-p:1", "z-d:1")
    assert picker.asked(prompt).pair(alone=True) is None
    roster.on_message(0.2, beat("d0", service=SERVICE))
    alone = picker.asked(prompt).pair(alone=True)
    assert alone is not None
    assert (alone.decode.instance, alone.decode.p2p, alone.prefill) == ("d0", "", None)
    again = picker.asked(prompt).pair(alone=False)
    assert again is not None
    assert again.prefill is not None
    assert {again.prefill.p2p, again.decode.p2p} == {"z-p:1", "z-d:1"}, "an agent's engine is no partner of theirs"
