"""NCCL groups that end in the middle of a message, and groups that are made while their processes receive from each other.

Two processes, on two GPUs or on one (then NCCL is told that they are on different hosts, and moves through sockets).
"""

from __future__ import annotations

import socket
import time
from typing import Any, Protocol

import torch

from lab.gpu.children import Child, apart
from lab.gpu.findings import Figures, LeftOutError, NotHeldError, require

WAIT_S = 10.0
"""For what takes NCCL a moment."""
ABORTS, ABORTS_S = 1000, 40.0
FEWEST = 200
"""Aborts that the time must be enough for."""
TOGETHER = 3
"""Groups that end at once; with the one beside them they fill what may be received at once."""
LOOPS, LOOP_S = 20, 5.0
GROWTH = 64 << 20


class Asked(Protocol):
    """One of the two processes."""

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Have an order carried out."""


class Pair:
    """Both, for a check."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise LeftOutError("NCCL needs a GPU")
        count = torch.cuda.device_count()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self.ends = [Child("group_ends", name, where, str(sock.fileno()), pass_fds=[sock.fileno()],
                               environ=apart(name) if count == 1 else None)
                         for name, where, sock in (("a", str(device), ours),
                                                   ("b", "cuda:1" if count > 1 else str(device), theirs))]

    def __enter__(self) -> list[Child]:
        try:
            for end in self.ends:
                end.hear()
        except BaseException:
            self.__exit__()
            raise
        return self.ends

    def __exit__(self, *_: object) -> None:
        for end in self.ends:
            end.kill()


def aborts(device: torch.device) -> Figures:
    """A group that is received in ends in the middle, a thousand times, while another one carries messages."""
    with Pair(device) as (a, b):
        return abort_many(a, b)


def both_ways(device: torch.device) -> Figures:
    """Groups are closed and opened in both directions, while messages come from either side."""
    with Pair(device) as (a, b):
        return open_many(a, b)


def sure(said: dict[str, Any], what: str) -> dict[str, Any]:
    """What an end has waited for has come.

    Raises:
        NotHeldError: it has not.
    """
    if not said["well"] or said["wrong"] or said["lost"]:
        raise NotHeldError(f"{what}: {said}", {})
    return said


def opened(maker: Asked, other: Asked, count: int, seconds: float = WAIT_S) -> list[str]:
    """New groups in which ``maker`` sends, open on both sides."""
    names: list[str] = maker.ask({"make": count})["names"]
    for end in (maker, other):
        sure(end.ask({"do": "open", "of": names, "s": seconds}), f"groups {names} are not open in {seconds:g} s")
    return names


def carried(maker: Asked, other: Asked, names: list[str], messages: int) -> None:
    """Messages go through new groups: both ranks are connected."""
    maker.ask({"send": names, "messages": messages})
    for end in (other, maker):
        sure(end.ask({"do": "moved", "of": names, "messages": messages, "s": WAIT_S}),
             f"{messages} messages in groups {names}")


def closed(ends: list[Asked], names: list[str]) -> None:
    """Groups end on both sides, and all that they had is given back."""
    for end in ends:
        end.ask({"do": "close", "of": names})
    for end in ends:
        sure(end.ask({"do": "over", "of": names, "s": WAIT_S}) | {"wrong": 0, "lost": []}, f"the end of groups {names}")


def abort_many(a: Asked, b: Asked, most: int = ABORTS, seconds: float = ABORTS_S, fewest: int = FEWEST) -> Figures:
    """Groups in which ``b`` receives what nobody sends end on both sides."""
    beside = opened(a, b, 1)
    carried(a, b, beside, 1)
    before, began = [end.ask({"usage": True}) for end in (a, b)], time.monotonic()
    ended, messages = 0, 1
    while ended < most and time.monotonic() - began < seconds:
        names = opened(a, b, TOGETHER)
        carried(a, b, names, 1)
        a.ask({"send": beside, "messages": 6})
        messages += 6
        sure(b.ask({"do": "spin", "of": names, "s": WAIT_S}), "receives that nobody sends for")
        closed([b, a], names)
        sure(b.ask({"do": "moved", "of": beside, "messages": messages, "s": WAIT_S}), "messages beside groups that ended")
        ended += 2 * TOGETHER
    took = time.monotonic() - began
    after = [end.ask({"usage": True}) for end in (a, b)]
    pairs = list(zip(after, before, strict=True))
    grown = max(now["used"] - then["used"] for now, then in pairs)
    slots = "slots to send from", "slots to receive into"
    lacking = [name for name in slots if any(now[name] != then[name] for now, then in pairs)]
    figures = {"aborts": ended, "seconds": round(took, 1), "pieces_beside": messages, "grown_mib": round(grown / 2**20, 1)}
    return require(figures,
                f"{ended} aborts in {took:.0f} s, fewer than {fewest}" if ended < fewest else None,
                f"{', '.join(lacking)} did not come back" if lacking else None,
                f"{grown} bytes of GPU memory did not come back" if grown > GROWTH else None)


def open_many(a: Asked, b: Asked, loops: int = LOOPS, seconds: float = LOOP_S) -> Figures:
    """Groups are made in both directions while both receive."""
    beside = [opened(a, b, 1), opened(b, a, 1)]
    for (maker, other), names in zip(((a, b), (b, a)), beside, strict=True):
        carried(maker, other, names, 1)
    took = []
    for loop in range(loops):
        began = time.monotonic()
        messages = 1 + 8 * (loop + 1)
        for maker, names in zip((a, b), beside, strict=True):
            maker.ask({"send": names, "messages": 8})
        made = [end.ask({"make": 2})["names"] for end in (a, b)]
        for end in (a, b):
            sure(end.ask({"do": "open", "of": made[0] + made[1], "s": seconds}), f"loop {loop}: groups are not open")
        for maker, names in zip((a, b), made, strict=True):
            maker.ask({"send": names, "messages": 2})
        for other, names, had in zip((b, a), made, beside, strict=True):
            sure(other.ask({"do": "moved", "of": names, "messages": 2, "s": seconds}), f"loop {loop}: those of new groups")
            sure(other.ask({"do": "moved", "of": had, "messages": messages, "s": seconds}), f"loop {loop}: those beside")
        took.append(time.monotonic() - began)
        closed([a, b], made[0] + made[1])
    slowest = max(took)
    return require({"loops": loops, "slowest_s": round(slowest, 3), "middle_s": round(sorted(took)[len(took) // 2], 3)},
                f"a loop took {slowest:.1f} s, over {seconds:g}" if slowest > seconds else None)
