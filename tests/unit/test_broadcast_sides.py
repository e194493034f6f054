"""Side segments: two at most, used again, replaced when they are too small, and told to every reader."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from xpyd_sidecar.broadcast import wire
from xpyd_sidecar.broadcast.shared import LANES, Sides
from xpyd_sidecar.errors import PeerGone


@dataclass
class FakeLink:
    """A reader's connection."""

    said: list[wire.SideSegment] = field(default_factory=list)
    dead: bool = False

    def send(self, message: wire.SideSegment, fd: int) -> None:
        if self.dead:
            raise PeerGone("r", "it is dead")
        assert fd >= 0
        self.said.append(message)


class FakeDoor:
    """Two readers."""

    def __init__(self) -> None:
        self.links = {"a": FakeLink(), "b": FakeLink()}


@pytest.fixture
def door() -> Any:
    return FakeDoor()


def test_segments_are_made_up_to_the_limit_and_then_the_oldest_is_waited_for_and_used_again(door: Any) -> None:
    sides = Sides("q", door)
    made = []
    for number in range(1, 1 + LANES):
        assert sides.awaited_message() == 0
        made.append(sides.place(number, 5000)[0])
    assert sides.awaited_message() == 1
    again, gone = sides.place(7, 4000)
    assert again is made[0]
    assert gone == {}
    assert sides.awaited_message() == 2
    assert door.links["a"].said == door.links["b"].said == [wire.SideSegment(1, 0), wire.SideSegment(2, 0)]
    sides.close()


def test_one_that_is_too_small_is_replaced_under_a_new_number(door: Any) -> None:
    sides = Sides("q", door)
    for number in range(1, 1 + LANES):
        sides.place(number, 5000)
    lane, _ = sides.place(9, 50_000)
    assert (lane.number, lane.used_by) == (LANES + 1, 9)
    assert lane.segment.size >= 50_000
    assert door.links["a"].said[-1] == wire.SideSegment(LANES + 1, 1)
    sides.close()


def test_a_reader_that_cannot_be_told_is_named(door: Any) -> None:
    door.links["b"].dead = True
    sides = Sides("q", door)
    _, gone = sides.place(1, 5000)
    assert gone == {"b": "it is dead"}
    sides.close()
