"""Memory of launches: there from the start, and used again only when its copies are complete and nobody has the sums."""

from __future__ import annotations

import numpy as np
import torch

from xpyd_sidecar.memory.launch_memory import LaunchArrays, LaunchMemory
from xpyd_sidecar.memory.marks import NOW

ROWS = np.arange(12, dtype=np.int64).reshape(4, 3)


class Mark:
    """Of copies of a device."""

    passed = False

    def done(self) -> bool:
        return self.passed

    def wait(self, seconds: float) -> bool:
        raise AssertionError("a launch waits for nothing")


def memory(slots: int = 2) -> LaunchMemory:
    return LaunchMemory(torch.device("cpu"), table_bytes=ROWS.nbytes, sums=4, slots=slots)


def places(of: LaunchArrays) -> tuple[int, ...]:
    """Addresses of all that a launch has."""
    return of.slot.tables.data_ptr(), of.slot.sums.data_ptr(), of.tables.data_ptr(), of.sums.data_ptr()


def test_tables_go_to_the_device_and_sums_come_from_it() -> None:
    launches = memory()
    one = launches.take(ROWS, 3)
    assert one.tables.tolist() == ROWS.tolist()
    one.sums.copy_(torch.tensor([7, -1, 9]))
    assert launches.bring_sums(one).read().tolist() == [7, (1 << 64) - 1, 9]


def test_no_memory_is_taken_after_the_start_however_many_launches_there_are() -> None:
    launches, found = memory(), set()
    for _ in range(20):
        one = launches.take(ROWS, 4)
        launches.bring_sums(one).read()
        one.slot.mark = NOW
        found.add(places(one))
    assert len({slot for slot, *_ in found}) == 2
    assert len({there for *_, there, sums in found}) == 1, "one on the device, in the order of its stream"


def test_a_slot_is_not_used_again_while_a_copy_is_under_way_or_its_sums_are_wanted() -> None:
    launches, copying = memory(), Mark()
    first = launches.take(ROWS, 1)
    first.sums.fill_(5)
    sums = launches.bring_sums(first)
    first.slot.mark = NOW
    second = launches.take(ROWS, 1)
    second.slot.mark = copying
    third = launches.take(ROWS, 1)
    third.sums.fill_(6)
    launches.bring_sums(third)
    assert len({places(one)[0] for one in (first, second, third)}) == 3
    assert sums.read().tolist() == [5]
    del sums
    assert places(launches.take(ROWS, 1))[0] == places(first)[0]
    first.slot.mark = copying
    copying.passed = True
    assert places(launches.take(ROWS, 1))[0] == places(second)[0], "in turn"


def test_a_launch_that_has_failed_leaves_its_memory_to_nobody() -> None:
    """Its tables may be on their way to the device: whoever wrote over them would have kernels write anywhere."""
    launches = memory()
    lost = places(launches.take(ROWS, 1))[0]
    for _ in range(8):
        one = launches.take(ROWS, 1)
        assert places(one)[0] != lost
        one.slot.mark = NOW


def test_what_is_too_large_has_memory_of_its_own() -> None:
    launches = memory(1)
    rows = np.concatenate([ROWS, ROWS])
    large = launches.take(rows, 100)
    assert (large.tables.tolist(), len(large.sums)) == (rows.tolist(), 100)
    assert not {*places(large)} & {*places(launches.take(ROWS, 4))}
