"""Members of `xpyd up` in networks of their own, as pods are: what each has is a link to a bridge, which can be cut.

    with Bridge(folder) as bridge:                      root
        xpyd up --host 10.77.0.1 --python <bridge.python> …
        bridge.cut(3, 1)                                member 1 of t-e3 hears nobody any more, and nobody hears it
        bridge.mend(3, 1)

    10.77.0.1 xtbr ── router, supervisor, instances of one member
               ├───── xt3-0 10.77.4.1: agent, launcher and engine of the leader of t-e3
               └───── xt3-1 10.77.4.2: those of its other member

The supervisor knows nothing of it: what it takes for the interpreter moves a member's process into its network, with a
/dev/shm of its own, and tells it the address that it has there instead of the host's.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn, Self

from networks import Network, ip

HOST = "10.77.0.1"
"""Of the bridge, and so of everything that has no network of its own."""
BRIDGE = "xtbr"
INSIDE = "XPYD_TEST_INSIDE"
"""In the environment of what was moved already."""
FOLDER = re.compile(r"e(\d+)(?:-(\d+))?")
"""Run folders of instances, by ordinal and index."""


class Place(NamedTuple):
    """A member's network."""

    ordinal: int
    """Of its instance."""
    member: int
    """Its index in it."""

    @property
    def name(self) -> str:
        """Of the network, and of its link's end at the bridge."""
        return f"xt{self.ordinal}-{self.member}"

    @property
    def address(self) -> str:
        """Within it."""
        return f"10.77.{self.ordinal + 1}.{self.member + 1}"

    @property
    def network(self) -> Network:
        return Network(self.name, BRIDGE, self.address, 16)

    def make(self, lock: Path) -> None:
        """Make it where it is not there; engine and agent come at the same time."""
        with open(lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if self.name in ip("netns", "list").split():
                return
            self.network.make()


class Bridge:
    """The bridge; all networks go with it."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        """``python``: the interpreter of engines and agents, or what stands in for it."""
        self.python = str(folder / "python-apart")
        ours = f"{sys.executable} {Path(__file__)} {folder / 'lock'} {python}"
        Path(self.python).write_text(f"#!/bin/sh\nexec {ours} \"$@\"\n")
        os.chmod(self.python, 0o700)

    def __enter__(self) -> Self:
        self._remove()
        ip("link", "add", BRIDGE, "address", "02:77:00:00:00:01", "type", "bridge")
        ip("addr", "add", f"{HOST}/16", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def cut(self, ordinal: int, index: int) -> None:
        """Packets from and to a member are lost without a word."""
        Place(ordinal, index).network.cut()

    def mend(self, ordinal: int, index: int) -> None:
        """They arrive again."""
        Place(ordinal, index).network.mend()

    @staticmethod
    def _remove() -> None:
        for line in ip("-o", "link", "show").splitlines():  # before the networks, with which they go at some time
            name = line.split(": ")[1].partition("@")[0]
            if name == BRIDGE or re.fullmatch(r"xt\d+-\d+", name):
                ip("link", "del", name)
        for line in ip("netns", "list").splitlines():
            if re.fullmatch(r"xt\d+-\d+", name := line.split()[0]):
                ip("netns", "del", name)


def _place(run_dir: str) -> Place | None:
    found = FOLDER.fullmatch(Path(run_dir).name)
    return Place(int(found[1]), int(found[2] or 0)) if found is not None else None


def _apart(arguments: list[str]) -> tuple[Place, list[str]] | None:
    """A member's network and its process's arguments there; None: it is no member of several."""
    if arguments[:2] == ["-m", "xpyd_sidecar.member"]:
        place = _place(os.environ["XPYD_RUN_DIR"])
        assert place is not None, os.environ["XPYD_RUN_DIR"]
        os.environ.update(XPYD_HOST=place.address, VLLM_HOST_IP=place.address, GLOO_SOCKET_IFNAME="eth0")
        return place, [place.address if each == HOST else each for each in arguments]
    if arguments[:3] != ["-m", "xpyd_sidecar", "--config"]:
        return None
    config = json.loads(Path(arguments[3]).read_text())
    place, agent = _place(config["run_dir"]), config["agent"]
    if place is None or not agent.get("group"):
        return None
    agent["advertise_host"] = agent["group"]["host"] = place.address
    for section, field, at in ((agent, "engine", place), (agent, "listen", place),
                               (agent["group"], "leader", place._replace(member=0))):
        if section.get(field):
            section[field] = section[field].replace(HOST, at.address)
    moved = Path(config["run_dir"]) / "agent-apart.json"
    moved.write_text(json.dumps(config))
    moved.chmod(0o600)
    return place, [*arguments[:3], str(moved)]


def main() -> NoReturn:
    """In the place of the interpreter."""
    lock, python, *arguments = sys.argv[1:]
    found = _apart(arguments) if INSIDE not in os.environ else None
    if found is None:
        os.execv(python, [python, *arguments])
    place, arguments = found
    place.make(Path(lock))
    os.environ[INSIDE] = "1"
    own_memory = 'mount -t tmpfs xpyd-shm /dev/shm && exec "$@"'
    os.execvp("ip", ["ip", "netns", "exec", place.name, "sh", "-c", own_memory, "sh", python, *arguments])


if __name__ == "__main__":
    main()
