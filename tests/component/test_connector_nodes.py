"""Ranks that are bound to a NUMA node: KV moves as it does without, and no thread but the connector's own is touched."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from connector_sides import Engine, decode_leg, making, prefill_leg, request, until
from numa_machines import HERE, policy_of

from xpyd_sidecar.engine.worker import worker_side
from xpyd_sidecar.memory.addresses import address_of
from xpyd_sidecar.memory.node_binding import NodeBinding
from xpyd_sidecar.memory.numa_nodes import BoundNode
from xpyd_sidecar.memory.numa_policy import PREFERRED

NEAR = frozenset({min(HERE)})


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    def bound(device: torch.device, rank: int) -> NodeBinding:
        assert (device.type, rank) == ("cpu", 0)
        return NodeBinding(BoundNode(0, True, NEAR))

    monkeypatch.setattr(worker_side, "node_binding", bound)
    with making(lambda name, **options: Engine(name, tmp_path, **options)) as build:
        yield build


def test_kv_moves_between_bound_ranks_and_only_their_threads_are_touched(make: Callable[..., Engine]) -> None:
    p, d = make("p"), make("d")
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    d.scheduler.new_request(ours)
    p.fill([5, 9, 3], prompt=7)
    p.scheduler.new_request(theirs)
    p.scheduler.on_allocated(theirs, ([5, 9, 3],), 0)
    p.step(new=((theirs, [5, 9, 3], 0, 40),))
    p.scheduler.on_request_ended(theirs)
    until(lambda: d.scheduler.match_tokens(ours, 0) == (40, True), d)
    d.scheduler.on_allocated(ours, ([11, 12, 13],), 40)
    until(lambda: d.recved, p, d)
    assert d.failed == []
    assert d.holds([11, 12, 13], prompt=7, first=0)

    own = {one.thread for engine in (p, d) for one in engine.workers[0]._parts if one.thread.is_alive()}
    assert {"xpyd-sender", "xpyd-receiver"} <= {thread.name for thread in own}
    for thread in threading.enumerate():
        assert thread.native_id is not None
        assert os.sched_getaffinity(thread.native_id) == (NEAR if thread in own else HERE), thread.name
    lease = p.workers[0].store.lease(1 << 20)
    assert lease is not None
    assert policy_of(address_of(lease.chunk.view) + (1 << 19)) == (PREFERRED, 1)
    p.workers[0].store.give(lease)
