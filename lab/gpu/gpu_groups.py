"""One of two processes whose NCCL groups the checks open and close: a communicator thread, groups to send and to receive.

It obeys lines on stdin and answers with lines. The two tell each other what a session tells (``kv.md``, links between
GPUs): a group's id, that a piece is offered, that it is being received.

    python lab/gpu/gpu_groups.py NAME DEVICE FD         started by ``gpu_group_checks``; FD: a socket to the other one
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from xpyd_sidecar.kv.groups import Way
from xpyd_sidecar.transport.nccl.driver import Driver, Piece, load
from xpyd_sidecar.transport.nccl.thread import FLIGHT, NcclLimits, NcclThread

PIECE = 1 << 20
SLOTS = 8
GROUPS = 16
LIMITS = NcclLimits(groups=GROUPS, open_s=20.0, move_s=20.0, idle_s=600.0, hold_s=20.0)
"""Longer than the checks wait: what they wait for in vain is not ended by a deadline first."""
Order = dict[str, Any]
Answer = dict[str, Any]


class Half:
    """A group's half in this process."""

    def __init__(self, end: End, name: str, way: Way) -> None:
        self.end, self.name, self.way = end, name, way
        self.number = 0
        self.open = self.over_ = False
        self.reason = ""
        self.posts = self.count = self.wrong = 0
        """``count``: pieces that have moved."""

    def post(self, call: Callable[[], None]) -> None:
        """On the communicator thread itself."""
        with self.end.changed:
            call()
            self.end.changed.notify_all()

    def begun(self, uid: bytes) -> None:
        """The peer may join."""
        if self.way is Way.SEND:
            self.end.tell({"join": self.name, "uid": uid.hex()})

    def opened(self, number: int) -> None:  # noqa: ARG002  # it has one group
        """Both have joined."""
        self.open = True

    def posted(self, piece: Piece) -> None:
        """The peer may send, unless nobody has offered this."""
        self.posts += 1
        if piece.tag:
            self.end.tell({"posted": self.name})

    def moved(self, piece: Piece) -> None:
        """A piece is done."""
        self.count += 1
        if piece.data is None:
            self.wrong += not piece.intact
            self.end.slots.append(piece.slot)
            self.end.pump()

    def lost(self, number: int, reason: str, *, busy: bool) -> None:  # noqa: ARG002  # as above
        """It does no more. ``busy``: a piece was under way, which is meant here."""
        self.reason = f"{reason}{', with a piece under way' if busy else ''}"

    def over(self, pieces: tuple[Piece, ...]) -> None:
        """Its memory is given back."""
        self.end.slots += [piece.slot for piece in pieces if piece.data is None]
        self.end.pump()
        self.over_ = True


class End:
    """The process."""

    def __init__(self, name: str, driver: Driver, tell: Callable[[Order], None]) -> None:
        self.name = name
        self.tell = tell
        self.changed = threading.Condition(threading.RLock())
        self.halves: dict[str, Half] = {}
        self.slots: list[Any] = [driver.device.empty(driver.slot_bytes) for _ in range(SLOTS)]
        self._data = memoryview(driver.device.host(driver.piece).fill_(0x5A).numpy())
        driver.device.settle()
        self._waiting: deque[tuple[Half, bool]] = deque()
        self._made = 0
        self.hub = NcclThread(driver, LIMITS)

    def heard(self, order: Order) -> None:
        """The other one says something."""
        with self.changed:
            if "join" in order:
                self._half(order["join"], Way.RECEIVE, bytes.fromhex(order["uid"]))
            elif "offer" in order:
                self._receive(self.halves[order["offer"]], offered=True)
            else:
                half = self.halves[order["posted"]]
                self.hub.move(half.number, Piece(len(self._data), True, self._data), half)

    def _half(self, name: str, way: Way, uid: bytes | None = None) -> None:
        half = self.halves[name] = Half(self, name, way)
        half.number = self.hub.join(half, way, uid)

    def _receive(self, half: Half, *, offered: bool) -> None:
        self._waiting.append((half, offered))
        self.pump()

    def pump(self) -> None:
        """Receive what was offered, as far as there are slots."""
        while self._waiting and self.slots:
            half, offered = self._waiting.popleft()
            self.hub.move(half.number, Piece(len(self._data), True, slot=self.slots.pop(), tag=offered), half)

    def wait(self, condition: Callable[[], object], seconds: float) -> bool:
        """Whether something comes true in time."""
        with self.changed:
            return bool(self.changed.wait_for(condition, seconds))

    def obey(self, order: Order) -> Answer:
        """Do what a check asks for."""
        if "make" in order:
            names = [f"{self.name}{self._made + n}" for n in range(order["make"])]
            self._made += len(names)
            with self.changed:
                for name in names:
                    self._half(name, Way.SEND)
            return {"names": names}
        if "send" in order:
            for name in order["send"]:
                for _ in range(order["pieces"]):
                    self.tell({"offer": name})
            return {}
        if "usage" in order:
            free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
            return {"groups": self.hub.usage.groups, "used": total - free, "slots": len(self.slots),
                    "kits": sum(len(kits) for kits in self.hub._kits.values()) - 2 * FLIGHT}
        return self._on_groups(order)

    def _on_groups(self, order: Order) -> Answer:
        names = order["of"]
        until = time.monotonic() + order.get("s", 0.0)
        self.wait(lambda: all(name in self.halves for name in names), order.get("s", 0.0))
        halves = [self.halves[name] for name in names if name in self.halves]
        if order["do"] == "spin":
            with self.changed:
                before = [half.posts for half in halves]
                for half in halves:
                    self._receive(half, offered=False)
            well = self.wait(lambda: all(half.posts > had for half, had in zip(halves, before, strict=True)), order["s"])
        elif order["do"] == "close":
            for half in halves:
                self.hub.leave(half.number, "closed by the check")
            well = True
        else:
            conditions: dict[str, Callable[[Half], bool]] = {
                "open": lambda half: half.open, "over": lambda half: half.over_,
                "moved": lambda half: half.count >= order["pieces"] or bool(half.reason)}
            asked = conditions[order["do"]]
            well = self.wait(lambda: all(map(asked, halves)), max(0.0, until - time.monotonic()))
        said = {"well": well and len(halves) == len(names), "wrong": sum(half.wrong for half in halves),
                "count": [half.count for half in halves], "lost": [half.reason for half in halves if half.reason]}
        if order["do"] == "over":
            for name in names:
                self.halves.pop(name, None)
        return said


def main() -> None:
    """One of the two."""
    name, device, fd = sys.argv[1:]
    place = torch.device(device)
    torch.cuda.set_device(place)
    driver, _, reason = load(place, ctas=4, piece=PIECE, groups=GROUPS, flight=FLIGHT)
    if driver is None:
        print(json.dumps({"why": reason}), flush=True)
        return
    with socket.socket(fileno=int(fd)) as sock, sock.makefile("r") as lines:
        end = End(name, driver, lambda order: sock.sendall((json.dumps(order) + "\n").encode()))

        def hear() -> None:
            for line in lines:
                end.heard(json.loads(line))

        threading.Thread(target=hear, daemon=True).start()
        print(json.dumps({}), flush=True)
        for line in sys.stdin:
            print(json.dumps(end.obey(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
