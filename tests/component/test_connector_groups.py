"""Models of several KV cache groups, by hand: vLLM's own managers say which blocks are whose, and free ones are ruined.

What decode's next token would read is compared token by token with what prefill's kernels wrote: over all, over its window,
and the state after what was handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from connector_sides import BLOCK, Engine, idle, making, until
from copies import RUNNERS
from grouped_sides import BLOCKS, MODELS, PAGE, USED, WINDOW, GroupedEngine, Job
from more_cases import more

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.engine.stats import LINK
from xpyd_sidecar.engine.worker.kv_cache import CacheRows, KvCache
from xpyd_sidecar.kv.manifests import PlacedArray, layout
from xpyd_sidecar.kv.packing import PackedArray
from xpyd_sidecar.kv.reach import LayerGroup
from xpyd_sidecar.memory import device_rows
from xpyd_sidecar.session.stored_copy import StoredCopy

pytestmark = pytest.mark.timeout(300)
EDGE = WINDOW + BLOCK - 1
"""Of the prompts whose ``(N - W + 1) % b`` is 0, the shortest for which blocks are freed."""
PROMPTS = (2, 3, BLOCK, BLOCK + 1, BLOCK + 2, WINDOW, WINDOW + 1, EDGE - 1, EDGE, EDGE + 1, EDGE + BLOCK, 100, 200)


@pytest.fixture
def make(tmp_path: Path, copies: dict[str, Any]) -> Iterator[Callable[..., GroupedEngine]]:
    def engine(name: str, kind: str | tuple[str, ...], **options: Any) -> GroupedEngine:
        reaches = MODELS[kind] if isinstance(kind, str) else kind
        return GroupedEngine(name, tmp_path, reaches, **copies, **options)

    with making(engine) as build:
        yield build


def over(p: Engine, d: Engine) -> None:
    until(lambda: idle(p) and idle(d), p, d)


def test_the_edge_is_one() -> None:
    assert (EDGE - WINDOW + 1) % BLOCK == 0


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("copies", [*RUNNERS[:2], *more(RUNNERS[2:])], indirect=True)
def test_all_that_the_next_token_reads_is_there_whatever_the_prompt_and_its_chunks(make: Callable[..., GroupedEngine],
                                                                                   kind: str) -> None:
    p, d = make("p", kind), make("d", kind)
    for chunk in (7, 20, 64, 512):
        for prompt in PROMPTS:
            job = Job(p, d, prompt=prompt)
            job.prefill(chunk)
            held = job.end_prefill()
            job.load()
            assert job.wrong() == [], (kind, chunk, prompt)
            if held:
                until(lambda name=job.theirs.request_id: name in p.sent, p, d)
                job.give_back()
            job.leave()
    over(p, d)
    assert d.counts["receive/ok"] == p.counts["send/ok"] == 4 * len(PROMPTS)


@pytest.mark.parametrize("kind", MODELS)
def test_decode_may_ask_before_prefill_begins_and_many_requests_share_the_blocks(make: Callable[..., GroupedEngine],
                                                                                 kind: str) -> None:
    p, d = make("p", kind), make("d", kind)
    jobs = [Job(p, d, prompt=prompt) for prompt in (EDGE, 30, EDGE + 1, 20)]
    for job in jobs:
        job.prefill(16, most=16)
        job.ask()
    for job in jobs:
        job.prefill(16)
        if not job.end_prefill():
            continue
        until(lambda name=job.theirs.request_id: name in p.sent, p, d)
        job.give_back()
    assert all(job.wait() for job in jobs)
    assert [job.wrong() for job in jobs] == [[]] * len(jobs)
    over(p, d)


def test_of_a_window_its_blocks_are_moved_and_of_a_state_one_whatever_the_prompt(make: Callable[..., GroupedEngine]
                                                                                 ) -> None:
    p, d = make("p", "every kind"), make("d", "every kind")
    job = Job(p, d, prompt=460)
    job.prefill(64)
    if job.end_prefill():
        until(lambda: job.theirs.request_id in p.sent, p, d)
        job.give_back()
    job.load()
    assert job.wrong() == []
    over(p, d)
    moved = sum(value for name, value in d.counts.items() if name.startswith(LINK))
    window = -(-WINDOW // BLOCK) + 1
    assert moved == d.counts[metrics.LOADED_BYTES] <= -(-459 // BLOCK) * PAGE + window * PAGE + USED
    assert moved >= -(-459 // BLOCK) * PAGE + USED + PAGE


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("copies", ["at once"], indirect=True)
def test_each_groups_data_ruined_in_turn_is_found(make: Callable[..., GroupedEngine], kind: str) -> None:
    p, d = make("p", kind, transport="tcp"), make("d", kind, transport="tcp")
    for region in range(len(MODELS[kind])):
        job = Job(p, d, prompt=EDGE + 5)
        job.prefill(20)
        job.end_prefill()
        ruin(p, job, region, summed=True)
        job.ask()
        assert not job.wait(), region
        job.leave()
        over(p, d)
    assert d.counts["receive/checksum"] == len(MODELS[kind])


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("copies", ["at once"], indirect=True)
def test_each_groups_data_matters(make: Callable[..., GroupedEngine], kind: str) -> None:
    """What is compared above would show it: without checksums the same is loaded, and is wrong in that layer alone."""
    p, d = (make(name, kind, transport="tcp", checksum="disabled") for name in "pd")
    layers = set()
    for region in range(len(MODELS[kind])):
        job = Job(p, d, prompt=EDGE + 5)
        job.prefill(20)
        job.end_prefill()
        ruin(p, job, region, summed=False)
        job.load()
        wrong = {layer for layer, _ in job.wrong()}
        assert len(wrong) == 1
        layers |= wrong
        job.leave()
        over(p, d)
    assert layers == set(range(len(MODELS[kind])))


def ruin(p: GroupedEngine, job: Job, region: int, *, summed: bool) -> None:
    """One byte of an array's last copy is another, after its sum was made: of a token that the next one reads."""
    publisher = p.workers[0]._publisher
    end = p.workers[0].address().arrays[region].kind.reach.final_blocks(job.tokens, job.tokens)

    def last() -> list[tuple[StoredCopy, PlacedArray]]:
        return [(copy, one) for copy in list(publisher._copies.values()) for one in layout(copy.manifest(0), copy._arrays)
                if one.region == region and one.packed.first + one.packed.blocks == end]

    until(lambda: any(copy.sums or not summed for copy, _ in last()), p)
    ((copy, one),) = last()
    assert bool(copy.sums) is summed
    copy.view[one.offset - copy.offset + one.packed.place(end - 1, 0)] ^= 0xFF


def test_prefill_of_a_model_with_states_stops_before_the_last_token_and_of_others_does_not(
        make: Callable[..., GroupedEngine]) -> None:
    for kind, asked in (("states", 59), ("windows", 60)):
        p, d = make(f"p-{kind}", kind), make(f"d-{kind}", kind)
        job = Job(p, d, prompt=60)
        job.theirs.max_tokens = 500
        job.prefill(512)
        assert job.theirs.max_tokens == 1, "windows move on with each token more"
        assert job.theirs.num_prompt_tokens == job.theirs.num_computed_tokens == asked
        assert len(job.theirs._all_token_ids) == len(job.theirs.prompt_token_ids) == asked
        assert job.ours.num_prompt_tokens == 60
        job.end_prefill()
        job.load()
        assert job.wrong() == []


def test_a_prompt_of_one_token_is_an_ordinary_request_for_both(make: Callable[..., GroupedEngine]) -> None:
    p, d = make("p", "states"), make("d", "states")
    job = Job(p, d, prompt=1)
    assert d.scheduler.match_tokens(job.ours, 0) == (0, False)
    job.prefill(512)
    assert job.theirs.num_prompt_tokens == 1
    assert not job.end_prefill()
    over(p, d)
    assert not {name for name in (*p.counts, *d.counts) if name.startswith(("send/", "receive/"))}


def test_a_prompt_whose_logprobs_are_asked_for_is_not_cut_and_not_handed_over(make: Callable[..., GroupedEngine]) -> None:
    p, d = make("p", "states"), make("d", "states")
    job = Job(p, d, prompt=60)
    for one in (job.theirs, job.ours):
        assert one.sampling_params is not None
        one.sampling_params.skip_reading_prefix_cache = True
    job.prefill(512)
    assert job.theirs.num_prompt_tokens == 60
    assert not job.end_prefill()
    over(p, p)
    assert not {name for name in p.counts if name.startswith("send/")}


def test_a_block_that_prefill_lacks_ends_the_transfer_and_decode_computes(make: Callable[..., GroupedEngine]) -> None:
    p, d = make("p", "windows"), make("d", "windows")
    job = Job(p, d, prompt=90)
    lost = p.tables_of
    p.tables_of = lambda request: tuple([0] * len(one) for one in lost(request))  # type: ignore[method-assign]
    job.prefill(512)
    until(lambda: d.scheduler.match_tokens(job.ours, 0) == (0, False), p, d)
    d.scheduler.on_allocated(job.ours, [[0] * 6] * 4, 0)
    over(p, d)
    assert p.counts["send/protocol"] == d.counts["receive/protocol"] == 1


def test_a_block_that_decode_lacks_fails_the_load_and_nothing_is_written(make: Callable[..., GroupedEngine]) -> None:
    p, d = make("p", "windows"), make("d", "windows")
    job = Job(p, d, prompt=90)
    job.prefill(512)
    job.end_prefill()
    until(lambda: d.scheduler.match_tokens(job.ours, 0) == (89, True), p, d)
    d.scheduler.on_allocated(job.ours, [[0] * 6, [0] * 6, [0] * 6, [1, 2, 3, 4, 5, 6]], 89)
    assert not job.wait()
    assert not any(bool(cache.any()) for cache in d.caches[0].values())
    over(p, d)
    assert d.counts["receive/protocol"] == 1


def test_engines_whose_windows_or_states_differ_refuse_each_other_by_field(make: Callable[..., GroupedEngine],
                                                                           caplog: pytest.LogCaptureFixture) -> None:
    for at, (ours, theirs, text) in enumerate([
            (("window", "window"), "oss", "kv cache layer1, reach.over: all in decode, window in prefill"),
            ("states", "oss", "fingerprint: states: ")]):
        p, d = make(f"p{at}", ours), make(f"d{at}", theirs)
        job = Job(p, d, prompt=60)
        job.prefill(512)
        until(lambda job=job, d=d: d.scheduler.match_tokens(job.ours, 0) == (0, False), p, d)
        assert text in caplog.text


@pytest.mark.parametrize("kind", ["windows", "oss"])
@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1)])
def test_windows_between_unequal_tensor_sizes_are_cut_by_heads(make: Callable[..., GroupedEngine], kind: str, ours: int,
                                                               theirs: int) -> None:
    p, d = make("p", kind, tensor=theirs), make("d", kind, tensor=ours)
    for chunk, prompt in product((20, 64), (2, BLOCK + 1, EDGE - 1, EDGE, EDGE + 1, EDGE + BLOCK, 200)):
        job = Job(p, d, prompt=prompt)
        job.prefill(chunk)
        held = job.end_prefill()
        job.load()
        assert job.wrong() == [], (chunk, prompt)
        if held:
            until(lambda name=job.theirs.request_id: name in p.sent, p, d)
            job.give_back()
        job.leave()
    over(p, d)
    assert d.counts["receive/ok"] == p.counts["send/ok"] == 14


@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1)])
def test_states_between_unequal_tensor_sizes_are_refused_by_field_and_decode_computes(
        make: Callable[..., GroupedEngine], ours: int, theirs: int, caplog: pytest.LogCaptureFixture) -> None:
    p, d = make("p", "states", tensor=theirs), make("d", "states", tensor=ours)
    job = Job(p, d, prompt=60)
    job.prefill(512)
    until(lambda: d.scheduler.match_tokens(job.ours, 0) == (0, False), p, d)
    assert "parallel.tensor: sizes differ, and kv cache layer0 is a state, which is not cut; give" in caplog.text
    d.scheduler.on_allocated(job.ours, [[0], [0] * 4], 0)
    over(p, d)
    assert p.counts["send/incompatible"] == d.counts["receive/incompatible"] == 1


