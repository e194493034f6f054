"""NUMA: which node is a rank's, by made-up machines; the kernel is told, and threads run where they are bound to."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from numa_machines import GPU, HERE, MIB, machine, policy_of

from xpyd_sidecar.memory import numa_nodes, numa_policy
from xpyd_sidecar.memory.addresses import address_of
from xpyd_sidecar.memory.node_binding import UNBOUND, NodeBinding
from xpyd_sidecar.memory.numa_nodes import BoundNode, NumaNode, choose_node, read_device_node, read_nodes, read_numbers
from xpyd_sidecar.memory.numa_policy import prefer_node
from xpyd_sidecar.threads.processors import restrict
from xpyd_sidecar.threads.watched import WatchedThread

TWO = (NumaNode(0, frozenset(range(8)), True), NumaNode(1, frozenset(range(8, 16)), True))
ALL = frozenset(range(16))


# --- what sysfs says ---


@pytest.mark.parametrize(("listed", "numbers"), [("", set()), ("0", {0}), ("0-3,8\n", {0, 1, 2, 3, 8}), ("5-5", {5})])
def test_lists_of_numbers_are_read(listed: str, numbers: set[int]) -> None:
    assert read_numbers(listed) == numbers


@pytest.mark.parametrize("listed", ["a", "0-", "3-1", "-1", "0,,1", "0-99999999999"])
def test_what_is_no_list_is_refused(listed: str) -> None:
    with pytest.raises(ValueError, match=r"range|invalid literal"):
        read_numbers(listed)


def test_nodes_are_read_with_their_processors_and_memory(tmp_path: Path) -> None:
    found = read_nodes(machine(tmp_path, {0: "0-1,4", 2: "", 3: "2-3"}, memory="0,2"))
    assert found == (NumaNode(0, frozenset({0, 1, 4}), True), NumaNode(2, frozenset(), True),
                     NumaNode(3, frozenset({2, 3}), False))


def test_a_machine_that_says_nothing_or_nonsense_has_no_nodes(tmp_path: Path) -> None:
    assert read_nodes(tmp_path) == ()
    machine(tmp_path, {0: "0-1", 1: "two"})
    assert read_nodes(tmp_path) == ()


@pytest.mark.parametrize(("said", "node"), [("1", 1), ("0", 0), ("-1", None), ("?", None)])
def test_the_node_of_a_device_is_read_where_the_firmware_says_it(tmp_path: Path, said: str, node: int | None) -> None:
    assert read_device_node(GPU, machine(tmp_path, {0: "0", 1: "1"}, devices={GPU: said})) == node
    assert read_device_node("0000:00:00.0", tmp_path) is None


def test_nodes_whose_memory_a_cpuset_allows_are_read(tmp_path: Path) -> None:
    status = tmp_path / "status"
    assert numa_nodes.read_memory_nodes(status) is None
    status.write_text("Name:\tpython\nMems_allowed:\t00000003\nMems_allowed_list:\t0-1\n")
    assert numa_nodes.read_memory_nodes(status) == {0, 1}
    status.write_text("Name:\tpython\n")
    assert numa_nodes.read_memory_nodes(status) is None
    assert 0 in (numa_nodes.read_memory_nodes() or {0}), "of this process itself"


# --- which node is a rank's ---


@pytest.mark.parametrize("found", [
    (), TWO[:1], (TWO[0], NumaNode(1, frozenset(), True)),  # processors of node 1 are offline, or it is memory alone
])
def test_with_one_node_there_is_nothing_to_choose(found: Sequence[NumaNode]) -> None:
    assert choose_node(found, 0, ALL, None) is None


@pytest.mark.parametrize(("device", "usable", "memory_of", "chosen"), [
    (1, ALL, None, BoundNode(1, True, TWO[1].processors)),
    (0, ALL, frozenset({0, 1}), BoundNode(0, True, TWO[0].processors)),
    # A cpuset, or vLLM's own binding, leaves some of the node's processors: no thread leaves these.
    (1, frozenset({0, 8, 9, 10, 11}), None, BoundNode(1, True, frozenset({8, 9, 10, 11}))),
    # All that this process may use is there already: no thread is touched.
    (1, TWO[1].processors, None, BoundNode(1, True, frozenset())),
    (1, frozenset({8, 9, 10, 11}), None, BoundNode(1, True, frozenset())),
    # Without a device, or where nobody says where it is, the processors say it.
    (None, TWO[0].processors, None, BoundNode(0, True, frozenset())),
    (None, ALL, None, None), (None, frozenset(), None, None), (None, frozenset({7, 8}), None, None),
    (5, ALL, None, None),  # a device at a node that has no processors, or is none
])
def test_a_rank_is_at_its_devices_node_else_where_its_processors_are(
        device: int | None, usable: frozenset[int], memory_of: frozenset[int] | None, chosen: BoundNode | None) -> None:
    assert choose_node(TWO, device, usable, memory_of) == chosen


@pytest.mark.parametrize("usable", [TWO[0].processors, TWO[0].processors | {8, 9, 10}])
def test_threads_do_not_wait_for_each_other_on_a_few_processors_of_the_node(usable: frozenset[int]) -> None:
    node = choose_node(TWO, 1, usable, None)
    assert node is not None
    assert (node.number, node.memory, node.processors) == (1, True, frozenset())
    assert node.why == f"this process may use {len(usable) - 8} of its processors, so threads stay where they are"


def test_a_small_node_has_all_of_its_processors_for_threads() -> None:
    small = (NumaNode(0, frozenset({0, 1}), True), NumaNode(1, frozenset({2, 3}), True))
    assert choose_node(small, 1, frozenset({0, 1, 2, 3}), None) == BoundNode(1, True, frozenset({2, 3}))


def test_memory_that_a_cpuset_forbids_or_that_is_not_there_is_not_asked_for() -> None:
    near = TWO[1].processors
    assert choose_node(TWO, 1, ALL, frozenset({0})) == BoundNode(
        1, False, near, "this process may have none of its memory (cpuset.mems)")
    bare = (TWO[0], NumaNode(1, near, False))
    assert choose_node(bare, 1, ALL, None) == BoundNode(1, False, near, "it has no memory")


# --- the kernel ---


def test_the_kernel_prefers_the_node_for_whole_pages_of_the_memory_alone() -> None:
    """Also of memory that others map: the policy is the memory's own."""
    fd = os.memfd_create("numa-test")
    os.ftruncate(fd, 4 * mmap.PAGESIZE)
    for memory in (mmap.mmap(-1, 4 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
                   mmap.mmap(fd, 4 * mmap.PAGESIZE)):
        begin = address_of(memoryview(memory))
        assert policy_of(begin)[0] == 0, "MPOL_DEFAULT"
        prefer_node(begin + 100, 3 * mmap.PAGESIZE, 0)
        pages = [policy_of(begin + page * mmap.PAGESIZE) for page in range(4)]
        assert pages == [(0, 0), (numa_policy.PREFERRED, 1), (numa_policy.PREFERRED, 1), (0, 0)]
    other = mmap.mmap(fd, 4 * mmap.PAGESIZE)
    assert policy_of(address_of(memoryview(other)) + mmap.PAGESIZE) == (numa_policy.PREFERRED, 1)
    os.close(fd)


def test_less_than_a_page_is_nobodys_to_place() -> None:
    prefer_node(4097, 4095, 0)
    prefer_node(4097, 8190, 999)


@pytest.mark.parametrize("node", [1000, 70])
def test_a_node_that_is_not_there_is_the_kernels_to_refuse(node: int) -> None:
    memory = memoryview(mmap.mmap(-1, MIB))
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        prefer_node(address_of(memory), MIB, node)


def test_a_processor_whose_call_is_not_known_has_none() -> None:
    memory = memoryview(mmap.mmap(-1, MIB))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSYS)):
        prefer_node(address_of(memory), MIB, 0, "riscv64")


