"""Another process's store, mapped for reading, as a source of copies into device memory. Needs torch.

CUDA is told of the memory in parts, on a thread that may wait: that takes some milliseconds a part, in which this process
launches nothing. From a part that CUDA knows, the copy engine reads; from one that it does not (yet), the driver copies
through memory of its own, with a core. Where CUDA takes no memory that can only be read, all of it is so, with the reason
said once.

    registered ───────────────▶│                the rest
    [ part ][ part ][ part ]   │ [ part ][ part ]
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Final

import torch

from xpyd_sidecar.memory.addresses import address_of
from xpyd_sidecar.memory.device import DeviceCopies
from xpyd_sidecar.threads.calls import CallThread

logger = logging.getLogger(__name__)

PART_BYTES: Final = 64 << 20
REGISTERED_MOST: Final = 256 << 30
"""Bytes over all peers of a rank, beyond which the driver copies."""


class Registrar(CallThread):
    """The thread of one rank on which CUDA is told of memory, and told to let go of it; what is registered at its end ends
    with the process.
    """

    def __init__(self, copies: DeviceCopies) -> None:
        """``copies``: of the device that is to read the memory."""
        super().__init__("xpyd-registrar")
        self.copies = copies
        self.left = REGISTERED_MOST
        """Bytes that may still be registered; of this thread alone."""
        self.refused = 0
        """CUDA's error, since which it has not been asked again."""


class MappedStore:
    """One mapping. ``parts`` and ``close`` are called by one thread."""

    def __init__(self, view: memoryview, registrar: Registrar) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable")  # nothing writes
            self._tensor: torch.Tensor | None = torch.frombuffer(view, dtype=torch.uint8)
        self._address = address_of(view)
        self._size = len(view)
        self._registrar = registrar
        self._registered = 0
        """Bytes from its begin on that CUDA knows."""
        self._closing = False
        registrar.tell(self._register)

    @property
    def registered_bytes(self) -> int:
        """Bytes from the begin on that the copy engine reads by itself."""
        return self._registered

    def parts(self, offset: int, size: int) -> Iterator[torch.Tensor]:
        """Bytes of it, cut where one copy cannot have both sides, once CUDA knows them: it may know them meanwhile."""
        assert self._tensor is not None
        end = offset + size
        while offset < end:
            cut = min(end, (offset // PART_BYTES + 1) * PART_BYTES)
            yield self._tensor[offset:cut]
            offset = cut

    def close(self, closed: Callable[[], None]) -> None:
        """Let go of it, when nothing reads it any more. ``closed``: called then, on another thread."""
        self._closing = True
        self._registrar.tell(lambda: self._let_go(closed))

    # --- on the registrar's thread ---

    def _register(self) -> None:
        """Tell CUDA of one part, and come again for the next: others have their turn between two."""
        registrar, begin = self._registrar, self._registered
        size = min(PART_BYTES, self._size - begin)
        if self._closing or registrar.refused or size <= 0 or size > registrar.left:
            return
        if code := registrar.copies.register(self._address + begin, size):
            registrar.refused = code
            logger.warning("xpyd: CUDA does not take another process's memory for reading (error %d): its driver copies "
                           "what comes within this host", code)
            return
        registrar.left -= size
        self._registered = begin + size
        registrar.tell(self._register)

    def _let_go(self, closed: Callable[[], None]) -> None:
        for begin in range(0, self._registered, PART_BYTES):
            if code := self._registrar.copies.unregister(self._address + begin):
                logger.warning("xpyd: CUDA does not let go of a mapping (error %d)", code)
        self._registrar.left += self._registered
        self._registered = 0
        self._tensor = None
        closed()
