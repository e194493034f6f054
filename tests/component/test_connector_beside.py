"""Our connector inside vLLM's MultiConnector, by hand: beside a store, in both orders, with one and two ranks."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from connector_sides import BLOCK, decode_leg, idle, making, prefill_leg, request, until
from copies import Clock
from multi_engines import MultiEngine, Order
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.outputs import KVConnectorOutput

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.engine import compat
from xpyd_sidecar.engine.connector import XpydConnector
from xpyd_sidecar.engine.reports import LoadReport, StepReport
from xpyd_sidecar.engine.scheduler.multi_connector import MultiConnectorReports
from xpyd_sidecar.engine.stats import Stats
from xpyd_sidecar.kv.keys import Key, Outcome

pytestmark = pytest.mark.timeout(300)
ORDERS: tuple[Order, ...] = ("ours first", "store first")
TOKENS = 40
"""Two blocks and a half."""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., MultiEngine]]:
    with making(lambda name, clock=None, **options: MultiEngine(name, tmp_path, clock, **options)) as build:
        yield build


def asking(params: Any, prompt: int = 1) -> Any:
    """A request with the hashes of its whole blocks."""
    made = request(params, TOKENS, prompt)
    made.num_tokens = TOKENS
    made.block_hashes = [(prompt, at) for at in range(TOKENS // BLOCK)]
    return made


def arrive(engine: MultiEngine, one: Any) -> None:
    engine.multi.on_new_request(one)


def prefill(p: MultiEngine, one: Any, ids: list[int], prompt: int, computed: int = 0) -> bool:
    """Compute what is not there, in one step; whether its blocks are still needed."""
    p.fill(ids, prompt) if not computed else None
    p.step(new=((one, computed, TOKENS - computed),))
    return p.on_request_ended(one)


def pair(transfer: str, d: MultiEngine, prompt: int = 1) -> tuple[Any, Any]:
    return asking(prefill_leg(transfer, d), prompt), asking(decode_leg(transfer), prompt)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_what_the_store_has_prefill_does_not_compute_and_hands_over_all_the_same(
        make: Callable[..., MultiEngine], order: Order, tensor: int, late: bool) -> None:
    p, d = make("p", order=order, tensor=tensor, late=late), make("d", tensor=tensor)
    theirs, ours = pair(uuid.uuid4().hex, d, prompt=7)
    arrive(d, ours)
    arrive(p, theirs)
    assert p.match_tokens(theirs) == (0, False)
    p.on_allocated(theirs, [5, 9, 3], 0)
    held = prefill(p, theirs, [5, 9, 3], 7)
    until(lambda: d.match_tokens(ours) == (TOKENS, True), p, d)
    d.on_allocated(ours, [11, 12, 13], TOKENS)
    until(lambda: d.recved == [ours.request_id], p, d)
    assert d.holds([11, 12, 13], prompt=7, first=0)
    until(lambda: not held or p.freed == [theirs.request_id], p, d)
    until(lambda: idle(p) and not p.multi.has_pending_push_work(), p, d)

    theirs, ours = pair(uuid.uuid4().hex, d, prompt=7)
    arrive(d, ours)
    arrive(p, theirs)
    assert p.match_tokens(theirs) == (2 * BLOCK, late)
    p.on_allocated(theirs, [20, 21, 22], 2 * BLOCK)
    if late:  # it waits for its blocks, with nobody else's in the step
        until(lambda: theirs.request_id in p.recved, p, d)
        p.on_allocated(theirs, [20, 21, 22], 0)
    for rank, (caches, device) in enumerate(zip(p.caches, p.devices, strict=True)):
        for layer, cache in enumerate(caches.values()):
            device.compute(0.0, lambda to=cache[22], value=7000 + rank * 100 + layer * 20 + 2: to.fill_(value))
    prefill(p, theirs, [20, 21, 22], 7, computed=2 * BLOCK)
    until(lambda: d.match_tokens(ours) == (TOKENS, True), p, d)
    d.on_allocated(ours, [14, 15, 16], TOKENS)
    until(lambda: ours.request_id in d.recved, p, d)
    assert d.holds([14, 15, 16], prompt=7, first=0)
    assert (p.store.served, d.failed) == (2 * BLOCK, [])
    until(lambda: idle(p) and idle(d), p, d)
    assert (p.counts["send/ok"], d.counts["receive/ok"]) == (2, 2)
    assert d.counts[metrics.LOADED_TOKENS] == 2 * TOKENS


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_who_is_first_serves_decode_and_prefills_data_is_let_go_where_that_is_the_store(
        make: Callable[..., MultiEngine], order: Order, late: bool) -> None:
    p, d = make("p"), make("d", order=order, late=late)
    alone = asking(None, prompt=3)
    arrive(d, alone)
    assert d.match_tokens(alone) == (0, False)
    d.on_allocated(alone, [1, 2, 3], 0)
    d.fill([1, 2, 3], 3)
    d.step(new=((alone, 0, TOKENS),))
    assert d.on_request_ended(alone) is late
    until(lambda: not d.multi.has_pending_push_work(), d)

    theirs, ours = pair(uuid.uuid4().hex, d, prompt=3)
    arrive(d, ours)
    arrive(p, theirs)
    p.on_allocated(theirs, [5, 9, 4], 0)
    prefill(p, theirs, [5, 9, 4], 3)
    until(lambda: d.match_tokens(ours)[0] is not None, p, d)
    stored = 2 * BLOCK
    found = (TOKENS, True) if order == "ours first" else (stored, late)
    assert d.match_tokens(ours) == found
    d.on_allocated(ours, [10, 11, 12], found[0] or 0)
    if found[1]:
        until(lambda: ours.request_id in d.recved, p, d)
        d.on_allocated(ours, [10, 11, 12], 0)
    d.step(new=((ours, found[0], TOKENS - (found[0] or 0) or 1),))
    assert d.holds([10, 11], prompt=3, first=0)
    until(lambda: idle(p) and idle(d), p, d)
    assert d.counts[f"receive/{'ok' if order == 'ours first' else 'unused'}"] == 1
    assert p.counts[f"send/{'ok' if order == 'ours first' else 'unused'}"] == 1
    assert d.store.served == (0 if order == "ours first" else stored)
    assert not any(worker.store.used_bytes for worker in p.workers), "nothing is kept for a load that will not be"


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_that_both_need_go_when_both_have_said_so(make: Callable[..., MultiEngine], order: Order,
                                                         tensor: int) -> None:
    """Ours is done last in the first engine, and first in the second."""
    for name, ours_last in (("a", True), ("b", False)):
        clock = Clock()
        p, d = make(name, clock, order=order, late=True, tensor=tensor), make(f"{name}-d", tensor=tensor)
        theirs, ours = pair(uuid.uuid4().hex, d, prompt=2)
        arrive(d, ours)
        arrive(p, theirs)
        p.on_allocated(theirs, [5, 9, 4], 0)
        assert prefill(p, theirs, [5, 9, 4], 2), "both hold it"
        assert p.multi._extra_async_saves == {theirs.request_id: 1}
        copied = p.scheduler._offers.take_copied
        if ours_last:
            p.scheduler._offers.take_copied = set  # type: ignore[method-assign]
            for _ in range(6):
                p.step()
            assert p.freed == [], "the store has said so, ours has not"
            p.scheduler._offers.take_copied = copied  # type: ignore[method-assign]
        until(lambda p=p: bool(p.freed), p)
        assert all((2, 1) in store._data for store in p.stores), "the store has its blocks by then"
        for _ in range(6):
            p.step()
        assert p.freed == [theirs.request_id], "and once"


def test_a_siblings_reports_stay_and_ours_that_nobody_waits_for_go() -> None:
    def report(name: str, rank: int) -> LoadReport:
        return LoadReport(rank, name, Key("t", 1, 1), Outcome.OK, "", 0)  # type: ignore[arg-type]

    two = MultiConnectorReports(2)
    assert two.finished_names(["theirs"], [report("mine", 0)], []) == {"theirs"}
    assert two.finished_names(["mine", "theirs"], [report("mine", 1)], ["mine"]) == {"mine", "theirs"}
    assert two.finished_names(["mine", "other"], [report("mine", 1), report("mine", 0)], []) == {"other"}
    assert two.finished_names(["mine"], [], []) == {"mine"}, "the next load of that request was a sibling's"
    assert not two._reported


def test_reports_of_requests_that_nobody_knows_are_a_siblings(make: Callable[..., MultiEngine]) -> None:
    d = make("d")
    output = KVConnectorOutput(finished_recving={"a"}, finished_sending={"b"}, kv_connector_worker_meta=StepReport())
    d.scheduler.on_worker_output(output)
    assert (output.finished_recving, output.finished_sending) == ({"a"}, {"b"})


class Child(KVConnectorBase_V1):
    """Remembers what it finds of the outer configuration."""

    found: Any = None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        Child.found = compat.outer_transfer()

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = None
    get_num_new_matched_tokens = update_state_after_alloc = build_connector_meta = None


@pytest.mark.parametrize("outer", ["fail", "recompute"])
def test_the_outer_policy_is_found_whatever_the_childs_own_is(outer: Literal["fail", "recompute"]) -> None:
    child = {"kv_connector": "Child", "kv_connector_module_path": __name__, "kv_role": "kv_both"}
    transfer = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_load_failure_policy=outer,
                                kv_connector_extra_config={"connectors": [{**child, "kv_load_failure_policy": "fail"}]})
    config = SimpleNamespace(kv_transfer_config=transfer, scheduler_config=SimpleNamespace(
        disable_hybrid_kv_cache_manager=True))
    MultiConnector(config, KVConnectorRole.SCHEDULER, None)  # type: ignore[arg-type]
    assert Child.found.kv_load_failure_policy == outer
    Child(config, KVConnectorRole.SCHEDULER, None)
    assert Child.found is None, "alone there is none"


def test_multi_connector_makes_our_statistics_again_by_their_name() -> None:
    told = MultiConnector.build_kv_connector_stats({"XpydConnector": {metrics.LOADED_TOKENS: 3}})
    assert told is not None
    assert isinstance(told.data["XpydConnector"], Stats)
    again = MultiConnector.build_kv_connector_stats({"XpydConnector": {metrics.LOADED_TOKENS: 4}})
    assert again is not None
    assert told.aggregate(again).reduce() == {"XpydConnector": {"loaded_tokens": 7}}


def test_ours_wants_no_piecewise_graphs_there_either() -> None:
    ours = {"kv_connector": "XpydConnector", "kv_connector_module_path": XpydConnector.__module__, "kv_role": "kv_both"}
    assert not MultiConnector.requires_piecewise_for_cudagraph({"connectors": [ours]})
