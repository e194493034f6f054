"""How much memory a rank takes for copies of KV: it follows what one step of the model brings. Pure.

    step      max_num_batched_tokens * bytes of KV per token, of this rank
    keep      two steps within the share of one decode engine:      host memory, of copies to send
              one leaves while the next is written
    slab      a step in ``ROUNDS`` parts                            device memory that copies pass through on their way out
    ring      one step: what comes while decode makes a step        device memory that copies pass through on their way in,
                                                                    and as much of the host's for links that need it

So it is on a device, within bounds: the least carries 10 GB/s whatever the model, the most is what a link and a bus can
use. All ranks of a host together choose no more than a ``SHARE`` of its memory, or of their container's, by themselves.
On a host a copy is done when it is called, and sizes are constants.

Nothing is lost where a size is too small: blocks wait in prefill's cache, and decode fetches them later
(docs/decisions/0050, 0065).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from xpyd_sidecar.contract.launch import DEVICE_KEEP_BYTES, DEVICE_RING_BYTES, KEEP_BYTES
from xpyd_sidecar.engine.settings import FIELD
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv import fair_share

ROUNDS: Final = 2
"""Times that a step may fill the device memory which copies pass through."""
KEEP_MOST: Final = 8 << 30
RING_LEAST: Final = DEVICE_RING_BYTES
RING_MOST: Final = 1 << 30
"""Of which a session has an eighth: two fetches of 64 MiB, so that one is copied in while the other is placed."""
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
    """Bytes that vLLM has left free on the device for slab and ring."""


class MemorySizes(NamedTuple):
    """Bytes of one rank."""

    keep: int
    ring: int
    slab: int
    why: str
    """In words."""


def memory_sizes(stated: int | None, token_bytes: int, load: StepLoad, *, device: bool, pool: int = 0) -> MemorySizes:
    """The sizes of a rank.

    Args:
        stated: bytes that copies to send may take, if somebody has chosen.
        token_bytes: of KV.
        load: what decides.
        device: the cache is on one.
        pool: bytes of ``host_pool_bytes``, which are taken besides.

    Raises:
        ConfigError: what was stated cannot be, on a machine with so little memory.
    """
    if load.memory and ((stated or 0) + pool) * load.ranks > load.memory:
        raise ConfigError(f"{FIELD}.keep_bytes (half of kv.memory) and host_pool_bytes: {_mib(stated or 0)} and "
                          f"{_mib(pool)} for each of {load.ranks} ranks are more than the {_mib(load.memory)} of memory "
                          "here; write less, or leave them out")
    if not device:
        return MemorySizes(stated or KEEP_BYTES, 0, 0, "a host's")
    step = load.tokens * token_bytes
    most = load.memory // SHARE // max(1, load.ranks) if load.memory else KEEP_MOST + RING_MOST
    room = load.device_room
    if room < slab_bytes(step, SLAB_MOST) + ring_bytes(step, RING_MOST):
        room //= 2
    ring = ring_bytes(step, min(room, most // 3))
    keep = _within(keep_bytes(step), DEVICE_KEEP_BYTES, min(KEEP_MOST, most - ring))
    if stated is not None:
        keep = max(stated, DEVICE_KEEP_BYTES)
    why = f"a step of {load.tokens} tokens brings {_mib(step)} of KV" if step else "what a step brings is not known"
    if keep < step:
        why += ", more than there is room for: some of it waits in prefill's cache"
    return MemorySizes(keep, ring, slab_bytes(step, room), why)


def keep_bytes(step: int) -> int:
    """So much that a single decode engine may have two steps of so many bytes in it (``kv.fair_share``).

    The second is written before anything of the first has been taken, since steps are planned one ahead of the device: what
    finds no room then leaves only when the whole forward has ended.
    """
    return -(-2 * step * (fair_share.SHARE + 1) // fair_share.SHARE)


def slab_bytes(step: int, room: int) -> int:
    """Bytes of the slab on the device, for steps that bring ``step`` bytes; ``room``: bytes that are free there."""
    return min(max(-(-step // ROUNDS), SLAB_LEAST), SLAB_MOST, max(SLAB_LEAST, room))


def ring_bytes(step: int, room: int) -> int:
    """Bytes of the ring on the device, for steps that bring ``step`` bytes; ``room``: bytes that are free there."""
    return _within(step, RING_LEAST, min(RING_MOST, room))


def describe(sizes: MemorySizes, rank: int) -> str:
    """The chosen sizes of a rank in words, for the log."""
    return (f"xpyd: rank {rank} keeps {_mib(sizes.keep)} of KV to send in pinned memory; copies pass through "
            f"{_mib(sizes.slab)} of the device on their way out and {_mib(sizes.ring)} on their way in: {sizes.why}")


def _within(size: int, least: int, most: int) -> int:
    return max(least, min(size, most))


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"
