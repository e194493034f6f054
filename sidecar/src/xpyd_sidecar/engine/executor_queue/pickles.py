"""Objects as buffers and back, as vLLM's queue does it: pickle, with large buffers and tensors beside it and not in it.

Pickle runs what it is told to. So it reads only what came over a queue, whose other end is a process of the same user on
this host, or has shown that it holds the key.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Sequence
from typing import Any, Final

import torch

from xpyd_sidecar.broadcast.message import PARTS_MAX
from xpyd_sidecar.broadcast.queue import Buffer
from xpyd_sidecar.engine.executor_queue.compat import reduce_tensor

BESIDE_LEAST: Final = 1 << 20
"""Smaller buffers go into the pickle."""


def dumps(value: Any) -> list[Buffer]:
    """The pickle, and then the buffers beside it; they are those of ``value`` itself."""
    beside: list[Buffer] = []

    def within(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < BESIDE_LEAST or len(beside) + 1 >= PARTS_MAX:
            return True
        beside.append(raw)
        return False

    with io.BytesIO() as out:
        pickler = pickle.Pickler(out, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=within)
        pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: reduce_tensor}
        pickler.dump(value)
        return [out.getvalue(), *beside]


def loads(parts: Sequence[memoryview]) -> Any:
    """The object; nothing of it lies in ``parts`` any more."""
    return pickle.loads(parts[0], buffers=[bytearray(part) for part in parts[1:]])  # noqa: S301  # see the module
