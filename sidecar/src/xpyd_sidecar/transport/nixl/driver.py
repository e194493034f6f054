"""NIXL as this package uses it: an agent that is read from, and one that reads. The only module that knows its interface.

A transfer that was begun cannot be cancelled (``release_xfer_handle`` says nothing and bytes go on to come). The end of the
agent that reads is what stops it: after ``end`` nothing is written. So the agent that is read from is another one, which
lives on.

Why prefill's memory is never unmapped while its agent lives: over TCP and shared memory the process that is read from dies
of that (docs/decisions/0038).

An agent has no lock of its own: each is used on one thread. Nothing here waits for a peer; a call may take as long as the
bytes that it moves.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash

from xpyd_sidecar.kv.session_bodies import NixlMemory

SUM_BYTES: Final = 16
"""Of the sum (xxh3, 128 bits) that a description ends with."""
BACKEND: Final = "UCX"
SEGMENTS: Final = "TCP_TX_SEG_SIZE=256k,TCP_RX_SEG_SIZE=256k"
"""Reads over TCP are three to four times as fast with these as with UCX's own 8 KiB; unused with RDMA."""
RDMA_ONLY: Final = "TLS=^tcp"
"""UCX would take TCP where it finds nothing else, and does not say what it has taken: so TCP is out."""
CHOICE: Final = "UCX_TLS"
"""UCX's own setting. Whoever sets it has chosen what blocks travel over, and needs no RDMA device for it."""
LEVEL: Final = "NIXL_LOG_LEVEL"
HOST: Final = "DRAM"


class LandingMemory(NamedTuple):
    """Memory of this process that reads fill, registered with the agent that reads."""

    address: int
    size: int
    kind: str = HOST
    """NIXL's name of its type."""
    device: int = 0
    """Which one, where it is a device's."""


class ReadSpan(NamedTuple):
    """``size`` bytes that are read from address ``source`` of a peer to address ``into`` here."""

    source: int
    into: int
    size: int


class ReadHandle:
    """A read: prepared, and begun once or again and again, each time after it is done."""

    def __init__(self, made: Any) -> None:
        self.made = made
        self.done = False


class NixlTarget:
    """The agent whose memory others read. It knows none of them."""

    def __init__(self, agent: Any, name: str) -> None:
        self.name = name
        self._agent: Any = agent

    def register(self, regions: Sequence[tuple[int, int]]) -> bytes:
        """Let others read memory (address, bytes). What they need for that: NIXL's description, and its sum."""
        self._agent.register_memory([(address, size, 0, "") for address, size in regions], HOST)
        told = bytes(self._agent.get_agent_metadata())
        return told + xxhash.xxh3_128_digest(told)

    def poll(self) -> None:
        """Serve those who read: without RDMA bytes move only in here."""
        self._agent.get_new_notifs()

    def end(self) -> None:
        """Nothing is read after this."""
        self._agent = None


