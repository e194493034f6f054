"""The memory of copies that decodes of this host may map, and what makes the store's memory of it. Needs torch."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

from xpyd_sidecar.engine import kv_cache
from xpyd_sidecar.engine.settings import FIELD
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.memory.staging import Chunk
from xpyd_sidecar.session.link_choice import LinkOptions
from xpyd_sidecar.transport.moves_plain import address_of
from xpyd_sidecar.transport.shm.prefill import SharedCopies

logger = logging.getLogger(__name__)



class StoreMemory:
    """Makes the memory of one rank's store, in shared memory where that is wanted and can be had.

    On a GPU it is registered with CUDA, so that copies from the device need not wait for the host.
    """

    def __init__(self, ways: LinkOptions, size: int, *, pinned: bool) -> None:
        """``size``: bytes; ``pinned``: copies come from a GPU.

        Raises:
            ConfigError: transport is shm, and this system has no memory that can be shared.
        """
        self.sharing: SharedCopies | None = None
        """None: not wanted, or not here."""
        self._pinned = pinned
        self._insists = ways.transport == "shm"
        self._registered = False
        if not ways.host:
            return
        try:
            self.sharing = SharedCopies(size)
        except OSError as error:
            self._do_without(f"{error.strerror}")

    def make(self, size: int) -> Chunk:
        """``size`` bytes; again: the same ones.

        Raises:
            ConfigError: transport is shm, and CUDA does not take memory that is shared.
        """
        if self.sharing is not None and self._pinned and not self._registered and (code := _register(self.sharing.copies)):
            self._do_without(f"CUDA does not register shared memory (error {code})")
        if self.sharing is None:
            return kv_cache.chunk(size, pinned=self._pinned)
        self._registered = self._pinned
        view = self.sharing.copies[:size]
        return Chunk(torch.frombuffer(view, dtype=torch.uint8), view)

    def emptied(self) -> None:
        """Nothing in the memory is needed: its pages go back to the system."""
        if self.sharing is None:
            return
        if self._registered and (code := _unregister(self.sharing.copies)):
            logger.warning("xpyd: the memory of copies stays taken: CUDA does not let go of it (error %d)", code)
            return
        self._registered = False
        try:
            self.sharing.empty()
        except OSError as error:
            logger.warning("xpyd: the memory of copies stays taken: %s", error.strerror)

    def _do_without(self, reason: str) -> None:
        if self._insists:
            raise ConfigError(f"{FIELD}.transport: shm cannot be used: {reason}; write kv.transport: auto")
        logger.warning("xpyd: decodes of this host cannot map the copies of this rank: %s", reason)
        self.sharing = None


def _register(view: memoryview) -> int:
    """Have CUDA lock memory, for all devices. 0, or CUDA's error."""
    code = int(_runtime().cudaHostRegister(address_of(view), len(view), 0))
    if code:
        with contextlib.suppress(RuntimeError):  # it stays CUDA's last error, which the next launch raises
            torch.zeros(1, device="cuda")
    return code


def _unregister(view: memoryview) -> int:
    return int(_runtime().cudaHostUnregister(address_of(view)))


def _runtime() -> Any:
    return torch.cuda.cudart()
