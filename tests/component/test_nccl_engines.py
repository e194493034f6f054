"""Two engines, stepped by hand on scripted GPUs, whose link is a scripted NCCL: blocks go from device to device."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from connector_sides import BLOCK, LAYERS, Engine, decode_leg, idle, making, prefill_leg, request, until
from copies import Clock
from nccl_fake import FakeNccl, HostDevice, World

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.engine.worker import data_plane
from xpyd_sidecar.engine.worker.nccl_setup import NcclLinks
from xpyd_sidecar.kv.session_bodies import Gpu
from xpyd_sidecar.transport.nccl.driver import Driver
from xpyd_sidecar.transport.nccl.thread import FLIGHT, NcclLimits, NcclThread

pytestmark = pytest.mark.timeout(300)
TOKENS = 40
SIZE = 3 * LAYERS * 2 * BLOCK * 4 * 4
"""Bytes of their KV, of whole blocks."""
SOURCE, TARGET = [5, 9, 3], [30, 11, 12]


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def make(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Each engine with a GPU and a communicator thread of its own."""
    clock = Clock()

    def build(name: str) -> Engine:
        def scripted(*_: object) -> NcclLinks:
            driver = Driver(FakeNccl(world), HostDevice(name), ctas=4, piece=1 << 20, groups=4, flight=FLIGHT)
            limits = NcclLimits(groups=4, open_s=20.0, move_s=20.0)
            return NcclLinks(NcclThread(driver, limits), Gpu(name, "2.29.7", 1 << 20), one_gpu=False)

        monkeypatch.setattr(data_plane, "nccl_links", scripted)
        return Engine(name, tmp_path, clock, transport="nccl")

    with making(build) as made:
        yield made
    assert world.misuse == []


def load(p: Engine, d: Engine, prompt: int) -> bool:
    """A prompt goes from one engine to the other; whether its blocks are right."""
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer), TOKENS, prompt), request(prefill_leg(transfer, d), TOKENS, prompt)
    d.scheduler.new_request(ours)
    p.fill(SOURCE, prompt)
    p.scheduler.new_request(theirs)
    p.scheduler.on_allocated(theirs, (SOURCE,), 0)
    p.step(new=((theirs, SOURCE, 0, TOKENS),))
    p.scheduler.on_request_ended(theirs)
    until(lambda: d.scheduler.match_tokens(ours, 0) == (TOKENS, True), p, d)
    d.scheduler.on_allocated(ours, (TARGET,), TOKENS)
    until(lambda: ours.request_id in d.recved, p, d)
    until(lambda: idle(p) and idle(d), p, d)
    return ours.request_id not in d.failed and d.holds(TARGET, prompt, first=0)


def gauges(engine: Engine) -> tuple[int, int]:
    """Groups, and what they take."""
    return engine.scheduler._gauges[metrics.NCCL_GROUPS], engine.scheduler._gauges[metrics.NCCL_BYTES]


def test_blocks_go_from_device_to_device_and_groups_are_counted_while_there_are_some(
        make: Callable[..., Engine], world: World) -> None:
    p, d = make("p"), make("d")
    p.step()
    p.step()  # which hears of the first one
    assert gauges(p) == (0, 0)
    for prompt in (1, 2):
        assert load(p, d, prompt)
    assert world.carried == 2 * SIZE
    assert world.minted == 1
    assert d.counts["link:nccl"] == 2 * SIZE
    for engine in (p, d):
        until(lambda: gauges(engine) == (1, 1_000_000), engine)  # noqa: B023 (now)


def test_a_group_that_breaks_costs_no_load(make: Callable[..., Engine], world: World) -> None:
    p, d = make("p"), make("d")
    world.fail_at = 1
    assert load(p, d, 1)
    assert world.carried == 0
    assert d.counts["link:tcp"] == SIZE


def test_what_comes_changed_is_never_used(make: Callable[..., Engine], world: World) -> None:
    p, d = make("p"), make("d")
    world.change = lambda message: message[7].bitwise_xor_(64)  # type: ignore[assignment,return-value]
    assert not load(p, d, 1)
    assert len(d.failed) == 1
    world.change = None
    assert load(p, d, 2)
    assert len(d.failed) == 1