class NixlReader:
    """The agent that reads the memory of peers."""

    def __init__(self, agent: Any, regions: Sequence[LandingMemory]) -> None:
        """``regions``: what reads may fill."""
        self._agent: Any = agent
        self._lives: list[weakref.ref[Any]] = []
        """The agent, after its end: what still refers to it keeps it alive."""
        for one in regions:
            agent.register_memory([(one.address, one.size, one.device, "")], one.kind)

    def reach(self, memory: NixlMemory) -> str:
        """Know a peer, so that its memory can be read. The name that NIXL knows it by: whose description it is.

        Raises:
            ValueError: the description is not what a target has made. NIXL never sees that: one bit can end the process.
        """
        told, its_sum = memory.metadata[:-SUM_BYTES], memory.metadata[-SUM_BYTES:]
        if xxhash.xxh3_128_digest(told) != its_sum:
            raise ValueError("NIXL's description is damaged")
        found = self._agent.add_remote_agent(told)
        return found.decode() if isinstance(found, bytes) else str(found)

    def leave(self, name: str) -> None:
        """Know a peer no more. Nothing of it is under way."""
        self._agent.remove_remote_agent(name)

    def prepare(self, name: str, spans: Sequence[ReadSpan], into: LandingMemory) -> ReadHandle:
        """A read of a peer's memory into a region, which is not begun."""
        agent, size = self._agent, [span.size for span in spans]
        remote = _rows([span.source for span in spans], size, 0)
        local = _rows([span.into for span in spans], size, into.device)
        return ReadHandle(agent.initialize_xfer("READ", agent.get_xfer_descs(local, into.kind),
                                                agent.get_xfer_descs(remote, HOST), name))

    def begin(self, handle: ReadHandle) -> None:
        """Begin a read, or begin one again that is done."""
        handle.done = _moved(self._agent.transfer(handle.made))

    def is_done(self, handle: ReadHandle) -> bool:
        """Whether all of it has come.

        Raises:
            OSError, or NIXL's own, which have no common root: it never will.
        """
        if not handle.done:
            handle.done = _moved(self._agent.check_xfer_state(handle.made))
        return handle.done

    def poll(self) -> None:
        """Go on with what peers have said, and with the end of connections."""
        self._agent.get_new_notifs()

    def end(self) -> None:
        """Nothing is written after this, whatever was under way. Handles of its reads must be gone.

        Raises:
            RuntimeError: something still refers to the agent, so it lives on, and with it all that it has begun. It may not
                do so later: to be tried again.
        """
        if self._agent is not None:
            self._lives = [weakref.ref(self._agent), weakref.ref(self._agent.agent)]
            self._agent = None
        if any(one() is not None for one in self._lives):
            raise RuntimeError("something refers to an agent of NIXL's that was to end")


def _rows(addresses: Sequence[int], sizes: Sequence[int], device: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """As NIXL takes descriptors."""
    rows = np.full((len(addresses), 3), device, np.uint64)
    rows[:, 0], rows[:, 1] = addresses, sizes
    return rows


def _moved(state: str) -> bool:
    if state not in {"DONE", "PROC"}:
        raise OSError(f"NIXL: a read has ended with {state}")
    return state == "DONE"


class NixlDriver:
    """Makes agents of one process."""

    def __init__(self, binding: Any, version: str, parameters: Mapping[str, str]) -> None:
        self.version = version
        self._binding = binding
        self._parameters = dict(parameters)

    def target(self) -> NixlTarget:
        """The one that is read from."""
        name = f"xpyd-{secrets.token_hex(16)}"
        return NixlTarget(self._agent(name), name)

    def reader(self, regions: Sequence[LandingMemory]) -> NixlReader:
        """One that reads, into these regions."""
        return NixlReader(self._agent(f"xpyd-{secrets.token_hex(16)}"), regions)

    def _agent(self, name: str) -> Any:
        config = self._binding.nixl_agent_config(enable_prog_thread=False, backends=[])
        agent = self._binding.nixl_agent(name, config)
        agent.create_backend(BACKEND, self._parameters)
        return agent


def load(environ: Mapping[str, str] = os.environ) -> tuple[NixlDriver | None, str]:
    """A driver, or why there is none. It has made no agent yet."""
    try:
        binding = importlib.import_module("nixl._api")
    except (ImportError, OSError) as error:
        return None, f"the package nixl cannot be loaded: {error}"
    if not environ.get(LEVEL):
        logging.getLogger("nixl").setLevel(logging.WARNING)  # else it tells of each agent on standard output
    chosen = SEGMENTS if environ.get(CHOICE) else f"{RDMA_ONLY},{SEGMENTS}"
    return NixlDriver(binding, version(), {"engine_config": chosen}), ""


def version() -> str:
    """The version of the NIXL package, whatever it is built for."""
    metadata = importlib.import_module("importlib.metadata")
    for name in ("nixl", "nixl-cu13", "nixl-cu12"):
        try:
            return str(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    return "unknown"
