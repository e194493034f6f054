"""Engines that are prefill and decode to each other, over a scripted NCCL that takes memory as a GPU's would.

The ends and what they do are those of the checks for a GPU (``lab/gpu``).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from lab.gpu import group_checks, group_ends
from lab.gpu.findings import LeftOutError, NotHeldError
from lab.gpu.group_ends import End
from manifest_ranks import DecodeRank, PrefillRank, key, wait_until
from nccl_fake import FakeNccl, HostDevice, OneRing, World

from xpyd_sidecar.engine.worker.nccl_setup import NcclLinks
from xpyd_sidecar.kv.groups import Groups, GroupState, MakeGroup, Way
from xpyd_sidecar.kv.receiving import Confirm
from xpyd_sidecar.kv.session_bodies import Gpu
from xpyd_sidecar.transport.nccl.driver import Driver
from xpyd_sidecar.transport.nccl.thread import FLIGHT, NcclLimits, NcclThread

pytestmark = pytest.mark.timeout(300)
PIECE = 4096
GROUPS = 16
PATIENCE_S = 20.0


class Local:
    """An end in this process; what it is told comes on a thread of its own, as over a socket."""

    def __init__(self, name: str, world: World) -> None:
        self.said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.other: Local | None = None
        driver = Driver(FakeNccl(world), HostDevice(name), ctas=4, piece=PIECE, groups=GROUPS, flight=FLIGHT)
        self.end = End(name, driver, self._tell)
        self.thread = threading.Thread(target=self._hear, daemon=True)
        self.thread.start()

    def _tell(self, order: dict[str, Any]) -> None:
        assert self.other is not None
        self.other.said.put(order)

    def _hear(self) -> None:
        while (order := self.said.get()) is not None:
            self.end.heard(order)

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        return self.end.obey(order)

    def stop(self) -> None:
        self.said.put(None)
        self.thread.join(5)
        self.end.hub.stop()


@pytest.fixture
def world() -> World:
    return World(allocates=True, open_after_s=0.005)


@pytest.fixture
def ends(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Local, Local]]:
    monkeypatch.setattr(group_checks, "WAIT_S", 60.0)
    a, b = Local("a", world), Local("b", world)
    a.other, b.other = b, a
    yield a, b
    for one in (a, b):
        one.stop()
    assert world.misuse == []


def test_groups_open_in_both_directions_while_both_receive(ends: tuple[Local, Local]) -> None:
    found = group_checks.open_many(*ends, loops=20)
    assert found["loops"] == 20
    assert found["slowest_s"] < group_ends.LIMITS.open_s


def crossed(a: Local, b: Local) -> Callable[[float], list[int]]:
    """Each end receives from the other one, which makes a group; then both are sent. How many come within a time."""
    ways = [group_checks.opened(one, other, 1) for one, other in ((a, b), (b, a))]
    for (one, other), names in zip(((a, b), (b, a)), ways, strict=True):
        group_checks.carried(one, other, names, 1)
    for other, names in zip((b, a), ways, strict=True):
        assert other.ask({"do": "spin", "of": names, "s": 5})["well"]
    made = [one.ask({"make": 1})["names"] for one in (a, b)]
    assert not a.ask({"do": "open", "of": made[0] + made[1], "s": 0.2})["well"]
    for one, names in zip((a, b), ways, strict=True):
        one.end.heard({"fetch": names[0]})

    def came(seconds: float) -> list[int]:
        found = [other.ask({"do": "moved", "of": names, "messages": 2, "s": seconds})["count"][0]
                 for other, names in zip((b, a), ways, strict=True)]
        if found == [2, 2]:
            for one in (a, b):
                assert one.ask({"do": "open", "of": made[0] + made[1], "s": seconds})["well"]
        return found

    return came


def test_receives_end_before_a_group_is_made(ends: tuple[Local, Local]) -> None:
    assert crossed(*ends)(PATIENCE_S) == [2, 2]


def begun_at_once(self: Groups[Any], now: float) -> list[Any]:
    """As groups were begun before."""
    out: list[Any] = []
    for number, group in self._groups.items():
        if group.state is GroupState.WAITING:
            group.state, group.since = GroupState.OPENING, now
            out.append(MakeGroup(number))
    return out


def test_without_that_they_wait_in_a_circle(ends: tuple[Local, Local], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Groups, "_quiet", lambda *_: True)
    monkeypatch.setattr(Groups, "_begin", begun_at_once)
    assert crossed(*ends)(0.5) == [1, 1], "each receives from one that waits for its own receive"


def test_groups_end_in_the_middle_while_another_one_carries_messages(ends: tuple[Local, Local], world: World) -> None:
    found = group_checks.abort_many(*ends, most=60, fewest=60)
    assert found["aborts"] == 60
    assert world.minted == 31


def test_what_does_not_come_back_and_too_few_aborts_are_told(ends: tuple[Local, Local],
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    give_back = NcclThread._give_back
    lost = iter([False, True])  # the first one is before the first look
    monkeypatch.setattr(NcclThread, "_give_back", lambda hub, way, message: give_back(hub, way, message)
                        if way is Way.RECEIVE or not next(lost, False) else None)
    with pytest.raises(NotHeldError, match=r"6 aborts in \d+ s, fewer than 60; slots to send from did not come back"):
        group_checks.abort_many(*ends, most=6, fewest=60)


def test_without_a_gpu_both_are_left_out() -> None:
    for check in (group_checks.aborts, group_checks.both_ways):
        with pytest.raises(LeftOutError, match="NCCL needs a GPU"):
            check(group_ends.torch.device("cpu"))


# --- the same with sessions, publishers and receivers ---


def ranks(links: NcclLinks) -> tuple[PrefillRank, DecodeRank]:
    """Of one engine."""
    return (PrefillRank(transport="nccl", servers=lambda own: {"nccl": links.server(lambda: own.publisher.tcp)}),
            DecodeRank(transport="nccl", ring=64 << 10, piece=PIECE, gpu=links.gpu, blocks=512,
                       others=lambda own: {"nccl": links.fetching(OneRing(own), own.receiver.over_tcp)}))


def test_engines_that_load_from_each_other_and_close_their_groups_go_on(world: World) -> None:
    with ExitStack() as stack:
        sides: list[tuple[PrefillRank, DecodeRank, NcclThread]] = []
        for name in "ab":
            hub = NcclThread(Driver(FakeNccl(world), HostDevice(name), ctas=4, piece=PIECE, groups=4, flight=FLIGHT),
                             NcclLimits(groups=4, open_s=PATIENCE_S, move_s=PATIENCE_S, idle_s=60))
            links = NcclLinks(hub, Gpu(name, "2.28.9", PIECE), one_gpu=False)
            stack.callback(hub.stop)
            sides.append((*ranks(links), hub))
            stack.callback(sides[-1][0].stop)
            stack.callback(sides[-1][1].stop)
        for turn in range(20):
            which, ids = key(turn + 1), tuple(range(turn * 20, turn * 20 + 20))
            began = time.monotonic()
            for (p, *_), (_, d, _) in (sides, sides[::-1]):
                d.want(which, p, ids)
                p.compute(which, 0, 20)
            for _, d, _ in sides:
                wait_until(lambda: d.has(which, 0, 20))  # noqa: B023 (now)
                assert d.right(which, 0, ids)
                d.receiver.carry_out(Confirm(which, 0, 20 * 3072))
            assert time.monotonic() - began < PATIENCE_S, "nobody has waited for a deadline"
            for _, _, hub in sides:
                for number in list(hub._joined):
                    hub.leave(number, "closed by the test")
            wait_until(lambda: all(hub.usage.groups == 0 for *_, hub in sides))
        for _, d, _ in sides:
            assert "nccl" in d.links
            assert d.outcomes() == []
    assert world.misuse == []
