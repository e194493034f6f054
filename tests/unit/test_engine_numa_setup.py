"""What binds a rank: its GPU's node by made-up machines, what is said of it, and nothing at all where there is one node."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from numa_machines import GPU, HERE, MIB, machine, policy_of

from xpyd_sidecar.engine.worker import numa_setup
from xpyd_sidecar.engine.worker.numa_setup import node_binding, pci_address
from xpyd_sidecar.engine.worker.shm_setup import StoreMemory
from xpyd_sidecar.memory.addresses import address_of
from xpyd_sidecar.memory.node_binding import UNBOUND, NodeBinding
from xpyd_sidecar.memory.numa_nodes import BoundNode
from xpyd_sidecar.memory.numa_policy import PREFERRED
from xpyd_sidecar.memory.registration import host_memory
from xpyd_sidecar.transport.shm.serve import ShmServer

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 3)
PROPERTIES = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9b, pci_device_id=0)
ODD, EVEN = "8-15", "0-7"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """What is said; this process may use 16 processors, and the memory of two nodes."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(numa_setup.numa_nodes, "read_memory_nodes", lambda: frozenset({0, 1}))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: PROPERTIES if device == CUDA else None)
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_device_s_address_is_what_sysfs_calls_it() -> None:
    assert pci_address(PROPERTIES) == GPU
    assert pci_address(SimpleNamespace(pci_bus_id=1)) == "", "an older torch"


def test_the_node_of_the_gpu_is_chosen_and_said(tmp_path: Path, said: Any) -> None:
    found = node_binding(CUDA, 3, machine(tmp_path, {0: EVEN, 1: ODD}, devices={GPU: "1"}))
    assert found.node == BoundNode(1, True, frozenset(range(8, 16)))
    assert said() == [f"xpyd: rank 3: memory and threads for KV are bound to NUMA node 1, of GPU {GPU}"]


@pytest.mark.parametrize("devices", [{}, {GPU: "-1"}, {GPU: "7"}])
def test_a_gpu_whose_node_nobody_names_binds_nothing_and_that_is_said(tmp_path: Path, said: Any,
                                                                      devices: Mapping[str, str]) -> None:
    assert node_binding(CUDA, 0, machine(tmp_path, {0: EVEN, 1: ODD}, devices=devices)) is UNBOUND
    [words] = said()
    assert words == ("xpyd: rank 0: memory and threads for KV are bound to no NUMA node: the system names none with "
                     f"processors for GPU {GPU}")


def test_without_a_gpu_the_processors_say_the_node(tmp_path: Path, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    system = machine(tmp_path, {0: EVEN, 1: ODD})
    assert node_binding(CPU, 0, system) is UNBOUND
    assert said() == []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {8, 9})
    assert node_binding(CPU, 0, system).node == BoundNode(1, True, frozenset())
    assert said() == ["xpyd: rank 0: memory and threads for KV are bound to NUMA node 1, of this process's processors"]


def test_what_is_lacking_at_the_node_is_said(tmp_path: Path, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    found = node_binding(CUDA, 0, machine(tmp_path, {0: EVEN, 1: ODD}, devices={GPU: "1"}))
    assert found.node is not None
    assert found.node.processors == frozenset()
    [words] = said()
    assert words == (f"xpyd: rank 0: memory and threads for KV are bound to NUMA node 1, of GPU {GPU}: this process may "
                     "use 0 of its processors, so threads stay where they are")


def test_with_one_node_nothing_is_done_asked_or_said(tmp_path: Path, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: pytest.fail("it was asked"))
    for name, processors in (("none", {}), ("one", {0: "0-15"}), ("memory", {0: "0-15", 1: ""})):
        assert node_binding(CUDA, 0, machine(tmp_path / name, processors)) is UNBOUND
    assert said() == []


def test_store_and_what_ring_and_buffer_are_made_of_prefer_the_node() -> None:
    """In the kernel's own words, before a page of them is there."""
    binding = NodeBinding(BoundNode(0, True, frozenset()))
    server = ShmServer("this host", None, insists=True)
    store = StoreMemory(server, 4 * MIB, pinned=False, insists=True, binding=binding)
    alone = StoreMemory(None, 4 * MIB, pinned=False, insists=False, binding=binding)
    memory = [store.make(4 * MIB), alone.make(4 * MIB), host_memory(4 * MIB, pinned=False, binding=binding)]
    assert [policy_of(address_of(one.view) + MIB) for one in memory] == [(PREFERRED, 1)] * 3
    store.release()
    assert policy_of(address_of(store.make(4 * MIB).view) + MIB) == (PREFERRED, 1), "that of the next store"
    other = host_memory(4 * MIB, pinned=False)
    assert policy_of(address_of(other.view) + MIB)[0] == 0, "of a rank that is not bound"
    assert os.sched_getaffinity(0) == HERE
