"""Control messages: round trips, other versions, malformed bytes."""

from __future__ import annotations

import msgspec
import pytest

from xpyd_sidecar.contract.fingerprint import FingerprintFields
from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, TransferId
from xpyd_sidecar.contract.membership import Parallel
from xpyd_sidecar.contract.speculation import Speculation
from xpyd_sidecar.kv import messages
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.mapping import Array, ArrayKind, geometry
from xpyd_sidecar.kv.messages import (
    Announce,
    Drop,
    Hello,
    ListeningRank,
    MessageError,
    Ping,
    Pong,
    Reject,
    TryGone,
    Welcome,
    WorkDone,
)

T = TransferId("ab" * 16)
INC = Incarnation("c" * 32)
FIELDS = FingerprintFields("m", "float32", "float32", 128, "HND", "vec", "0.32.0")
SHAPE = geometry(1, [[Array("layer0", ArrayKind("float32", 4, (8, 8), 256, 4))]])
EAGLE = Speculation("eagle3", "h", "fp8", (2, 20, 37), parallel_drafting=True, num_speculative_tokens=5, states=True,
                    layers=("model.layers.40.self_attn.attn",))
ANNOUNCE = Announce(T, Attempt(3), 1, b"i" * 32, 10, 9, (ListeningRank(HostPort("10.0.0.1:5"), INC),))


@pytest.mark.parametrize("message", [
    Hello(InstanceName("p"), INC, INC, FIELDS, Parallel(), SHAPE, EAGLE), Welcome(InstanceName("d"), INC),
    Reject(Outcome.INCOMPATIBLE, "dtype"), ANNOUNCE, TryGone(T, Attempt(1), 1, Outcome.ABORTED, "r", True),
    Drop(T, Attempt(1), 1, Outcome.UNUSED, "r"), Ping(1), Pong(1, INC),
    Ping(0, (WorkDone(T, Attempt(1), 1, 2**40, 2**40),) * messages.WORK_MAX)], ids=lambda m: type(m).__name__)
def test_messages_come_back_as_they_were(message: messages.Control) -> None:
    head, body = messages.pack(message)
    assert messages.unpack(body) == message
    assert messages.prefix(head).version == messages.WIRE_VERSION
    assert len(head) + len(body) <= messages.MESSAGE_MAX


def test_a_hello_that_says_nothing_of_speculation_is_one_of_an_engine_that_does_not_speculate() -> None:
    hello = Hello(InstanceName("p"), INC, INC, FIELDS, Parallel(), SHAPE, EAGLE)
    bare = {name: value for name, value in msgspec.to_builtins(hello).items() if name != "speculation"}
    read = messages.unpack(msgspec.msgpack.encode(bare))
    assert isinstance(read, Hello)
    assert read.speculation == Speculation()


def test_the_prefix_names_the_transfer_so_that_another_version_can_be_answered() -> None:
    head, _ = messages.pack(ANNOUNCE)
    newer = head[:4] + (7).to_bytes(2, "little") + head[6:]
    assert messages.prefix(newer) == messages.Prefix(7, T, Attempt(3))
    assert messages.prefix(messages.pack(Ping(1))[0]).transfer == "0" * 32


def test_a_ping_speaks_of_a_bounded_number_of_transfers() -> None:
    work = (WorkDone(T, Attempt(1), 1, 1, 1),) * (messages.WORK_MAX + 1)
    with pytest.raises(MessageError, match=r"ping.work: 513 transfers at once, over 512"):
        messages.unpack(messages.pack(Ping(0, work))[1])


def test_an_older_peer_says_nothing_of_its_work_and_hears_a_ping_where_a_newer_one_does() -> None:
    class Older(msgspec.Struct, tag="ping", tag_field="t"):
        seq: int

    newer = messages.pack(Ping(0, (WorkDone(T, Attempt(1), 1, 1, 1),)))
    assert msgspec.msgpack.decode(newer[1], type=Older).seq == 0
    assert messages.prefix(newer[0]).version == messages.WIRE_VERSION
    assert messages.unpack(msgspec.msgpack.encode(Older(7))) == Ping(7)


