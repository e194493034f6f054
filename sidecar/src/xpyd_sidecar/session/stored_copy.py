"""A copy of KV in the store: some arrays with the same blocks, what is told of it, and its sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xpyd_sidecar.kv.array_layout import ArrayLayout
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.manifests import Manifest, layout
from xpyd_sidecar.kv.packing import sums_of
from xpyd_sidecar.kv.wire import NO_TRY
from xpyd_sidecar.memory.store import CopyStore, StoreLease
from xpyd_sidecar.transport import moves


class StoredCopy:
    """Blocks ``first``.. of arrays ``region``.. that lie in one lease. Used by one thread at a time."""

    def __init__(self, lease: StoreLease, arrays: Sequence[ArrayLayout], regions: range, blocks: tuple[int, int], *,
                 sums: bytes = b"", gone: Callable[[], None] | None = None) -> None:
        """Take it.

        Args:
            lease: where it lies.
            arrays: of this rank, all.
            regions: which of them it has.
            blocks: the first, and how many.
            sums: as ``manifests.Sums`` has them, if they are made.
            gone: called once when it is freed.
        """
        self.key: Key = NO_TRY
        self.number = 0
        """Of its manifest."""
        self.sums = sums
        self.told: list[int] = []
        """Sessions that were told of it and wait for its sums."""
        self.summing = False
        """Its sums are to be made, or are being made."""
        self.told_at = 0.0
        """When the last of them was, by the monotonic clock."""
        self.freed = False
        self.offset = lease.offset
        """In the store."""
        self.view = lease.chunk.view
        self._held = 0
        self._store: CopyStore | None = None
        """Where it goes back to, once nobody sends of it."""
        self._lease = lease
        self._arrays = arrays
        self._shape = regions.start, len(regions), *blocks
        self._gone = gone

    @property
    def size(self) -> int:
        """Bytes of the store."""
        return len(self._lease.chunk.view)

    def manifest(self, number: int) -> Manifest:
        """What is told of it."""
        return Manifest(number, *self._shape, self._lease.offset)

    def sum_up(self) -> None:
        """Make its sums, on the calling thread."""
        view, made = self._lease.chunk.view, bytearray()
        for _, packed, offset in layout(self.manifest(0), self._arrays):
            some = view[offset - self._lease.offset:offset - self._lease.offset + packed.size]
            made += moves.sums(some, packed.head_bytes) if packed.run == 1 else sums_of(some, packed).tobytes()
        self.sums = bytes(made)

    def hold(self) -> None:
        """Keep the bytes of the copy while they are being sent."""
        self._held += 1

    def let_go(self) -> None:
        """One who held them needs them no more."""
        self._held -= 1
        if self._store is not None and not self._held:
            self._give(self._store)

    def free(self, store: CopyStore) -> None:
        """Give its memory back, as soon as nobody sends of it."""
        self.freed = True
        if self._held:
            self._store = store
        else:
            self._give(store)

    def _give(self, store: CopyStore) -> None:
        store.give(self._lease)
        if self._gone is not None:
            self._gone()
