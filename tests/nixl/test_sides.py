"""Both sides of the connector stepped by hand (``connector_sides``), with ``kv.transport: rdma`` over NIXL itself."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from connector_sides import LAYERS, Engine, decode_leg, idle, making, prefill_leg, request, until
from copies import Clock

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.engine.stats import LINK
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.memory.addresses import address_of

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["on a CPU", "on a GPU"])
def make(request: pytest.FixtureRequest, tmp_path: Path, site: str, tcp: str) -> Iterator[Callable[..., Engine]]:
    def built(name: str, **options: object) -> Engine:
        clock = Clock() if request.param == "on a GPU" else None
        return Engine(name, tmp_path, clock, transport="rdma", **options)

    with making(built) as build:
        yield build


def transfer(p: Engine, d: Engine, prompt: int) -> None:
    """One prompt of 40 tokens, from ``p`` to ``d``."""
    name = uuid.uuid4().hex
    ours, theirs = request(decode_leg(name)), request(prefill_leg(name, d))
    d.scheduler.new_request(ours)
    p.fill([5, 9, 3], prompt=prompt)
    p.scheduler.new_request(theirs)
    p.scheduler.on_allocated(theirs, ([5, 9, 3],), 0)
    p.step(new=((theirs, [5, 9, 3], 0, 40),))
    p.scheduler.on_request_ended(theirs)
    until(lambda: d.scheduler.match_tokens(ours, 16) == (24, True), d)
    before = len(d.recved)
    d.scheduler.on_allocated(ours, ([30, 11, 12],), 24)
    until(lambda: len(d.recved) > before, p, d)
    assert d.failed == []
    assert d.holds([11, 12], prompt=prompt, first=1)
    d.scheduler.on_request_ended(ours)
    until(lambda: idle(p) and idle(d), p, d)


@pytest.mark.parametrize("tensor", [1, 2])
def test_blocks_are_read_into_their_places(make: Callable[..., Engine], tensor: int) -> None:
    p, d = make("p", tensor=tensor), make("d", tensor=tensor)
    for prompt in (7, 8, 9):
        transfer(p, d, prompt)
    assert d.counts[LINK + "nixl"] == d.counts[metrics.LOADED_BYTES] == 3 * tensor * LAYERS * 2 * 2 * 16 * 4 * 4


def test_memory_that_others_may_read_stays_where_it_is_whatever_the_role(make: Callable[..., Engine]) -> None:
    p, d = make("p"), make("d")
    transfer(p, d, 7)
    [worker] = p.workers
    where = address_of(worker.store._arena.chunk_at(0, 1).view)
    for role in (Role.DECODE, Role.PREFILL):
        worker._plane.serve(role)
    transfer(p, d, 8)
    assert address_of(worker.store._arena.chunk_at(0, 1).view) == where
    assert d.counts[LINK + "nixl"] == d.counts[metrics.LOADED_BYTES]


def test_without_a_device_and_without_a_choice_no_engine_starts(
        tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    with pytest.raises(ConfigError, match="rdma cannot be used: no RDMA device is here"):
        Engine("p", tmp_path, transport="rdma")
