"""Somebody between two ranks who has no key: reads nothing of what they agree on, and changes nothing without ending it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from manifest_ranks import Behind, DecodeRank, PrefillRank, key, wait_until
from middleman import DEEDS, LATE, Deed, Middleman, Who
from nixl_fake import World
from nixl_ranks import NixlProcess
from wire import ANSWER_BYTES

from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.receiving import Confirm
from xpyd_sidecar.kv.session_bodies import Able, LinkChoice, LinkWelcome
from xpyd_sidecar.kv.session_keys import PrivateKey, Sealing
from xpyd_sidecar.kv.wire import KEY_BYTES, PREFIX_BYTES, FrameKind, Wire
from xpyd_sidecar.session.greeting import Challenge, HelloTerms, SessionHello

IDS = (9, 3, 4, 5, 30, 31)
SAID: dict[Who, list[FrameKind]] = {
    "prefill": [FrameKind.CHALLENGE, FrameKind.WELCOME, FrameKind.SHARED, FrameKind.MANIFEST, FrameKind.SUMS],
    "decode": [FrameKind.HELLO, FrameKind.ABLE, FrameKind.LINK, FrameKind.LINK, FrameKind.ASK, FrameKind.TAKEN,
               FrameKind.DONE]}
"""What each side says while one copy is handed over within a host."""


def handed_over(p: PrefillRank, d: DecodeRank, man: Middleman) -> None:
    """A copy is, whatever that takes, or its load ends; what comes is right, and no worse link is taken."""
    d.want(key(), Behind(p, port=man.port), IDS)
    p.compute(key(), 0, 6)
    wait_until(lambda: d.has(key(), 0, 6) or d.outcomes())
    if d.has(key(), 0, 6):
        d.receiver.carry_out(Confirm(key(), 0, 5000))
        assert d.right(key(), 0, IDS)
    else:
        assert not d.arrived


def test_frames_are_passed_on_as_they_are() -> None:
    with PrefillRank(timeout_s=240.0) as p, DecodeRank(timeout_s=240.0) as d, Middleman(p.place[0]) as man:  # no pings
        handed_over(p, d, man)
        assert {one.outcome for one in p.reported()} == {Outcome.OK}
        assert d.links == {"shm"}
        assert man.kinds == SAID
        assert man.connections == 1


@pytest.mark.parametrize("name", [*DEEDS, *LATE])
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_frame_that_is_changed_ends_its_session_and_nothing_else_comes_of_it(name: str, who: Who) -> None:
    last, timeout_s = len(SAID[who]) - 1, 2.5 if name in LATE else 10.0
    for number in range(len(SAID[who])):
        with PrefillRank(timeout_s=timeout_s) as p, DecodeRank(timeout_s=timeout_s) as d, \
                Middleman(p.place[0], Deed(name, who, number)) as man:
            handed_over(p, d, man)
            assert man.done.wait(60), (name, who, number)
            assert d.links <= {"shm"}, "nobody else chooses the link"
            if name not in LATE or number < last:
                wait_until(lambda one=man: one.ended)  # type: ignore[misc]
            assert FrameKind.DONE not in man.kinds["decode"] or number >= last - 1, "the session has ended before"


def test_kv_that_is_changed_on_its_way_is_not_taken() -> None:
    changed: list[int] = []

    def change(who: Who, raw: bytes) -> bytes:
        if who == "decode" or raw[:4] == b"xpyd" or len(raw) == ANSWER_BYTES or changed:
            return raw
        changed.append(len(raw))
        return raw[:-1] + bytes([raw[-1] ^ 1])

    with PrefillRank(transport="tcp") as p, DecodeRank(transport="tcp") as d, Middleman(p.place[0], change=change) as man:
        d.want(key(), Behind(p, port=man.port), IDS)
        p.compute(key(), 0, 6)
        wait_until(lambda: d.has(key(), 0, 6) or d.outcomes())
        assert changed
        assert d.outcomes() == [Outcome.CHECKSUM]
        assert not d.arrived


@pytest.mark.parametrize("keys", ["of its own", "for prefill alone", "for decode alone"])
def test_who_makes_keys_with_both_ends_is_refused_by_prefill(keys: str) -> None:
    private = PrivateKey()

    def change(who: Who, raw: bytes) -> bytes:
        body = raw[PREFIX_BYTES + KEY_BYTES:]
        if raw[5] == FrameKind.CHALLENGE and keys != "for prefill alone":
            said = msgspec.msgpack.decode(body, type=Challenge)
            return Wire().frame(FrameKind.CHALLENGE, msgspec.msgpack.encode(
                msgspec.structs.replace(said, public=private.public)))
        if raw[5] == FrameKind.HELLO and keys != "for decode alone":
            hello = msgspec.msgpack.decode(body, type=SessionHello)
            terms = msgspec.msgpack.decode(hello.terms, type=HelloTerms)
            return Wire().frame(FrameKind.HELLO, msgspec.msgpack.encode(msgspec.structs.replace(
                hello, terms=msgspec.msgpack.encode(msgspec.structs.replace(terms, public=private.public)))))
        return raw

    with PrefillRank() as p, DecodeRank() as d, Middleman(p.place[0], change=change) as man:
        d.want(key(), Behind(p, port=man.port), IDS)
        p.compute(key(), 0, 6)
        wait_until(d.outcomes)
        assert set(man.kinds["prefill"]) <= {FrameKind.CHALLENGE, FrameKind.REJECT}
        assert p.store.used_bytes, "nothing was taken"
        assert not d.arrived


# --- what it can read ---


@pytest.fixture
def clear(monkeypatch: pytest.MonkeyPatch) -> bytearray:
    """All that is sealed, before it is."""
    said, seal = bytearray(), Sealing.seal

    def sealed(self: Sealing, text: bytes, head: bytes) -> bytes:
        said.extend(text)
        return seal(self, text, head)

    monkeypatch.setattr(Sealing, "seal", sealed)
    return said


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Bodies of all frames that are said."""
    from xpyd_sidecar.session.control_connection import ControlConnection

    said: list[Any] = []
    say = ControlConnection.send

    def saying(self: ControlConnection, kind: FrameKind, body: Any = None, *rest: Any) -> bytes:
        said.append(body)
        return say(self, kind, body, *rest)

    monkeypatch.setattr(ControlConnection, "send", saying)
    return said


