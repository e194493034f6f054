"""Frames: the layout is fixed, bounds hold, and no flipped bit goes unnoticed."""

from __future__ import annotations

import random

import pytest

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.kv import frames
from xpyd_sidecar.kv.frames import BODY_MAX, HEADER_BYTES, FrameError, FrameKind, HeaderError
from xpyd_sidecar.kv.keys import Key

KEY = Key(TransferId("0123456789abcdef" * 2), Attempt(2), 3)


def test_a_frame_comes_back_as_it_was() -> None:
    payload = bytes(range(100))
    raw = frames.encode(FrameKind.DATA, KEY, payload, region=7, first=8, blocks=10)
    header = frames.decode(raw)
    assert (header.kind, header.covered, header.length, header.key) == (FrameKind.DATA, True, 100, KEY)
    assert (header.region, header.first, header.blocks) == (7, 8, 10)
    assert header.checksum == frames.total(frames.sums(payload, 10))
    assert frames.encode(FrameKind.DATA, KEY, payload, region=7, first=8, blocks=10, known=header.checksum) == raw


def test_the_layout_is_the_one_that_is_drawn() -> None:
    raw = frames.encode(FrameKind.READY, KEY, b"abc")
    assert len(raw) == HEADER_BYTES == 64
    assert raw[:12] == b"xpyd" + bytes([5, 5]) + b"\x01\x00" + b"\x03\0\0\0"
    assert raw[12:28].hex() == KEY.transfer
    assert raw[28:36] == b"\x02\0\0\0\x03\0\0\0"


def test_a_header_that_was_expected_gets_its_sum_once_it_is_intact() -> None:
    raw = frames.encode(FrameKind.DATA, KEY, bytes(100), region=7, first=8, blocks=10)
    whole = frames.decode(raw)
    expected = whole._replace(checksum=0)
    assert raw.startswith(frames.known(expected))
    assert frames.confirmed(expected, raw) == whole
    for bit in range(48 * 8, HEADER_BYTES * 8):
        bad = bytearray(raw)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(HeaderError, match="wrong checksum"):
            frames.confirmed(expected, bytes(bad))


def test_every_flipped_bit_of_header_and_payload_is_noticed() -> None:
    payload = random.Random(1).randbytes(64)
    raw = frames.encode(FrameKind.OFFER, KEY, payload, region=1, first=2, blocks=3)
    whole = raw + payload
    for bit in range(len(whole) * 8):
        bad = bytearray(whole)
        bad[bit // 8] ^= 1 << bit % 8
        try:
            header = frames.decode(bad[:HEADER_BYTES])
        except FrameError:
            continue
        if header.length != len(payload):
            continue  # other bytes are read; a receiver compares them with this checksum all the same
        assert not frames.intact(header, bytes(bad[HEADER_BYTES:])), f"bit {bit}"


def test_without_cover_the_header_is_still_checked_and_the_payload_is_not() -> None:
    raw = frames.encode(FrameKind.DATA, KEY, b"good", cover=False)
    header = frames.decode(raw)
    assert not header.covered
    assert frames.intact(header, b"evil")
    other = frames.encode(FrameKind.DATA, KEY, b"good", cover=False, first=1)
    with pytest.raises(HeaderError):
        frames.decode(other[:48] + raw[48:])


def test_every_flipped_bit_of_blocks_is_in_their_sum() -> None:
    payload = random.Random(3).randbytes(90)
    good = frames.total(frames.sums(payload, 30))
    for bit in range(len(payload) * 8):
        bad = bytearray(payload)
        bad[bit // 8] ^= 1 << bit % 8
        assert frames.total(frames.sums(bad, 30)) != good, f"bit {bit}"
    assert frames.total(frames.sums(payload[30:] + payload[:30], 30)) != good


@pytest.mark.parametrize("size", [1, 255, 256, frames.SUM_BYTES - 1, frames.SUM_BYTES, frames.SUM_BYTES + 1, 200_000])
def test_blocks_summed_up_apart_have_the_sums_of_the_whole(size: int) -> None:
    whole = random.Random(2).randbytes(3 * size)
    sums = frames.sums(whole, size)
    assert sums == b"".join(frames.sums(whole[at:at + size], size) for at in range(0, 3 * size, size))
    assert len(sums) == 8 * 3 * -(-size // frames.SUM_BYTES)
    first = whole[:min(size, frames.SUM_BYTES)]
    assert sums[:8] == frames.checksum(first.ljust(frames.SUM_LEAST, b"\0")).to_bytes(8, "little")
    with pytest.raises(ValueError, match="whole blocks"):
        frames.sums(b"abc", 2)


def sealed(raw: bytes) -> bytes:
    return raw[:56] + frames.checksum(raw[:56]).to_bytes(8, "little")


@pytest.mark.parametrize(("change", "text"), [
    (lambda raw: b"HTTP" + raw[4:], "not an xpyd data link"),
    (lambda raw: raw[:4] + b"\x09" + raw[5:], "wire version 9 is not 5"),
    (lambda raw: raw[:5] + b"\x63" + raw[6:], "header with a wrong checksum"),
    (lambda raw: sealed(raw[:5] + b"\x63" + raw[6:]), "unknown frame kind 99"),
    (lambda raw: sealed(raw[:8] + (BODY_MAX + 1).to_bytes(4, "little") + raw[12:]), "over the bound"),
])
def test_what_is_no_frame_is_refused_with_the_reason(change: object, text: str) -> None:
    with pytest.raises(FrameError, match=text):
        frames.decode(change(frames.encode(FrameKind.READY, KEY, b"x")))  # type: ignore[operator]
