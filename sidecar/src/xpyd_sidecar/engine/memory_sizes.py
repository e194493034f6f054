"""How much memory a rank takes for copies of KV: it follows what one step of the model brings. Pure.

    step      max_num_batched_tokens * bytes of KV per token, of this rank
    keep      two steps: one leaves while the next is written       host memory, of copies to send
    staging   one step: what comes while decode makes a step        host memory, of what arrives
    slab      a step in ``ROUNDS`` parts                            device memory that copies pass through

So it is on a device, within bounds: the least carries 10 GB/s whatever the model, the most is what a link and a bus can
use. All ranks of a host together choose no more than a ``SHARE`` of its memory, or of their container's, by themselves.
On a host a copy is done when it is called, and sizes are constants.

Nothing is lost where a size is too small: blocks wait in prefill's cache, and connections of decode are not read meanwhile
(docs/decisions/0050).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from xpyd_sidecar.contract.launch import (
    DEVICE_KEEP_BYTES,
    DEVICE_STAGING_BYTES,
    KEEP_BYTES,
    STAGING_BYTES,
    pinned_bytes,
)
from xpyd_sidecar.engine.settings import FIELD
from xpyd_sidecar.errors import ConfigError

ROUNDS: Final = 2
"""Times that a step may fill the device memory which copies pass through."""
KEEP_MOST: Final = 8 << 30
STAGING_MOST: Final = 2 << 30
"""40 GB/s at steps of 50 ms."""
SLAB_LEAST: Final = 256 << 20
"""What there is room for beside vLLM's memory, though nobody has left it."""
SLAB_MOST: Final = 1 << 30
SHARE: Final = 4
"""One part in so many, of the memory of all ranks' host."""


class StepLoad(NamedTuple):
    """What decides the sizes of a rank, besides the model's arrays."""

    tokens: int = 0
    """That a step computes at most; 0: that is not known."""
    ranks: int = 1
    """Of engines that share this host's memory, or this container's."""
    memory: int = 0
    """Bytes of it; 0: that is not known."""
    device_room: int = 0
    """Bytes that vLLM has left free on the device for the slab."""


class MemorySizes(NamedTuple):
    """Bytes of one rank."""

    keep: int
    staging: int
    slab: int
    why: str
    """In words."""


def memory_sizes(stated: int | None, token_bytes: int, load: StepLoad, *, device: bool) -> MemorySizes:
    """The sizes of a rank. ``stated``: what copies to send may take, if somebody has chosen; ``token_bytes``: of KV.

    Raises:
        ConfigError: the stated size cannot be, on a machine with so little memory.
    """
    if stated is not None and load.memory and stated * load.ranks > load.memory:
        raise ConfigError(f"{FIELD}.keep_bytes (kv.keep): {_mib(stated)} for each of "
                          f"{load.ranks} ranks is more than the {_mib(load.memory)} of memory here; write less, or leave "
                          "it out")
    if not device:
        return MemorySizes(stated or KEEP_BYTES, STAGING_BYTES, 0, "a host's")
    step = load.tokens * token_bytes
    most = load.memory // SHARE // max(1, load.ranks) if load.memory else KEEP_MOST + STAGING_MOST
    staging = _within(step, DEVICE_STAGING_BYTES, min(STAGING_MOST, most // 3))
    keep = _within(2 * step, DEVICE_KEEP_BYTES, min(KEEP_MOST, most - staging))
    if stated is not None:
        keep = max(stated, DEVICE_KEEP_BYTES)
    why = f"a step of {load.tokens} tokens brings {_mib(step)} of KV" if step else "what a step brings is not known"
    if keep < step:
        why += ", more than there is room for: some of it waits in prefill's cache"
    return MemorySizes(keep, staging, slab_bytes(step, load.device_room), why)


def slab_bytes(step: int, room: int) -> int:
    """Of device memory, for steps that bring so many bytes, where there is room for so many."""
    return min(max(-(-step // ROUNDS), SLAB_LEAST), SLAB_MOST, max(SLAB_LEAST, room))


def told(sizes: MemorySizes, rank: int) -> str:
    """What was chosen, for the log."""
    return (f"xpyd: rank {rank} keeps {_mib(sizes.keep)} of KV to send and {_mib(sizes.staging)} of what arrives in pinned "
            f"memory, and copies pass through {_mib(sizes.slab)} of the device: {sizes.why}")


def _within(size: int, least: int, most: int) -> int:
    """A power of two, since pinned memory is taken in such; rounded down, since ``most`` is a bound."""
    whole = pinned_bytes(min(size, most))
    return max(least, whole if whole <= min(size, most) else whole // 2)


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"
