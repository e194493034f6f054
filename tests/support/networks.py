"""Networks of processes of a test's own, each with a link to one bridge, as pods have (root).

    with Networks(3) as networks:
        networks[0].address                     10.78.0.1
        networks[0].enter()                     this process, which has one thread, and what it starts, is there from now on
        networks[1].cut(), .mend()              packets from and to it are lost without a word, or arrive again
        networks[1].listen()                    a socket that is given whatever crosses its link
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from types import TracebackType
from typing import NamedTuple, Self

NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of setns(2)."""
EVERYTHING = 3
"""ETH_P_ALL, of packet(7)."""
RECEIVE_BUFFER = 33
"""SO_RCVBUFFORCE, of socket(7)."""


class Network(NamedTuple):
    """One of them."""

    name: str
    """Also of its link's end at the bridge."""
    bridge: str
    address: str
    bits: int = 24
    """Of the address, those that all networks at the bridge share."""

    def make(self) -> None:
        ip("netns", "add", self.name)
        ip("link", "add", self.name, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("link", "set", self.name, "master", self.bridge, "up")
        ip("-n", self.name, "addr", "add", f"{self.address}/{self.bits}", "dev", "eth0")
        for link in ("lo", "eth0"):
            ip("-n", self.name, "link", "set", link, "up")

    def remove(self) -> None:
        ip("netns", "del", self.name, check=False)
        ip("link", "del", self.name, check=False)  # it goes with the network at some time

    def enter(self) -> None:
        with open(f"/run/netns/{self.name}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"network {self.name} cannot be entered")

    def cut(self) -> None:
        ip("link", "set", self.name, "nomaster")

    def mend(self) -> None:
        ip("link", "set", self.name, "master", self.bridge)

    def listen(self) -> socket.socket:
        heard = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERYTHING))
        heard.setsockopt(socket.SOL_SOCKET, RECEIVE_BUFFER, 64 << 20)
        heard.bind((self.name, 0))
        heard.setblocking(False)
        return heard


class Networks(tuple[Network, ...]):
    """So many; names are of this process, so that several tests can have some at once."""

    def __new__(cls, count: int) -> Self:
        bridge = f"xb{os.getpid()}"
        names = [f"{bridge}-{index}" for index in range(count)]
        return super().__new__(cls, (Network(name, bridge, f"10.78.0.{index + 1}") for index, name in enumerate(names)))

    def __enter__(self) -> Self:
        ip("link", "add", self[0].bridge, "type", "bridge")
        ip("link", "set", self[0].bridge, "up")
        for each in self:
            each.make()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for each in self:
            each.remove()
        ip("link", "del", self[0].bridge, check=False)


def ip(*arguments: str, check: bool = True) -> str:
    """What ip(8) says."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout
