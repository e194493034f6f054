"""The scripted device: its formulas, its clock, what it counts and what it makes of that. No engines."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lab.scripted_device import byte_work, counting, device, parameters, report
from lab.scripted_device.byte_work import ByteWork
from lab.scripted_device.counting import Counters

from xpyd_sidecar.engine.worker import kv_cache
from xpyd_sidecar.kv import packing
from xpyd_sidecar.kv.packing import PackedArray
from xpyd_sidecar.memory.device import PackedRows
from xpyd_sidecar.session import stored_copy
from xpyd_sidecar.transport import landing, moves

BLOCKS, LAYERS, BLOCK_BYTES = 64, 3, 16384


@pytest.mark.parametrize(("tokens", "seconds"), parameters.PLAIN_TTFT)
def test_a_prompt_computed_in_chunks_takes_what_the_plain_engine_took(tokens: int, seconds: float) -> None:
    chunks = [(start, min(parameters.CHUNK_TOKENS, tokens - start)) for start in range(0, tokens, parameters.CHUNK_TOKENS)]
    assert sum(parameters.forward_s([chunk]) for chunk in chunks) == pytest.approx(seconds)


def test_between_two_points_it_is_straight_and_goes_on_at_both_ends_but_never_below_nothing() -> None:
    points = ((2.0, 10.0), (4.0, 14.0), (8.0, 30.0))
    assert [parameters.straight(points, x) for x in (0, 2, 3, 4, 6, 8, 10, -10)] == [6, 10, 12, 14, 22, 30, 38, 0]
    with pytest.raises(ValueError, match="1 points"):
        parameters.straight(points[:1], 2.0)


def test_prompts_shorter_than_the_shortest_take_as_long() -> None:
    assert parameters.plain_s(1) == parameters.plain_s(256) == parameters.PLAIN_TTFT[0][1]


def test_tokens_of_decode_cost_nothing_beside_a_prompt_and_a_step_of_them_alone_what_it_takes() -> None:
    known = dict(parameters.PLAIN_TTFT)
    assert parameters.forward_s([(700, 1), (9000, 1)]) == parameters.DECODE_STEP_S
    assert parameters.forward_s([(0, 4096), (700, 1)]) == pytest.approx(known[4096])
    assert parameters.forward_s([(0, 256), (0, 1024)]) == pytest.approx(known[256] + known[1024])


def test_host_and_device_together_take_for_a_copy_what_was_measured() -> None:
    for tokens, row in ((tokens, parameters._DEVICE[f"{tokens} tokens"]) for tokens in (256, 1024, 4096)):
        size = tokens * parameters.TOKEN_BYTES
        assert size == row["MiB"] << 20
        assert parameters.gather_host_s(size) + parameters.gather_s(size) == pytest.approx(row["gather"] / 1e3)
        assert parameters.scatter_host_s(size) + parameters.scatter_s(size) == pytest.approx(row["scatter"] / 1e3)


def test_what_was_measured_of_other_runs_stands_beside_the_one_that_is_predicted() -> None:
    assert set(parameters.MEASURED_TTFT) == {"MPS", "turns"}
    assert parameters.RUN == "MPS"
    assert all(times.keys() == dict(parameters.PLAIN_TTFT).keys() for times in parameters.MEASURED_TTFT.values())


def test_sizes_are_those_of_the_model() -> None:
    assert (parameters.BLOCK_BYTES, parameters.TOKEN_BYTES) == (64 << 10, 144 << 10)


# --- counting ---

def test_counts_are_by_thread_and_spans_begin_anew_when_they_are_told_to() -> None:
    counters = Counters()
    thread = threading.Thread(target=lambda: counters.add_here("wakes", 2), name="xpyd-sender")
    thread.start()
    thread.join()
    counters.span("link", 10.0, 11.0)
    counters.span("link", 10.5, 13.0)
    first = counters.taken()
    assert (first["wakes xpyd-sender"], first["began link"], first["ended link"]) == (2, 10.0, 13.0)
    assert first[f"cpu {threading.current_thread().name}"] > 0
    counters.add("launches", 3)
    counters.anew()
    counters.span("link", 20.0, 20.5)
    found = counting.difference(counters.taken(), first)
    assert {name: value for name, value in found.items() if name[:4] != "cpu "} == {
        "launches": 3, "began link": 20.0, "ended link": 20.5}


def test_difference_leaves_out_what_has_not_changed() -> None:
    after, before = {"a": 3, "b": 1, "began in": 2.0}, {"a": 1, "b": 1, "began in": 1.0}
    assert counting.difference(after, before) == {"a": 2, "began in": 2.0}


def test_what_rests_when_nothing_is_handed_over_is_told_from_what_goes_by_the_clock() -> None:
    found = {"frames TAKEN": 1, "frames PING": 2, "control Ping": 3, "control Announce": 1, "calls bring": 2, "steps": 9}
    assert counting.handed_over(found) == {"frames TAKEN": 1, "control Announce": 1, "calls bring": 2}


# --- bytes ---

@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> ByteWork:
    made = ByteWork(Counters())
    monkeypatch.setattr(byte_work, "time", SimpleNamespace(sleep=lambda _: None))
    return made


def test_bytes_that_the_connectors_code_sums_or_copies_are_counted_and_worked_on_as_before(
        work: ByteWork, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((moves, "sums"), (stored_copy, "sums_of"), (landing, "Scatter")):
        monkeypatch.setattr(module, name, getattr(module, name))
    data, array = memoryview(b"\1" * 4096), PackedArray(0, 4, 2, 512, 4)
    right = moves.sums(data, 512), packing.sums_of(data, array).tolist()
    work.watch()
    assert (moves.sums(data, 512), stored_copy.sums_of(data, array).tolist()) == right
    assert work._counters.taken()["bytes summed"] == 8192
    landing.rows_in(memoryview(bytearray(4096)), 4)
    assert work._counters.taken()["bytes copied"] == 4096


def test_what_a_core_does_for_cuda_is_a_wait_and_counted_where_it_touches_bytes(work: ByteWork) -> None:
    work.first_touch(2_900_000)
    work.driver_read(5_710_000)
    work.registered(1 << 30)
    counts = work._counters.taken()
    assert (counts["bytes touched"], counts["bytes copied"]) == (2_900_000, 5_710_000)
    spent = counts[f"bytes_s {threading.current_thread().name}"]
    assert spent == pytest.approx(1e-3 + 1e-3 + parameters._DEVICE["mapped"]["registered"][2])


# --- the device ---

@pytest.fixture
def scripted() -> device.ScriptedDevice:
    return device.ScriptedDevice(Counters())


class Rank(NamedTuple):
    memory: device.ScriptedCache
    copies: device.ScriptedCopies
    runtime: device.ScriptedRuntime


@pytest.fixture
def rank(scripted: device.ScriptedDevice, work: ByteWork, monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.setattr(kv_cache, "logical", lambda region: True)
    runtime = device.ScriptedRuntime(work)
    copies = device.ScriptedCopies(scripted, work, runtime)
    caches = {f"layer{n}": torch.full((BLOCKS, 2, 16, 128), float(n)) for n in range(LAYERS)}
    memory = device.ScriptedCache(copies, caches, BLOCKS)
    memory.prepare(1 << 20, 1 << 20, {"layer0": 2, "layer1": 2, "layer2": 2})
    return Rank(memory, copies, runtime)


def packed_rows(memory: device.ScriptedCache, ids: int = 4) -> PackedRows:
    layout = PackedArray(0, ids, 2, BLOCK_BYTES // 2, 16)
    places = [(layout, at * layout.size) for at in range(LAYERS)]
    rows = memory.rows([kv_cache.CacheRows([*range(LAYERS)], places, np.arange(ids, dtype=np.int64))])
    return PackedRows(rows, places, LAYERS * layout.size)


def test_a_cache_on_it_is_a_devices(rank: Rank) -> None:
    assert rank.memory.device.type == "cuda"
    assert not rank.memory.at_once
    assert rank.memory.most_bytes == 1 << 20
    assert rank.memory.block_bytes == (BLOCK_BYTES,) * LAYERS
    assert {layout.run for layout in rank.memory.layouts({"layer0": 2, "layer1": 2, "layer2": 2})} == {16}


def test_copies_out_wait_for_what_is_computed_and_touch_nothing(scripted: device.ScriptedDevice, rank: Rank) -> None:
    host = torch.zeros(LAYERS * 4 * BLOCK_BYTES, dtype=torch.uint8)
    step = scripted.forward(60.0, time.monotonic())
    mark, sums = rank.copies.gather(packed_rows(rank.memory), [(host, 0)])
    assert mark.when > step.when
    assert not mark.done()
    assert not mark.wait(0.001)
    assert sums.read().tolist() == [0] * 2 * LAYERS
    assert not host.any()
    assert rank.memory.regions[2].eq(2).all()


def test_a_mark_passes_when_the_clock_has_come_to_it() -> None:
    mark = device.ScriptedMark(time.monotonic() + 0.02)
    assert mark.wait(60.0)
    assert mark.done()
    assert time.monotonic() >= mark.when


def test_a_layer_ends_no_sooner_than_the_host_has_launched_it_and_no_sooner_than_the_device_has_computed_it(
        scripted: device.ScriptedDevice) -> None:
    now = time.monotonic()
    assert scripted.forward(0.001, now - 0.5).when >= now  # launches held it up
    assert scripted.forward(0.5, now).when >= now + 0.5
    assert scripted.forward(0.5, now).when >= now + 1.0


def test_what_comes_waits_for_nothing_but_its_own_and_what_is_placed_for_that_and_the_loads_moment(
        scripted: device.ScriptedDevice, rank: Rank) -> None:
    host = torch.zeros(1 << 16, dtype=torch.uint8)
    rank.runtime.cudaHostRegister(host.data_ptr(), len(host), 0)
    scripted.forward(60.0, time.monotonic())
    moment = rank.copies.moment()
    brought = rank.copies.bring([(host, 0)])
    assert brought.when < moment.when
    placed, _ = rank.copies.scatter(packed_rows(rank.memory), 0, [brought])
    assert placed.when < moment.when
    placed, sums = rank.copies.scatter(packed_rows(rank.memory), 0, [brought, moment])
    assert placed.when >= moment.when
    assert len(sums.read()) == 2 * LAYERS


def test_memory_is_read_as_fast_as_cuda_knows_it(rank: Rank, work: ByteWork) -> None:
    size = 1 << 20
    mapped, pinned, unknown = (torch.zeros(size, dtype=torch.uint8) for _ in range(3))
    assert rank.copies.register(mapped.data_ptr(), size) == rank.runtime.cudaHostRegister(pinned.data_ptr(), size, 0) == 0

    def took(host: torch.Tensor) -> float:
        began = max(rank.copies._scripted._come, time.monotonic())
        return rank.copies.bring([(host, 0)]).when - began

    assert took(mapped) >= size / parameters.MAPPED_READ
    assert took(pinned) >= size / parameters.PINNED_READ
    assert "bytes copied" not in work._counters.taken()
    took(unknown)
    assert work._counters.taken()["bytes copied"] == size
    assert rank.copies.unregister(mapped.data_ptr()) == rank.runtime.cudaHostUnregister(pinned.data_ptr()) == 0
    took(mapped)
    took(pinned)
    assert work._counters.taken()["bytes copied"] == 3 * size


def test_bytes_that_are_not_all_of_one_part_are_not_known() -> None:
    known = device.Ranges()
    known.add(1000, 100)
    known.add(1100, 100)
    assert known.holds(1000, 100)
    assert known.holds(1150, 50)
    assert not known.holds(1050, 100)
    assert not known.holds(999, 1)
    known.remove(1100)
    assert not known.holds(1150, 50)


def test_to_enqueue_a_copy_costs_the_host_what_it_cost_on_the_real_one_and_is_counted(
        scripted: device.ScriptedDevice, rank: Rank) -> None:
    host = torch.zeros(LAYERS * 4 * BLOCK_BYTES, dtype=torch.uint8)
    rank.runtime.cudaHostRegister(host.data_ptr(), len(host), 0)
    packed = packed_rows(rank.memory)
    began = time.thread_time()
    rank.copies.gather(packed, [(host, 0)])
    assert time.thread_time() - began >= parameters.gather_host_s(packed.size)
    began = time.thread_time()
    rank.copies.scatter(packed, 0, [rank.copies.bring([(host, 0)])])
    assert time.thread_time() - began >= parameters.BRING_HOST_S + parameters.scatter_host_s(packed.size)
    counts = scripted._counters.taken()
    assert [counts[f"calls {call}"] for call in ("gather", "bring", "scatter")] == [1, 1, 1]
    # tables, rows, sums, sums to the host, and the copy; the copy; tables, rows, sums, sums to the host
    assert counts["launches"] == rank.copies.launches == 5 + 1 + 4


def test_a_fence_holds_up_later_steps_until_what_leaves_has_left(scripted: device.ScriptedDevice, rank: Rank) -> None:
    rank.memory.fence()
    assert scripted.forward(60.0, time.monotonic()).when < time.monotonic() + 61.0
    scripted.leave(60.0)
    mark, _ = rank.copies.gather(packed_rows(rank.memory), [])
    rank.memory.fence()
    assert scripted.forward(0.1, time.monotonic()).when == pytest.approx(mark.when + 0.1)


# --- figures ---

def counts(**more: float) -> dict[str, dict[str, float]]:
    prefill = {"frames MANIFEST": 6, "frames SUMS": 6, "frames PING": 3, "control Announce": 1, "control Ping": 2,
               "wakes xpyd-sender": 7, "calls gather": 6, "launches": 30}
    decode = {"frames TAKEN": 6, "frames ASK": 1, "frames DONE": 1, "control Pong": 2, "launches": 200, "calls bring": 36,
              "began in": 100.4, "ended place": 100.9, "steps empty": 9, "steps": 3, "wakes xpyd-receiver": 70,
              "wakes xpyd-arrivals": 35, "naps engine": 11, **more}
    return {"prefill": dict(prefill), "decode": decode}


def figures(ttft: float = 0.25, tokens: int = 8192) -> dict[str, Any]:
    plain, handed = [[0.2, 0.21], [0.22, 0.23], [0.4, 0.41]], report.Handed(100.0, [ttft, ttft + 0.004], counts())
    return report.length_figures(tokens, plain, [handed] * 3)


def test_a_lengths_figures_are_medians_beside_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "MEASURED_TTFT", {"MPS": {8192: 0.2}, "turns": {8192: 0.5}})
    row = figures()
    assert (row["plain_ttft_ms"], row["ttft_ms"], row["ratio"], row["second_token_ms"]) == (220.0, 250.0, 1.14, 4.0)
    assert row["measured_ttft_ms"] == {"MPS": 200.0, "turns": 500.0}
    assert row["off"] == {"MPS": 0.25, "turns": -0.5}
    assert row["when_ms"] == {"in_began": 400.0, "place_ended": 900.0}
    assert row["link_gb_s"] == round(1152 * 2**20 / 0.5 / 1e9, 2)
    assert (row["manifests"], row["gathers"], row["fetches"]) == (6, 6, 36)
    assert (row["launches_prefill"], row["launches_decode"], row["empty_steps_decode"]) == (30, 200, 9)
    assert figures(tokens=512)["off"] == {}


def test_messages_that_come_by_the_clock_are_none_of_a_prompts() -> None:
    row = figures()
    assert (row["frames_to_decode"], row["frames_to_prefill"], row["control_messages"]) == (12, 8, 1)
    assert report.messages(row) == 21
    assert report.wakes(row) == 7 + 70 + 35
    assert report.touched(row) == 0
    row = report.length_figures(8192, [[1.0, 2.0]], [report.Handed(0.0, [1.0, 2.0], counts(**{"bytes copied": 5}))])
    assert report.touched(row) == 5


def test_a_threads_share_is_what_the_kernel_saw_and_the_work_on_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "MEASURED_SHARES", {"prefill engine": 0.3})
    monkeypatch.setattr(parameters, "PROFILED_PROMPT_S", 0.1)
    seen = {"prefill": {"cpu xpyd-sender": 0.5, "bytes_s engine": 0.6, "cpu engine": 0.9, "runner_s engine": 0.15,
                        "launch_s engine": 0.05}, "decode": {}}
    found = report.shares(seen, 5.0, 3)
    assert found["prefill engine"] == {
        "processor": 0.18, "of_it_scripted": 0.04, "byte_work": 0.12, "share": 0.3, "measured": 0.3, "off": 0,
        "prompt_ms": 500.0, "measured_prompt_ms": 30.0, "off_prompt": 15.67}
    assert "measured" not in found["prefill sender"]


def test_gaps_between_tokens_count_where_they_end_and_their_percentiles_are_values() -> None:
    streams = [[0.0, 0.1, 0.2, 0.9], [0.05, 0.15, 3.0]]
    assert report.gaps(streams, 0.1, 1.0) == {"count": 4, "p50_ms": 100.0, "p99_ms": 700.0, "most_ms": 700.0}


def test_what_is_further_off_than_a_quarter_is_named_and_the_table_has_a_line_for_each(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "MEASURED_TTFT", {"MPS": {8192: 0.2}, "turns": {8192: 0.5}})
    monkeypatch.setattr(parameters, "MEASURED_SHARES", {"prefill engine": 0.3})
    shares = report.shares({"prefill": {"cpu engine": 0.2}, "decode": {}}, 1.0, 1)
    result = {"lengths": {"8192": figures(0.24), "512": figures(tokens=512)}, "shares": shares}
    assert report.verdict(result) == ["prefill engine: 20% of a core, measured 30% (-33%)"]
    result["lengths"]["8192"] = figures(0.3)
    assert report.verdict(result)[0] == "8192 tokens: 300.0 ms, measured 200.0 (+50%)"
    text = report.table(result | {"beside": {"with hand-over": {"p99_ms": 5.0}}, "with_room": result["lengths"]})
    lines = text.splitlines()
    assert sum(line.startswith("off: ") for line in lines) == 2
    assert sum(line.startswith("  8192 ") for line in lines) == 2
    assert report.verdict({}) == []
