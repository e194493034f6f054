"""NIXL as this package uses it: an agent that is read from, agents that read. The only module that knows its interface.

Why one agent for each session of decode's: a transfer that was begun cannot be cancelled (``release_xfer_handle`` says
nothing and bytes go on to come), and the end of the agent that reads is what stops it. After ``end`` nothing is written.

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
from collections.abc import Mapping
from typing import Any, Final

import xxhash

from xpyd_sidecar.kv import bodies

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
KIND: Final = "DRAM"


class ReadHandle:
    """A read that was begun."""

    def __init__(self, made: Any, *, done: bool) -> None:
        self.made = made
        self.done = done


class NixlTarget:
    """The agent whose memory others read. It knows none of them."""

    def __init__(self, agent: Any, name: str) -> None:
        self.name = name
        self._agent: Any = agent

    def register(self, regions: list[tuple[int, int]]) -> bytes:
        """Let others read memory (address, bytes). What they need for that: NIXL's description, and its sum."""
        self._agent.register_memory([(address, size, 0, "") for address, size in regions], KIND)
        told = bytes(self._agent.get_agent_metadata())
        return told + xxhash.xxh3_128_digest(told)

    def poll(self) -> None:
        """Serve those who read: without RDMA bytes move only in here."""
        self._agent.get_new_notifs()

    def end(self) -> None:
        """Nothing is read after this."""
        self._agent = None


class NixlSource:
    """An agent that reads the memory of one peer, into memory of one session."""

    def __init__(self, agent: Any, memory: bodies.NixlMemory, address: int, size: int) -> None:
        """Reads go to ``size`` bytes from ``address`` on.

        Raises:
            ValueError: the description is not what a target has made. NIXL never sees that: one bit can end the process.
        """
        self._agent: Any = agent
        told, its_sum = memory.metadata[:-SUM_BYTES], memory.metadata[-SUM_BYTES:]
        if xxhash.xxh3_128_digest(told) != its_sum:
            raise ValueError("NIXL's description is damaged")
        agent.register_memory([(address, size, 0, "")], KIND)
        found = agent.add_remote_agent(told)
        self._peer = found.decode() if isinstance(found, bytes) else str(found)
        if self._peer != memory.agent:
            raise ValueError("NIXL's description is of another agent")

    def read(self, at: int, address: int, size: int) -> ReadHandle:
        """Begin to read the peer's bytes from ``address`` on to ``at``."""
        agent = self._agent
        local = agent.get_xfer_descs([(at, size, 0)], KIND)
        remote = agent.get_xfer_descs([(address, size, 0)], KIND)
        made = agent.initialize_xfer("READ", local, remote, self._peer)
        return ReadHandle(made, done=self._moved(agent.transfer(made)))

    def done(self, handle: ReadHandle) -> bool:
        """Whether all of it has come."""
        if not handle.done:
            handle.done = self._moved(self._agent.check_xfer_state(handle.made))
        if handle.done and handle.made is not None:
            made, handle.made = handle.made, None
            self._agent.release_xfer_handle(made)
        return handle.done

    def end(self) -> None:
        """Nothing is written after this, whatever was under way. Handles of its reads must be gone.

        Raises:
            RuntimeError: something still refers to the agent, so it lives on, and with it all that it has begun.
        """
        if self._agent is None:
            return
        lives = [weakref.ref(self._agent), weakref.ref(self._agent.agent)]
        self._agent = None
        if any(one() is not None for one in lives):
            raise RuntimeError("something refers to an agent of NIXL's that was to end")

    @staticmethod
    def _moved(state: str) -> bool:
        if state not in {"DONE", "PROC"}:
            raise OSError(f"NIXL: a read has ended with {state}")
        return bool(state == "DONE")


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

    def reader(self, memory: bodies.NixlMemory, address: int, size: int) -> NixlSource:
        """One that reads."""
        return NixlSource(self._agent(f"xpyd-{secrets.token_hex(16)}"), memory, address, size)

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
    """Of the package, whatever it is built for."""
    metadata = importlib.import_module("importlib.metadata")
    for name in ("nixl", "nixl-cu13", "nixl-cu12"):
        try:
            return str(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    return "unknown"