def test_an_older_peer_does_not_say_what_it_had_cached_and_is_not_asked_for_it() -> None:
    known = msgspec.structs.replace(ANNOUNCE, cached=7)
    fields = msgspec.msgpack.decode(messages.pack(known)[1])
    assert fields.pop("cached") == 7
    assert messages.unpack(msgspec.msgpack.encode(fields)) == msgspec.structs.replace(ANNOUNCE, cached=-1)


def test_an_older_peer_does_not_say_how_its_weights_are_called() -> None:
    known = msgspec.structs.replace(ANNOUNCE, weights="step 7")
    assert messages.unpack(messages.pack(known)[1]) == known
    fields = msgspec.msgpack.decode(messages.pack(known)[1])
    assert fields.pop("weights") == "step 7"
    assert messages.unpack(msgspec.msgpack.encode(fields)) == msgspec.structs.replace(ANNOUNCE, weights="")


def test_unknown_fields_of_a_newer_peer_are_ignored() -> None:
    raw = msgspec.msgpack.encode({"t": "ping", "seq": 4, "colour": "blue"})
    assert messages.unpack(raw) == Ping(4)


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"xpyd", msgspec.msgpack.encode({"t": "what"}), msgspec.msgpack.encode([1]),
                                 msgspec.msgpack.encode({"t": "ping"}), msgspec.msgpack.encode({"t": "ping", "seq": "x"}),
                                 b"\x82\xa1t\xa5re\xffct\xa6reason\xa0",
                                 msgspec.msgpack.encode(Reject(Outcome.OK, "xx")).replace(b"xx", b"\xff\xfe")])
def test_malformed_bodies_are_refused(raw: bytes) -> None:
    with pytest.raises(MessageError):
        messages.unpack(raw)


@pytest.mark.parametrize("raw", [b"", b"xpy", b"HTTP/1.1 200 OK padding paddin", b"xpyd\x01\0"])
def test_what_has_no_prefix_is_no_message(raw: bytes) -> None:
    with pytest.raises(MessageError, match="not an xpyd control message"):
        messages.prefix(raw)


@pytest.mark.parametrize(("changes", "text"), [
    ({"tokens": 0}, "tokens"), ({"attempt": 0}, "attempt"), ({"generation": 0}, "generation"),
    ({"identity": b"x"}, "identity"), ({"data": ()}, "data"), ({"data": ANNOUNCE.data * 2000}, "data")])
def test_an_announcement_outside_its_bounds_is_refused_with_the_field(changes: dict[str, object], text: str) -> None:
    bad = msgspec.structs.replace(ANNOUNCE, **changes)
    with pytest.raises(MessageError, match=text):
        messages.unpack(messages.pack(bad)[1])


@pytest.mark.parametrize("changes", [
    {"transfer": "zz" * 16}, {"transfer": "a" * 31}, {"transfer": "a" * 64}, {"attempt": -1}, {"attempt": 1 << 32},
    {"generation": 1 << 32}, {"generation": (1 << 63) - 1}])
@pytest.mark.parametrize("message", [ANNOUNCE, Drop(*ANNOUNCE.key, Outcome.UNUSED, ""),
                                     TryGone(*ANNOUNCE.key, Outcome.ABORTED, "", retry=False)])
def test_a_name_of_a_try_that_no_answer_could_bear_is_refused(message: messages.TransferAttempt,
                                                              changes: dict[str, object]) -> None:
    """Its answer would be written by the control thread, later, and would end it."""
    raw = msgspec.msgpack.encode(msgspec.structs.replace(message, **changes))
    with pytest.raises(MessageError, match="cannot be the name of a try"):
        messages.unpack(raw)


def test_keys_of_messages() -> None:
    key = Key(T, Attempt(3), 1)
    assert ANNOUNCE.key == key
    assert Drop(*key, Outcome.UNUSED, "").key == TryGone(*key, Outcome.ABORTED, "", False).key == key

