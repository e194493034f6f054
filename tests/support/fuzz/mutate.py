"""Changes of an input that may lead somewhere new."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

MAX_BYTES = 4096
"""Of an input: longer ones are slow and show nothing more."""
NUMBERS = (b"0", b"1", b"7", b"9", b"15", b"16", b"17", b"63", b"64", b"65", b"127", b"128", b"255", b"256", b"-1",
           b"65535", b"65536", b"999999999", b"1000000000", b"2147483648", b"999999999999999999", b"18446744073709551616")
Change = Callable[[bytearray, random.Random], None]


def _flip(data: bytearray, dice: random.Random) -> None:
    if data:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def _set(data: bytearray, dice: random.Random) -> None:
    if data:
        data[dice.randrange(len(data))] = dice.choice((0, 9, 10, 13, 32, 34, 44, 92, 127, 128, 255, dice.randrange(256)))


def _insert(data: bytearray, dice: random.Random) -> None:
    at = dice.randint(0, len(data))
    data[at:at] = bytes([dice.randrange(256)]) * dice.choice((1, 1, 1, 2, 8, 9, 64))


def _cut(data: bytearray, dice: random.Random) -> None:
    at = dice.randint(0, len(data))
    del data[at:at + dice.choice((1, 1, 2, 4, 16, 64, 256))]


def _repeat(data: bytearray, dice: random.Random) -> None:
    at = dice.randint(0, len(data))
    part = data[at:at + dice.choice((1, 2, 8, 32, 128))]
    to = dice.randint(0, len(data))
    data[to:to] = part * dice.choice((1, 1, 1, 2, 8))


def _move(data: bytearray, dice: random.Random) -> None:
    at, size = dice.randint(0, len(data)), dice.choice((1, 2, 8, 32, 128))
    part = data[at:at + size]
    del data[at:at + size]
    to = dice.randint(0, len(data))
    data[to:to] = part


def _number(data: bytearray, dice: random.Random) -> None:
    """A run of digits becomes another number."""
    at = dice.randint(0, len(data))
    while at < len(data) and not 48 <= data[at] <= 57:
        at += 1
    end = at
    while end < len(data) and 48 <= data[end] <= 57:
        end += 1
    data[at:end] = dice.choice(NUMBERS)


def _truncate(data: bytearray, dice: random.Random) -> None:
    del data[dice.randint(0, len(data)):]


CHANGES: tuple[Change, ...] = (_flip, _set, _insert, _cut, _repeat, _move, _number, _flip, _set, _truncate)


def mutated(data: bytes, other: bytes, tokens: Sequence[bytes], dice: random.Random) -> bytes:
    """A few changes of ``data``; ``other`` is a second input that parts are taken from."""
    made = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 2, 3, 4, 8))):
        kind = dice.random()
        if kind < 0.3 and tokens:
            at, token = dice.randint(0, len(made)), dice.choice(tokens)
            made[at:at + (len(token) if dice.random() < 0.4 else 0)] = token
        elif kind < 0.4 and other:
            at, start = dice.randint(0, len(made)), dice.randrange(len(other))
            part = other[start:start + dice.choice((4, 16, 64, 256, len(other)))]
            made[at:at + (len(part) if dice.random() < 0.5 else 0)] = part
        else:
            dice.choice(CHANGES)(made, dice)
        if len(made) > MAX_BYTES:
            del made[MAX_BYTES:]
    return bytes(made)
