"""What calls and answers look like on a queue. Pure.

A message's first part is msgpack; further parts are the buffers that were wrapped in ``SeparateBuffer``, which it names
by their index (an extension type). Not pickle: whoever can write to a queue could run code with it, it breaks between
versions of Python and of the sidecar, and calls here carry numbers, names and bytes. So arguments and results are None,
bool, int, float, str, bytes, lists (tuples arrive as lists), dicts, and ``SeparateBuffer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")
APART: Final = 1
MESSAGE_MAX: Final = 1 << 20
"""Characters of an error's text and of its traceback."""


class SeparateBuffer:
    """A large buffer in arguments or a result: it travels as a part of its own, without being copied into msgpack.

    In a worker's method it is a read-only memoryview, valid until the method returns; in a result it is one for good.
    """

    def __init__(self, buffer: bytes | bytearray | memoryview) -> None:
        self.buffer = buffer


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """A method to run; ``to`` None: on every worker."""

    number: int
    method: str
    to: tuple[str, ...] | None
    answer: bool
    """The caller waits for one."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """What a method raised."""

    kind: str
    """The exception's class."""
    text: str
    trace: str
    """The traceback as Python prints it."""


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """What a call came to on one worker."""

    number: int
    result: Any = None
    failure: Failure | None = None


def pack(message: Call | Answer) -> list[bytes | bytearray | memoryview]:
    """The parts of a message.

    Raises:
        TypeError: something in it is none of the types that calls carry.
    """
    apart: list[bytes | bytearray | memoryview] = []

    def hook(value: object) -> msgspec.msgpack.Ext:
        if isinstance(value, SeparateBuffer):
            apart.append(value.buffer)
            return msgspec.msgpack.Ext(APART, (len(apart) - 1).to_bytes(4, "little"))
        raise TypeError(f"calls do not carry {type(value).__qualname__}; buffers are wrapped in SeparateBuffer")

    return [msgspec.msgpack.encode(message, enc_hook=hook), *apart]


def unpack(parts: Sequence[bytes | memoryview], kind: type[T]) -> T:
    """Read a message of one kind.

    Raises:
        ValueError: it is none.
    """

    def hook(code: int, data: memoryview) -> memoryview:
        index = int.from_bytes(data, "little") + 1
        if code != APART or index >= len(parts):
            raise ValueError(f"extension {code} with index {index - 1} of {len(parts) - 1} parts")
        return memoryview(parts[index])

    try:
        return msgspec.msgpack.decode(parts[0], type=kind, ext_hook=hook)
    except (msgspec.DecodeError, ValueError, IndexError) as error:
        raise ValueError(f"not a {kind.__name__}: {error}") from None
