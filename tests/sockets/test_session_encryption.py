"""Sessions whose KV is encrypted: somebody between two ranks reads nothing of it, and what is changed is never taken."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator

import pytest
from manifest_ranks import HEADS, LAYERS, Behind, DecodeRank, PrefillRank, content, key, wait_until
from middleman import Deed, Middleman, Who

from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.transport.tcp import cipher

pytestmark = pytest.mark.skipif(bool(cipher.lack()), reason="there is no libcrypto here")
IDS = (9, 3, 4, 5, 30, 31)
HEAD = 16 << 10
"""Bytes of one block and head, so that a session moves 1 MiB."""
SECRET = key(0x5EED_7A3C_91D0_4E68_B2F5_0C17_8A9E_D346)
"""Its name is not among bytes that are drawn, nor among zeros."""


def only_prefills_bytes_or_none(d: DecodeRank, transfer: Key) -> None:
    """Whatever has come of a load, it is right; looked at as the engine does, when its gate is closed and nobody writes."""
    request = f"r{transfer.transfer[-4:]}"
    d.receiver.close(request)
    wait_until(lambda: d.receiver.is_settled(request))
    for region in range(LAYERS):
        for nth, block in enumerate(IDS):
            there = d.caches[region][block].reshape(-1)
            wanted = content(transfer, region, nth, HEAD).reshape(-1)
            assert ((there == wanted) | (there == 0)).all()
            assert not d.has(transfer, nth, 1) or (there == wanted).all()


@pytest.mark.parametrize("encrypts", [True, False])
def test_who_reads_all_that_passes_finds_no_block_and_no_name_of_a_transfer(*, encrypts: bool) -> None:
    with PrefillRank(transport="tcp", store_bytes=4 << 20, head_bytes=HEAD, encrypts=encrypts) as p, \
            DecodeRank(transport="tcp", head_bytes=HEAD, encrypts=encrypts) as d, Middleman(p.place[0]) as man:
        d.want(SECRET, Behind(p, port=man.port), IDS)
        p.compute(SECRET, 0, 6)
        d.whole(SECRET, 0, IDS)
        assert d.links == {"tcp"}
        seen = bytes(man.seen["prefill"])
        samples = [content(SECRET, region, block, HEAD).tobytes()[at:at + 32]
                   for region in range(LAYERS) for block in range(6) for at in range(0, HEADS * HEAD, 4096)]
        assert len(seen) > LAYERS * 6 * HEADS * HEAD
        assert any(sample in seen for sample in samples) is not encrypts
        assert (bytes.fromhex(SECRET.transfer) in bytes(man.seen["decode"])) is not encrypts


class Once:
    """Does something to one larger piece of what one side says on stripes, the ``nth``."""

    def __init__(self, who: Who, least: int, nth: int, deed: Callable[[bytes], bytes]) -> None:
        self.done = threading.Event()
        self._who, self._least, self._left, self._deed = who, least, nth, deed
        self._lock = threading.Lock()

    def __call__(self, who: Who, raw: bytes) -> bytes:
        with self._lock:
            if who != self._who or len(raw) < self._least or self.done.is_set():
                return raw
            self._left -= 1
            if self._left >= 0:
                return raw
            self.done.set()
        return self._deed(raw)


def flip(raw: bytes) -> bytes:
    at = random.Random(len(raw)).randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1:]


DEEDS: dict[str, Callable[[bytes], bytes]] = {
    "a bit is changed": flip,
    "a byte is left out": lambda raw: raw[:len(raw) // 2] + raw[len(raw) // 2 + 1:],
    "all of it comes twice": lambda raw: raw + raw,
    "halves change places": lambda raw: raw[len(raw) // 2:] + raw[:len(raw) // 2],
    "zeros": lambda raw: bytes(len(raw)),
}


@contextlib.contextmanager
def handed_over(once: Once, *, cover: bool = True) -> Iterator[tuple[DecodeRank, Middleman]]:
    """Two ranks that encrypt, with somebody between who does a deed, while a prompt is handed over."""
    with PrefillRank(transport="tcp", store_bytes=4 << 20, head_bytes=HEAD, cover=cover, encrypts=True) as p, \
            DecodeRank(transport="tcp", head_bytes=HEAD, cover=cover, encrypts=True, piece=60_000) as d, \
            Middleman(p.place[0], Deed("nothing is"), once) as man:
        d.want(key(), Behind(p, port=man.port), IDS)
        p.compute(key(), 0, 6)
        yield d, man


@pytest.mark.parametrize("nth", [0, 5])
@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("cover", [True, False])
def test_what_is_changed_on_its_way_ends_the_load_and_is_never_taken(deed: str, nth: int, *, cover: bool) -> None:
    once = Once("prefill", 2000, nth, DEEDS[deed])
    with handed_over(once, cover=cover) as (d, man):
        wait_until(lambda: d.outcomes() or d.has(key(), 0, 6))
        assert once.done.is_set()
        if d.outcomes():
            assert d.outcomes() == [Outcome.PROTOCOL]
            assert "than were sealed" in d.broken[0].reason
        else:  # the end of another connection was seen first: it was asked for again in another session
            assert man.connections > 5
        only_prefills_bytes_or_none(d, key())


def test_a_request_that_is_changed_ends_the_session_and_gets_nothing() -> None:
    once = Once("decode", 80, 1, flip)
    with handed_over(once) as (d, man):
        wait_until(lambda: d.has(key(), 0, 6) or d.outcomes())
        assert once.done.is_set()
        assert man.connections > 5, "it was asked for again in another session"
        only_prefills_bytes_or_none(d, key())


def cut(raw: bytes) -> bytes:
    raise OSError("cut")


def test_a_connection_that_is_cut_is_made_again_and_the_rest_comes_under_other_keys() -> None:
    once = Once("prefill", 2000, 3, cut)
    with handed_over(once) as (d, man):
        d.whole(key(), 0, IDS)
        assert once.done.is_set()
        assert man.connections > 5


@pytest.mark.parametrize("transport", ["auto", "tcp", "shm"])
@pytest.mark.parametrize("prefill", [True, False])
def test_a_pair_of_which_one_encrypts_is_refused_by_name(transport: str, *, prefill: bool) -> None:
    with PrefillRank(transport=transport, encrypts=prefill) as p, \
            DecodeRank(transport=transport, encrypts=not prefill) as d:
        p.compute(key(), 0, 6)
        d.want(key(), p, IDS)
        assert d.broken_off() == [Outcome.INCOMPATIBLE]
        word = {True: "enabled", False: "disabled"}
        words = f"kv.encryption is {word[prefill]} at prefill, {word[not prefill]} at decode"
        assert words in d.broken[0].reason
        wait_until(lambda: d.receiver.refused)
        assert words in d.receiver.refused[0].reason


def test_on_one_host_memory_is_taken_though_kv_is_to_be_encrypted() -> None:
    with PrefillRank(encrypts=True) as p, DecodeRank(encrypts=True) as d:
        p.compute(key(), 0, 6)
        d.want(key(), p, IDS)
        d.whole(key(), 0, IDS)
        assert d.links == {"shm"}


def test_between_hosts_auto_takes_stripes_that_are_encrypted() -> None:
    with PrefillRank(encrypts=True) as p, DecodeRank(host="another host", encrypts=True) as d, Middleman(p.place[0]) as man:
        p.compute(key(), 0, 6)
        d.want(key(), Behind(p, port=man.port), IDS)
        d.whole(key(), 0, IDS)
        assert d.links == {"tcp"}
        assert content(key(), 0, 0).tobytes()[:64] not in bytes(man.seen["prefill"])
