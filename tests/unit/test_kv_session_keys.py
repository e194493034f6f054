"""Keys of a session: who holds the data key is believed, nobody else reads or changes a frame, and none is left out."""

from __future__ import annotations

import hmac
import itertools

import pytest

from xpyd_sidecar.kv import session_keys
from xpyd_sidecar.kv.session_keys import (
    PrivateKey,
    SealError,
    Sealing,
    SessionKeys,
    Transcript,
    derive,
    holds,
    prove,
    stripe_answer,
    stripe_keys,
    stripe_name,
)

DATA_KEY = bytes(range(32))


def said(*parts: bytes) -> Transcript:
    transcript = Transcript()
    for part in parts:
        transcript.add(part)
    return transcript


def test_both_ends_derive_the_same_keys_and_each_session_others() -> None:
    one, other, later = PrivateKey(), PrivateKey(), PrivateKey()
    keys = derive(one.shared_secret(other.public), DATA_KEY, said(b"a"))
    assert derive(other.shared_secret(one.public), DATA_KEY, said(b"a")) == keys
    every = [*keys, *derive(later.shared_secret(other.public), DATA_KEY, said(b"a")),
             *derive(one.shared_secret(other.public), bytes(32), said(b"a")),
             *derive(one.shared_secret(other.public), DATA_KEY, said(b"b"))]
    assert len(set(every)) == len(every)
    assert len({made(keys, number) for number in range(4) for made in (stripe_name, stripe_answer)}) == 8
    assert stripe_name(keys, 0) != stripe_name(derive(one.shared_secret(other.public), DATA_KEY, said(b"b")), 0)


def test_each_stripe_and_direction_has_a_key_of_its_own_as_rfc_5869_expands_it() -> None:
    keys = SessionKeys(b"p" * 32, b"d" * 32, b"s" * 32)
    made = [stripe_keys(keys, number) for number in range(5)]
    assert all(len(one) == 64 for one in made)
    names = [word(keys, number) for number in range(5) for word in (stripe_name, stripe_answer)]
    assert len({*(one[:32] for one in made), *(one[32:] for one in made), *names}) == 20
    assert stripe_keys(keys._replace(stripes=b"t" * 32), 0) != made[0]
    info = b"xpyd stripe\3\0\0\0"
    first = hmac.digest(keys.stripes, info + b"\1", "sha256")
    assert made[3] == first + hmac.digest(keys.stripes, first + info + b"\2", "sha256")


def test_a_public_key_by_which_everybody_knows_the_secret_is_refused() -> None:
    for public in (bytes(32), b"", b"x" * 31):
        with pytest.raises(ValueError, match=r"."):
            PrivateKey().shared_secret(public)


def test_a_proof_stands_for_all_that_was_said_and_for_who_holds_the_key() -> None:
    proof = prove(DATA_KEY, said(b"challenge", b"hello"))
    assert holds(DATA_KEY, said(b"challenge", b"hello"), proof)
    others = [prove(bytes(32), said(b"challenge", b"hello")), prove(DATA_KEY, said(b"challenge", b"hullo")),
              prove(DATA_KEY, said(b"challengeh", b"ello")), prove(DATA_KEY, said(b"hello", b"challenge")),
              prove(DATA_KEY, said(b"challenge")), b""]
    assert not any(holds(DATA_KEY, said(b"challenge", b"hello"), other) for other in others)
    assert all(one != other for one, other in itertools.combinations(others, 2))


def test_proofs_are_compared_by_what_takes_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[set[bytes]] = []

    def spy(one: bytes, other: bytes) -> bool:
        compared.append({one, other})
        return True

    monkeypatch.setattr(hmac, "compare_digest", spy)
    assert holds(DATA_KEY, said(b"x"), b"wrong")
    assert compared == [{prove(DATA_KEY, said(b"x")), b"wrong"}]


def test_frames_are_read_in_their_order_by_who_has_the_key() -> None:
    ours, theirs = Sealing(DATA_KEY), Sealing(DATA_KEY)
    for number in range(3):
        sealed = ours.seal(b"secret %d" % number, b"head")
        assert b"secret" not in sealed
        assert theirs.open(sealed, b"head") == b"secret %d" % number


@pytest.mark.parametrize("fault", ["byte", "head", "twice", "left out", "short", "other key"])
def test_a_frame_that_is_not_the_next_one_or_was_changed_is_refused(fault: str) -> None:
    ours, theirs = Sealing(DATA_KEY), Sealing(bytes(32) if fault == "other key" else DATA_KEY)
    first, second = ours.seal(b"first", b"head"), ours.seal(b"second", b"head")
    frame, head = bytearray(first), b"head"
    if fault == "byte":
        frame[2] ^= 1
    elif fault == "head":
        head = b"hand"
    elif fault == "twice":
        theirs.open(first, b"head")
    elif fault == "left out":
        frame = bytearray(second)
    elif fault == "short":
        frame = frame[:10]
    with pytest.raises(SealError, match="not what was sealed"):
        theirs.open(bytes(frame), head)


def test_a_key_seals_no_more_frames_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_keys, "FRAMES_MAX", 2)
    ours = Sealing(DATA_KEY)
    ours.seal(b"", b"")
    ours.seal(b"", b"")
    with pytest.raises(SealError, match="as many"):
        ours.seal(b"", b"")
