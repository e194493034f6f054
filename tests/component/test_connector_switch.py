"""An engine whose role changes while it does, or is about to do, the work of the old one: nothing of that is lost."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from connector_sides import Engine, decode_leg, idle, making, prefill_leg, request, until

from xpyd_sidecar.contract import duty
from xpyd_sidecar.contract.duty import EngineRole
from xpyd_sidecar.contract.ids import Role

pytestmark = pytest.mark.timeout(300)
Make = Callable[..., Engine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with making(lambda name, **options: Engine(name, tmp_path, runner="v1", **options)) as build:
        yield build


def legs(p: Engine, d: Engine) -> tuple[Any, Any]:
    transfer = uuid.uuid4().hex
    theirs, ours = request(prefill_leg(transfer, d)), request(decode_leg(transfer, wait_s=30.0))
    d.scheduler.new_request(ours)
    p.scheduler.new_request(theirs)
    p.fill([1, 2, 3], prompt=4)
    p.scheduler.on_allocated(theirs, ([1, 2, 3],), 0)
    return theirs, ours


def loads(p: Engine, d: Engine, ours: Any) -> None:
    until(lambda: d.scheduler.match_tokens(ours, 0) == (40, True), d, p)
    d.scheduler.on_allocated(ours, ([8, 7, 6],), 40)


def becomes_decode(p: Engine) -> None:
    duty.write(p.folder, EngineRole(Role.DECODE, 2))
    until(lambda: all(worker.store._spare for worker in p.workers), p)


def handed_over(p: Engine, d: Engine) -> None:
    until(lambda: bool(d.recved), p, d)
    assert not d.failed
    assert d.holds([8, 7, 6], prompt=4, first=0)
    until(lambda: idle(p) and idle(d), p, d)
    assert not any(worker.store.made for worker in p.workers), "its memory has gone back"


def test_a_prompt_that_is_under_way_when_the_role_changes_is_handed_over(make: Make) -> None:
    p, d = make("p", keep_ttl_s=20.0), make("d")
    theirs, ours = legs(p, d)
    p.step(new=((theirs, [1, 2, 3], 0, 20),))
    loads(p, d, ours)
    becomes_decode(p)
    p.step(cached=((theirs, [], 20, 20),))
    p.scheduler.on_request_ended(theirs)
    handed_over(p, d)


def test_a_prompt_that_comes_just_after_the_role_has_changed_is_handed_over(make: Make) -> None:
    p, d = make("p", keep_ttl_s=20.0), make("d")
    becomes_decode(p)
    theirs, ours = legs(p, d)
    p.step(new=((theirs, [1, 2, 3], 0, 40),))
    p.scheduler.on_request_ended(theirs)
    loads(p, d, ours)
    handed_over(p, d)
