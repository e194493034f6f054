"""One of two processes whose NCCL groups the checks open and close: a communicator thread, groups to send and to receive.

It obeys lines on stdin and answers with lines. The two tell each other what a session tells (``kv.md``, the link nccl): a
group's id, and that a message is being received; and, since decode here does as it is told, that one is to be fetched.

    python -m lab.gpu.group_ends NAME DEVICE FD         started by ``group_checks``; FD: a socket to the other one
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

from lab.gpu.children import Answer, Order, say
from xpyd_sidecar.kv.groups import Way
from xpyd_sidecar.transport.nccl.driver import Driver, Message, load
from xpyd_sidecar.transport.nccl.thread import FLIGHT, NcclLimits, NcclThread

PIECE = 1 << 20
SLOTS = 8
"""To receive into, of a group's messages in turn."""
PATTERNS = 4
GROUPS = 16
LIMITS = NcclLimits(groups=GROUPS, open_s=20.0, move_s=20.0, idle_s=600.0, hold_s=20.0)
"""Longer than the checks wait: what they wait for in vain is not ended by a deadline first."""


class Half:
    """A group's half in this process."""

    def __init__(self, end: End, name: str, way: Way) -> None:
        self.end, self.name, self.way = end, name, way
        self.number = 0
        self.open = self.over_ = False
        self.reason = ""
        self.posts = self.sent = self.count = self.wrong = 0
        """``count``: messages that have moved; ``wrong``: that have come with other bytes than were sent."""

    def post(self, call: Callable[[], None]) -> None:
        """On the communicator thread itself."""
        with self.end.changed:
            call()
            self.end.changed.notify_all()

    def on_group_begun(self, number: int, uid: bytes) -> None:  # noqa: ARG002  # it has one group
        """The peer may join."""
        if self.way is Way.SEND:
            self.end.tell({"join": self.name, "uid": uid.hex()})

    def on_group_open(self, number: int) -> None:  # noqa: ARG002  # it has one group
        """Both have joined."""
        self.open = True

    def on_posted(self, message: Message) -> None:
        """The peer may send, unless this is received in vain."""
        self.posts += 1
        if message.tag:
            self.end.tell({"fetch": self.name})

    def on_moved(self, message: Message) -> None:
        """A message is done."""
        self.count += 1
        if self.way is Way.RECEIVE:
            assert message.memory is not None
            self.wrong += bool((message.memory.cpu() != self.count % PATTERNS).any())
            self.end.slots.append(message.memory)
            self.end.pump()

    def on_group_lost(self, number: int, reason: str) -> None:  # noqa: ARG002  # as above
        """It does no more. That a message was under way is meant here."""
        self.reason = f"{reason}{', with a message under way' if self.posts + self.sent > self.count else ''}"

    def on_released(self, messages: tuple[Message, ...]) -> None:
        """Its memory is given back."""
        self.end.slots += [message.memory for message in messages if self.way is Way.RECEIVE]
        self.end.pump()
        self.over_ = True


class End:
    """The process."""

    def __init__(self, name: str, driver: Driver, tell: Callable[[Order], None]) -> None:
        self.name = name
        self.tell = tell
        self.changed = threading.Condition(threading.RLock())
        self.halves: dict[str, Half] = {}
        self.slots: list[Any] = [driver.device.empty(driver.piece) for _ in range(SLOTS)]
        pinned = torch.cuda.is_available()
        self._data = [memoryview(torch.full((driver.piece,), one, dtype=torch.uint8, pin_memory=pinned).numpy())
                      for one in range(PATTERNS)]
        driver.device.settle()
        self._waiting: deque[tuple[Half, bool]] = deque()
        self._made = 0
        self.hub = NcclThread(driver, LIMITS)

    def heard(self, order: Order) -> None:
        """The other one says something."""
        with self.changed:
            if "join" in order:
                self._half(order["join"], Way.RECEIVE, bytes.fromhex(order["uid"]))
            elif "receive" in order:
                self._receive(self.halves[order["receive"]], sent=True)
            else:
                half = self.halves[order["fetch"]]
                half.sent += 1
                data = self._data[half.sent % PATTERNS]
                self.hub.move(half.number, Message(len(data), spans=[(0, data)]), half)

    def _half(self, name: str, way: Way, uid: bytes | None = None) -> None:
        half = self.halves[name] = Half(self, name, way)
        half.number = self.hub.join(half, way, uid)

    def _receive(self, half: Half, *, sent: bool) -> None:
        """``sent``: the other one is told to send it."""
        self._waiting.append((half, sent))
        self.pump()

    def pump(self) -> None:
        """Receive what is to be received, as far as there are slots."""
        while self._waiting and self.slots:
            half, sent = self._waiting.popleft()
            slot = self.slots.pop()
            self.hub.move(half.number, Message(len(slot), slot, tag=sent), half)

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
                for _ in range(order["messages"]):
                    self.tell({"receive": name})
            return {}
        if "usage" in order:
            free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
            return {"groups": self.hub.usage.groups, "used": total - free, "slots to receive into": len(self.slots),
                    "slots to send from": len(self.hub._slots)}
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
                    self._receive(half, sent=False)
            well = self.wait(lambda: all(half.posts > had for half, had in zip(halves, before, strict=True)), order["s"])
        elif order["do"] == "close":
            for half in halves:
                self.hub.leave(half.number, "closed by the check")
            well = True
        else:
            conditions: dict[str, Callable[[Half], bool]] = {
                "open": lambda half: half.open, "over": lambda half: half.over_,
                "moved": lambda half: half.count >= order["messages"] or bool(half.reason)}
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
        say({"why": reason})
        return
    with socket.socket(fileno=int(fd)) as sock, sock.makefile("r") as lines:
        end = End(name, driver, lambda order: sock.sendall((json.dumps(order) + "\n").encode()))

        def hear() -> None:
            for line in lines:
                end.heard(json.loads(line))

        threading.Thread(target=hear, daemon=True).start()
        say({})
        for line in sys.stdin:
            say(end.obey(json.loads(line)))


if __name__ == "__main__":
    main()
