"""The memory of a rank's copies: where decodes of this host may map it, if that can be had. Needs torch."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from xpyd_sidecar.engine.settings import FIELD
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.memory.addresses import address_of
from xpyd_sidecar.memory.chunk import Chunk
from xpyd_sidecar.memory.node_binding import UNBOUND, NodeBinding
from xpyd_sidecar.memory.registration import host_memory, lock, unlock
from xpyd_sidecar.transport.shm.serve import SharedCopies, ShmServer

logger = logging.getLogger(__name__)


class StoreMemory:
    """Makes the memory of one rank's store. On a GPU it is registered with CUDA, so that copies from the device are direct.

    Shared memory has no pages before it is written, so there is always one to show to a session that begins. When the store
    is empty and not needed, it is given up, with the sessions that have mapped it, and the next store is another one.
    """

    def __init__(self, server: ShmServer | None, size: int, *, pinned: bool, insists: bool,
                 binding: NodeBinding = UNBOUND) -> None:
        """``server``: of the link ``shm``; None: it is not wanted. ``size``: bytes; ``pinned``: copies come from a GPU.

        ``insists``: there is no other link. ``binding``: says at which NUMA node the memory is.

        Raises:
            ConfigError: so it is, and this system has no memory that can be shared.
        """
        self.given_up: Callable[[], None] = lambda: None
        """Called when sessions must let go of the memory."""
        self._server = server
        self._size = size
        self._pinned = pinned
        self._insists = insists
        self._binding = binding
        self._registered = False
        self._share()

    def _share(self) -> None:
        """Have memory that can be mapped, if that is wanted."""
        if self._server is None:
            return
        try:
            self._server.copies = copies = SharedCopies(self._size)
        except OSError as error:
            self._do_without(f"{error.strerror}")
        else:
            self._binding.memory(copies.copies)

    @property
    def _shared(self) -> memoryview | None:
        return self._server.copies.copies if self._server is not None and self._server.copies is not None else None

    def make(self, size: int) -> Chunk:
        """``size`` bytes; again, until they are given up: the same ones.

        Raises:
            ConfigError: transport is shm, and CUDA does not take memory that is shared.
        """
        shared = self._shared
        if shared is not None and self._pinned and not self._registered and (code := self._lock(shared)):
            self._do_without(f"CUDA does not register shared memory (error {code})")
            shared = None
        if shared is None:
            return host_memory(size, pinned=self._pinned, binding=self._binding)
        self._registered = self._pinned
        view = shared[:size]
        return Chunk(torch.frombuffer(view, dtype=torch.uint8), view)

    def release(self) -> None:
        """Nothing in the memory is needed: it is given up, and its pages go back to the system with the last session."""
        shared = self._shared
        if shared is None:
            return
        if self._registered and (code := unlock(address_of(shared), len(shared))):
            logger.warning("xpyd: the memory of copies stays taken: CUDA does not let go of it (error %d)", code)
            return
        self._registered = False
        try:
            self._share()
        except ConfigError as error:  # sessions that begin are refused with it, until the next store
            logger.warning("xpyd: %s", error)
        self.given_up()

    def _lock(self, shared: memoryview) -> int:
        with self._binding.pages():
            return lock(address_of(shared), len(shared))

    def _do_without(self, reason: str) -> None:
        assert self._server is not None
        self._server.copies = None
        if self._insists:
            raise ConfigError(f"{FIELD}.transport: shm cannot be used: {reason}; write kv.transport: auto")
        logger.warning("xpyd: decodes of this host cannot map the copies of this rank: %s", reason)