# --- memory and threads of a rank ---


def test_what_the_system_refuses_is_said_once_and_never_fails(caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def refuse(address: int, size: int, node: int) -> None:
        asked.append((address, size, node))
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    caplog.set_level(logging.INFO)
    binding = NodeBinding(BoundNode(1, True, frozenset()), refuse)
    memory = memoryview(bytearray(10))
    binding.memory(memory)
    binding.memory(memory)
    assert asked == [(address_of(memory), 10, 1)]
    [record] = caplog.records
    assert record.getMessage() == (
        "xpyd: the system does not let this process choose the NUMA node of its memory (mbind: Operation not permitted): "
        "pages come from the node of the thread that makes them")


@pytest.mark.parametrize("node", [None, BoundNode(1, False, frozenset(), "it has no memory")])
def test_nothing_is_asked_where_there_is_nothing_to_choose(node: BoundNode | None) -> None:
    NodeBinding(node, lambda *_: pytest.fail("it was asked")).memory(memoryview(bytearray(10)))
    NodeBinding(node, lambda *_: pytest.fail("it was asked")).memory(memoryview(b""))


def run(thread: WatchedThread) -> None:
    thread.start()
    assert thread.end(10)


def test_pages_are_made_on_the_node_and_the_thread_goes_back() -> None:
    one = frozenset({min(HERE)})
    with NodeBinding(BoundNode(0, True, one)).pages():
        assert os.sched_getaffinity(0) == one
    assert os.sched_getaffinity(0) == HERE
    with pytest.raises(RuntimeError), NodeBinding(BoundNode(0, True, one)).pages():
        raise RuntimeError
    assert os.sched_getaffinity(0) == HERE
    for node in (None, BoundNode(0, True, frozenset()), BoundNode(0, True, frozenset({999}))):
        with NodeBinding(node).pages():
            assert os.sched_getaffinity(0) == HERE


def test_a_rank_s_threads_and_what_they_start_run_on_the_node_and_no_other_does() -> None:
    one = frozenset({min(HERE)})
    binding, seen, go_on = NodeBinding(BoundNode(0, True, one)), list[set[int]](), threading.Event()

    def look() -> None:
        seen.append(os.sched_getaffinity(0))
        child = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        child.start()
        child.join()

    early = WatchedThread("early", look)
    binding.thread(early)
    run(early)
    assert seen == [one, one]

    late = WatchedThread("late", lambda: go_on.wait(10) and look())
    late.start()
    binding.thread(late)
    assert late.native_id is not None
    assert os.sched_getaffinity(late.native_id) == one
    go_on.set()
    assert late.end(10)
    binding.thread(late)  # it has ended: nothing is done, and nothing said
    assert seen == [one] * 4
    assert os.sched_getaffinity(0) == HERE
    unbound = WatchedThread("unbound", look)
    UNBOUND.thread(unbound)
    run(unbound)
    assert seen[4:] == [HERE, HERE]


def test_a_thread_that_the_kernel_does_not_bind_runs_where_it_did(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[set[int]] = []
    thread = WatchedThread("strange", lambda: seen.append(os.sched_getaffinity(0)))
    thread.bind(frozenset({1023}))
    run(thread)
    assert (seen, thread.words) == ([HERE], "")
    assert "xpyd: a thread stays on the processors that it had, not on [1023]: Invalid argument" in caplog.text
    assert not restrict(0, {1023})