@pytest.mark.parametrize("kind", MODELS)
def test_mode_get_brings_all_groups_once_there_are_blocks(make: Callable[..., GroupedEngine], kind: str) -> None:
    p, d = make("p", kind, mode="get"), make("d", kind, mode="get")
    for chunk, prompt in product((20, 512), (2, EDGE, 100)):
        job = Job(p, d, prompt=prompt)
        job.prefill(chunk)
        if job.end_prefill():
            until(lambda name=job.theirs.request_id: name in p.sent, p, d)
            job.give_back()
        job.load()
        assert job.wrong() == [], (chunk, prompt)
        job.leave()
    over(p, d)
    assert d.counts["receive/ok"] == p.counts["send/ok"] == 6
    assert metrics.BUFFERED_BYTES not in d.counts


@pytest.mark.parametrize("copies", ["at once"], indirect=True)
def test_while_decode_has_no_room_windows_go_into_its_buffer_and_states_stay(make: Callable[..., GroupedEngine]) -> None:
    for kind in ("windows", "states"):
        p, d = make(f"p-{kind}", kind, keep_bytes=16 * PAGE), make(f"d-{kind}", kind, buffer_bytes=1 << 20)
        job = Job(p, d, prompt=300)
        job.prefill(20, most=260)
        until(lambda job=job, d=d: d.scheduler.match_tokens(job.ours, 0)[0], d)
        if kind == "windows":  # decode's request waits for blocks
            until(lambda d=d: d.counts.get(metrics.BUFFERED_BYTES, 0) > 0, p, d)
        else:
            for _ in range(20):
                p.step()
                d.step()
        job.ask()
        job.prefill(20)
        job.end_prefill()
        assert job.wait()
        assert job.wrong() == []
        over(p, d)
        assert bool(d.counts.get(metrics.BUFFERED_BYTES)) == (kind == "windows")


def test_a_load_that_prefill_leaves_is_reported_failed_and_whole_blocks_of_it_do_not_count(
        make: Callable[..., GroupedEngine]) -> None:
    p, d = make("p", "every kind"), make("d", "every kind", load_timeout_s=2.0)
    job = Job(p, d, prompt=90)
    job.prefill(20, most=60)
    job.ask()
    p.scheduler.on_request_ended(job.theirs)  # aborted before it has computed all
    assert not job.wait()
    over(p, d)
    assert "receive/ok" not in d.counts


@pytest.mark.parametrize("copies", ["late"], indirect=True)
def test_a_step_is_one_gather_a_fetch_one_scatter_and_a_launch_each_shape_of_block(make: Callable[..., GroupedEngine]
                                                                                   ) -> None:
    p, d = make("p", "windows"), make("d", "windows")
    job = Job(p, d, prompt=60)
    job.prefill(512)
    job.end_prefill()
    assert p.workers[0]._memory.copies.gathers == 1
    job.load()
    assert d.workers[0]._memory.copies.scatters == 4, "as many as groups, each of which has copies of its own"
    reaches = ("window", "all", "state")
    layers = {f"layer{at}.{reach}": cache for at in range(12)
              for reach, cache in zip(reaches, GroupedEngine.memory(reaches).values(), strict=True)}
    groups = {name: LayerGroup(reaches.index(name.partition(".")[2])) for name in layers}
    cache = KvCache(layers, BLOCKS, groups)
    assert [len(cache.of_group(group)) for group in range(3)] == [12, 12, 12]
    layouts = cache.layouts({})
    moves = [CacheRows([*regions], [(PackedArray(0, 2, *layouts[region]), at << 12) for at, region in enumerate(regions)],
                       np.array([3, 9])) for regions in map(cache.of_group, range(3))]
    tables = device_rows.tables(cache.rows(moves), 0)
    assert sorted(len(table.addresses) for table in tables) == [12 * 2, 2 * 12 * 2]
