"""NIXL and Mooncake's transfer engine, by the recipes of their documents.

nixl_tcp: prefill writes, UCX over TCP alone; nixl_read_tcp: decode reads, with segments of 256 KiB, as our link over NIXL
does; nixl_host: its best way within a host. Without its progress thread, which would take a core.
"""

from __future__ import annotations

import base64
import os
from typing import Any, Final

import numpy as np
from harness import Trigger
from peer import place

BATCH: Final = 1000
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def pieces(source: int, target: int, size: int, block: int) -> list[tuple[int, int]]:
    """Addresses of each block at its source and at its target."""
    return [(source + n * block, target + int(at) * block) for n, at in enumerate(place(size // block))]


class Nixl:
    """What both sides have."""

    def __init__(self, name: str, memory: Bytes) -> None:
        if name.endswith("_tcp"):
            os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
        self.reads = name == "nixl_read_tcp"
        if self.reads:
            os.environ |= {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
        from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]

        self.memory, self.trigger = memory, Trigger()
        self.handles: dict[int, Any] = {}
        self.agent = nixl_agent(self.role, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self.agent.register_memory([(memory.ctypes.data, len(memory), 0, "")], "DRAM")

    role = ""
    peer: Any

    def prepare(self, way: str, block: int, both: list[tuple[int, int]]) -> None:
        """A transfer between (ours, theirs) of each block."""
        if block not in self.handles:
            local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", [(a, block, 0) for a, _ in both], "DRAM")
            remote = self.agent.prep_xfer_dlist(self.peer, [(b, block, 0) for _, b in both], "DRAM")
            every = list(range(len(both)))
            self.handles[block] = self.agent.make_prepped_xfer(way, local, every, remote, every, b"done")

    def transfer(self, block: int) -> None:
        state = self.agent.transfer(self.handles[block])
        while state != "DONE":
            if state == "ERR":
                raise RuntimeError("nixl: transfer failed")
            state = self.agent.check_xfer_state(self.handles[block])

    def hello(self) -> dict[str, Any]:
        port = self.trigger.listen() if self.role == "p" else 0
        return {"metadata": base64.b64encode(self.agent.get_agent_metadata()).decode(), "base": self.memory.ctypes.data,
                "trigger": port}


class NixlPrefill(Nixl):
    role = "p"

    def meet(self, other: dict[str, Any]) -> None:
        self.trigger.accept()
        self.base = other["base"]
        self.peer = self.agent.add_remote_agent(base64.b64decode(other["metadata"]))

    def ready(self, block: int, *, cover: int) -> None:
        if not self.reads:
            self.prepare("WRITE", block, pieces(self.memory.ctypes.data, self.base, len(self.memory), block))

    def move(self, block: int) -> None:
        self.trigger.wait()
        if self.reads:
            while not self.agent.get_new_notifs():
                pass
        else:
            self.transfer(block)


class NixlDecode(Nixl):
    role = "d"

    def meet(self, other: dict[str, Any]) -> None:
        self.base = other["base"]
        self.peer = self.agent.add_remote_agent(base64.b64decode(other["metadata"]))
        self.trigger.connect(other["trigger"])

    def ready(self, block: int, *, cover: int) -> None:
        if self.reads:
            both = pieces(self.base, self.memory.ctypes.data, len(self.memory), block)
            self.prepare("READ", block, [(ours, theirs) for theirs, ours in both])

    def move(self, block: int) -> None:
        self.trigger.send()
        if self.reads:
            self.transfer(block)
            self.agent.check_xfer_state(self.handles[block])
            return
        while not self.agent.get_new_notifs():
            pass


class Mooncake:
    role = ""

    def __init__(self, _: str, memory: Bytes) -> None:
        from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

        self.memory, self.trigger, self.engine = memory, Trigger(), TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("mooncake: cannot begin")
        if self.engine.register_memory(memory.ctypes.data, len(memory)):
            raise RuntimeError("mooncake: cannot register memory")

    def hello(self) -> dict[str, Any]:
        port = self.trigger.listen() if self.role == "p" else 0
        return {"port": self.engine.get_rpc_port(), "base": self.memory.ctypes.data, "trigger": port}


class MooncakePrefill(Mooncake):
    role = "p"

    def meet(self, other: dict[str, Any]) -> None:
        self.trigger.accept()
        self.peer, self.base = f"127.0.0.1:{other['port']}", other["base"]

    def ready(self, block: int, *, cover: int) -> None:
        self.both = pieces(self.memory.ctypes.data, self.base, len(self.memory), block)

    def move(self, block: int) -> None:
        self.trigger.wait()
        for start in range(0, len(self.both), BATCH):
            part = self.both[start:start + BATCH]
            sources, targets = [a for a, _ in part], [b for _, b in part]
            if self.engine.batch_transfer_sync_write(self.peer, sources, targets, [block] * len(part)):
                raise RuntimeError("mooncake: transfer failed")
        self.trigger.send()


class MooncakeDecode(Mooncake):
    role = "d"

    def meet(self, other: dict[str, Any]) -> None:
        self.trigger.connect(other["trigger"])

    def ready(self, block: int, *, cover: int) -> None:
        del block, cover

    def move(self, block: int) -> None:
        self.trigger.send()
        self.trigger.wait()


def Prefill(name: str, memory: Bytes) -> NixlPrefill | MooncakePrefill:  # noqa: N802  # as the classes of the others
    return MooncakePrefill(name, memory) if name == "mooncake_tcp" else NixlPrefill(name, memory)


def Decode(name: str, memory: Bytes) -> NixlDecode | MooncakeDecode:  # noqa: N802  # likewise
    return MooncakeDecode(name, memory) if name == "mooncake_tcp" else NixlDecode(name, memory)