@pytest.fixture
def world() -> World:
    return World()


def secrets_of(bodies: list[Any]) -> dict[str, bytes]:
    """What nobody else may learn."""
    found: dict[str, bytes] = {"transfer": bytes.fromhex(key().transfer)}
    for body in bodies:
        if isinstance(body, Able) and body.mailbox:
            found["mailbox"] = body.mailbox.encode()
        if isinstance(body, LinkChoice) and body.secret:
            found["secret of the mailbox"] = body.secret
        if isinstance(body, LinkWelcome) and (shared := body.shared) is not None:
            found |= {"name of the memory": shared.name, "ticket": shared.ticket, "mark": shared.mark}
        if isinstance(body, LinkWelcome) and (nixl := body.nixl) is not None:
            found |= {"metadata": nixl.metadata, "agent": nixl.agent.encode(), "ticket": nixl.ticket,
                      "base address": nixl.base.to_bytes(8, "big")}
    return found


def test_what_opens_shared_memory_is_not_on_the_wire(clear: bytearray, bodies: list[Any]) -> None:
    with PrefillRank() as p, DecodeRank() as d, Middleman(p.place[0]) as man:
        handed_over(p, d, man)
        p.reported()
        wire = man.seen["prefill"] + man.seen["decode"]
    hidden = secrets_of(bodies)
    assert hidden.keys() == {"transfer", "mailbox", "secret of the mailbox", "name of the memory", "ticket", "mark"}
    assert {name for name, one in hidden.items() if one not in clear} == set(), "it is said, and would be found"
    assert {name for name, one in hidden.items() if one in wire} == set()


def test_what_reads_registered_memory_is_not_on_the_wire(clear: bytearray, bodies: list[Any], world: World) -> None:
    ours, theirs = NixlProcess(world.driver()), NixlProcess(world.driver())
    try:
        with ours.prefill() as p, theirs.decode() as d, Middleman(p.place[0]) as man:
            handed_over(p, d, man)
            assert d.links == {"nixl"}
            p.reported()
            wire = man.seen["prefill"] + man.seen["decode"]
    finally:
        ours.stop()
        theirs.stop()
    hidden = secrets_of(bodies)
    assert hidden.keys() == {"transfer", "metadata", "agent", "ticket", "base address"}
    assert all(len(one) >= 8 for one in hidden.values()), "none is in the wire by chance"
    assert {name for name, one in hidden.items() if one not in clear} == set(), "it is said, and would be found"
    assert {name for name, one in hidden.items() if one in wire} == set()
