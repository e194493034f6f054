"""Which heads of which layers go from which prefill rank to which decode rank."""

from __future__ import annotations

from itertools import pairwise, product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_sidecar.kv import mapping
from xpyd_sidecar.kv.array_layout import ArrayPart
from xpyd_sidecar.kv.mapping import UNKNOWN, Array, ArrayKind, Geometry, Source, Unmappable
from xpyd_sidecar.kv.reach import Reach

TENSORS = (1, 2, 3, 4, 6, 8)
WINDOW, STATE = Reach("window", 16, 200), Reach("state", 0)


def links(plan: mapping.Plan) -> int:
    """How many pairs of ranks exchange KV."""
    return sum(len(sources) for sources in plan)


def held(total: int, tensor: int, rank: int) -> list[int]:
    """The heads of a rank, counted as vLLM's QKVParallelLinear shards them."""
    if total == 0:
        return [0]
    if tensor >= total:
        return [rank // (tensor // total)]
    return list(range(rank * (total // tensor), (rank + 1) * (total // tensor)))


def kind(total: int, tensor: int, size: int = 64) -> ArrayKind:
    return ArrayKind("float32", len(held(total, tensor, 0)), (4, 4), size, total)


def engine(tensor: int, stages: list[list[str]], totals: dict[str, int]) -> Geometry:
    return mapping.geometry(tensor, [[Array(name, kind(totals[name], tensor)) for name in stage]
                                     for stage in stages for _ in range(tensor)])


def model(tensor: int, pipeline: int = 1, *, total: int = 4, layers: int = 4) -> Geometry:
    names = [f"layer{n}" for n in range(layers)]
    each = layers // pipeline
    return engine(tensor, [names[s * each:(s + 1) * each] for s in range(pipeline)], dict.fromkeys(names, total))


def fits(total: int, tensor: int) -> bool:
    return total == 0 or total % tensor == 0 or tensor % total == 0


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Geometry, Geometry, dict[str, int]]:
    """Two engines of one model, with sizes that can be mapped; layers may differ in heads."""
    tensors = draw(st.tuples(st.sampled_from(TENSORS), st.sampled_from(TENSORS)))
    names = [f"l{n}" for n in range(draw(st.integers(1, 9)))]
    heads = [n for n in (0, 1, 2, 3, 4, 6, 8, 12, 24) if all(fits(n, t) for t in tensors)]
    totals = {name: draw(st.sampled_from(heads)) for name in names}
    stages = []
    for _ in range(2):
        cuts = sorted(draw(st.sets(st.integers(1, len(names)), max_size=3)) | {0, len(names)})
        stages.append([names[a:b] for a, b in pairwise(cuts)])
    return engine(tensors[0], stages[0], totals), engine(tensors[1], stages[1], totals), totals


@settings(max_examples=300)
@given(pairs())
def test_every_head_of_every_layer_of_every_decode_rank_comes_from_one_source_that_has_it(
        pair: tuple[Geometry, Geometry, dict[str, int]]) -> None:
    prefill, decode, totals = pair
    made = mapping.plan(prefill, decode)
    assert len(made) == decode.ranks
    takers = {rank: sum(rank in [source.rank for source in sources] for sources in made) for rank in range(prefill.ranks)}
    assert all(takers.values()), "a rank that nobody asks would keep its copies"
    for rank, sources in enumerate(made):
        stage, t = divmod(rank, decode.tensor)
        ours = decode.arrays(stage)
        got: dict[tuple[str, int], int] = {}
        assert len({source.rank for source in sources}) == len(sources)
        for source in sources:
            assert source.takers == takers[source.rank]
            theirs = prefill.arrays(source.rank // prefill.tensor)
            assert source.arrays == tuple(one.kind.layout for one in theirs)
            assert len({region for region, _ in source.parts}) == len(source.parts), "each array once"
            for region, part in source.parts:
                there, here = theirs[region], ours[part.into]
                assert there.name == here.name
                has = held(totals[here.name], prefill.tensor, source.rank % prefill.tensor)
                wants = held(totals[here.name], decode.tensor, t)
                assert wants[part.at:part.at + part.heads] == has[part.head:part.head + part.heads]
                for head in range(part.at, part.at + part.heads):
                    got[here.name, head] = got.get((here.name, head), 0) + 1
        assert got == {(one.name, head): 1 for one in ours for head in range(one.kind.heads)}


@settings(max_examples=100)
@given(pairs())
def test_equal_sizes_take_whole_ranks(pair: tuple[Geometry, Geometry, dict[str, int]]) -> None:
    prefill, _, _ = pair
    for rank, sources in enumerate(mapping.plan(prefill, prefill)):
        layouts = tuple(one.kind.layout for one in prefill.arrays(rank // prefill.tensor))
        parts = tuple((at, ArrayPart(at, 0, one.heads, 0)) for at, one in enumerate(layouts))
        assert sources == (Source(rank, 1, layouts, parts),)


def test_one_prefill_and_two_decode_engines_of_two_ranks_form_four_links_and_seven_nccl_groups() -> None:
    p, d1, d2 = model(2), model(2), model(2)
    kv = links(mapping.plan(p, d1)) + links(mapping.plan(p, d2))
    own = sum(one.tensor > 1 for one in (p, d1, d2))
    assert (kv, kv + own) == (4, 7)


@pytest.mark.parametrize(("p", "d", "count"), [
    (model(1), model(2), 2), (model(2), model(1), 2), (model(4), model(2), 4), (model(2), model(4), 4),
    (model(2, 2), model(2), 4), (model(1), model(1, 2), 2), (model(1, 2), model(2), 4),
    (model(4, total=2), model(2, total=2), 4),  # each head is on two prefill ranks: decode spreads over both
    (model(2, total=0), model(2, total=0), 2), (model(4, total=0), model(1, total=0), 4),
    (model(1, total=0), model(4, total=0), 4),
])
def test_the_number_of_links(p: Geometry, d: Geometry, count: int) -> None:
    assert links(mapping.plan(p, d)) == count


def takes(plan: mapping.Plan) -> list[list[tuple[int, int, tuple[tuple[int, ArrayPart], ...]]]]:
    """Rank, takers and parts of each source, by decode rank."""
    return [[(one.rank, one.takers, one.parts) for one in sources] for sources in plan]


def heads(head: int, count: int, at: int, arrays: range = range(4)) -> tuple[tuple[int, ArrayPart], ...]:
    return tuple((region, ArrayPart(region, head, count, at)) for region in arrays)


def test_one_rank_is_cut_in_two() -> None:
    assert takes(mapping.plan(model(1), model(2))) == [[(0, 2, heads(0, 2, 0))], [(0, 2, heads(2, 2, 0))]]


def test_two_ranks_are_laid_side_by_side() -> None:
    assert takes(mapping.plan(model(2), model(1))) == [[(0, 1, heads(0, 2, 0)), (1, 1, heads(0, 2, 2))]]


def test_a_latent_that_all_have_comes_in_shares_from_all() -> None:
    assert takes(mapping.plan(model(2, total=0), model(1, total=0))) == [
        [(0, 1, heads(0, 1, 0, range(2))), (1, 1, heads(0, 1, 0, range(2, 4)))]]


def test_a_rank_that_is_not_needed_is_asked_for_nothing() -> None:
    (sources,) = mapping.plan(model(2, total=0, layers=1), model(1, total=0, layers=1))
    assert [(one.rank, len(one.parts)) for one in sources] == [(0, 1), (1, 0)]


def changed(one: Geometry, **changes: object) -> Geometry:
    return msgspec.structs.replace(one, kinds=tuple(msgspec.structs.replace(k, **changes) for k in one.kinds))


def beside_state(tensor: int, *, block_tokens: int) -> Geometry:
    """A layer of attention, whose blocks are as long as the state of the other one wants them, and that one."""
    attention = ArrayKind("float32", 4 // tensor, (4, 4), 64, 4, Reach("all", block_tokens))
    state = ArrayKind(f"mamba2 3x{96 // tensor}", 1, (96 // tensor,), 96 // tensor, UNKNOWN, STATE)
    arrays = [Array("layer0", attention), Array("layer1", state)]
    return mapping.geometry(tensor, [arrays] * tensor)


@pytest.mark.parametrize(("p", "d", "text"), [
    (changed(model(1), dtype="uint8"), model(1), "kv cache layer0, dtype: float32 in decode, uint8 in prefill"),
    (changed(model(2), dims=(8, 4)), model(1), "kv cache layer0, dims: (4, 4) in decode, (8, 4) in prefill"),
    (changed(model(2), head_bytes=65), model(1), "head_bytes: 64 in decode, 65 in prefill"),
    (model(2, total=8), model(1), "total: 4 in decode, 8 in prefill"),
    (model(1, layers=5), model(1), "kv cache layer4: only prefill has it"),
    (model(1), model(1, layers=5), "kv cache layer4: only decode has it"),
    (changed(model(1), total=UNKNOWN), changed(model(2), total=UNKNOWN), "layer0 cannot be cut by heads"),
    (changed(model(2), heads=1), model(2), "kv cache layer0, heads: 2 in decode, 1 in prefill"),
    (changed(model(2), heads=1), model(1), "heads: 1 on each of 2 ranks of prefill, of 4"),
    (changed(model(3, total=0), total=4), model(1),
     "parallel.tensor: 3 in prefill does not divide the 4 KV heads of layer0"),
    (msgspec.structs.replace(model(1), version=1), model(1), "geometry.version: 3 here, 1 in prefill"),
    (changed(model(1), reach=WINDOW), model(1), "kv cache layer0, reach.over: all in decode, window in prefill"),
    (changed(model(1), reach=WINDOW), changed(model(2), reach=msgspec.structs.replace(WINDOW, window=128)),
     "kv cache layer0, reach.window: 128 in decode, 200 in prefill"),
    (changed(model(1), reach=WINDOW), changed(model(1), reach=msgspec.structs.replace(WINDOW, block_tokens=32)),
     "reach.block_tokens: 32 in decode, 16 in prefill"),
    (changed(model(1), reach=STATE, head_bytes=65), changed(model(1), reach=STATE),
     "kv cache layer0, head_bytes: 64 in decode, 65 in prefill; give both roles the same types and num_speculative_tokens"),
    (changed(model(2), reach=STATE), changed(model(1), reach=STATE),
     "parallel.tensor: sizes differ, and kv cache layer0 is a state, which is not cut; give prefill and decode the same"),
    (beside_state(2, block_tokens=32), beside_state(1, block_tokens=16),
     "parallel.tensor: sizes differ, and kv cache layer1 is a state, which is not cut; give prefill and decode the same"),
    (msgspec.structs.replace(model(1), tensor=2000), model(1), "geometry.tensor: 2000"),
    (msgspec.structs.replace(model(1), tensor=0), model(1), "geometry.tensor: 0"),
    (msgspec.structs.replace(model(1), stages=((("a", 0), ("a", 0)),)), model(1),
     "prefill has no arrays, or one of them twice"),
    (msgspec.structs.replace(model(1), stages=((("a", 7),),)), model(1), "geometry.kinds: prefill refers"),
    (changed(model(1), heads=0), model(1), "geometry.kinds: prefill has one without heads"),
])
def test_what_cannot_be_mapped_is_refused_with_the_field(p: Geometry, d: Geometry, text: str) -> None:
    with pytest.raises(Unmappable) as refused:
        mapping.plan(p, d)
    assert text in str(refused.value)


def test_arrays_that_cannot_be_cut_still_go_between_equals_and_over_stages() -> None:
    odd = {"total": UNKNOWN}
    assert links(mapping.plan(changed(model(2), **odd), changed(model(2), **odd))) == 2
    assert links(mapping.plan(changed(model(2, 2), **odd), changed(model(2), **odd))) == 4


def test_ranks_of_one_stage_that_differ_are_refused() -> None:
    with pytest.raises(Unmappable, match="rank 1 has other arrays than rank 0"):
        mapping.geometry(2, [[Array("a", kind(4, 2))], [Array("b", kind(4, 2))]])


def test_a_geometry_of_many_layers_fits_into_a_message() -> None:
    large = model(8, 4, total=8, layers=128)
    named = msgspec.structs.replace(large, stages=tuple(
        tuple((f"model.layers.{n}.self_attn.attn:{half}", 0) for n in range(s * 32, s * 32 + 32) for half in range(2))
        for s in range(4)))
    raw = msgspec.msgpack.encode(named)
    assert len(raw) < 16 << 10
    assert msgspec.msgpack.decode(raw, type=Geometry) == named


# --- byte by byte, over all small sizes ---

BLOCK_OF_HEAD = 3
"""Bytes of a head of a block: layer, head, and what is not zero."""


def bytes_of(name: str, head: int) -> bytes:
    """What one head of one array is, told apart from every other one."""
    return bytes((int(name[1:]), head, 1))


def blocks_of_rank(one: Geometry, rank: int, totals: dict[str, int]) -> list[bytes]:
    """A block of each array of a rank, as the attention of vLLM would have filled it."""
    stage, t = divmod(rank, one.tensor)
    return [b"".join(bytes_of(array.name, head) for head in held(totals[array.name], one.tensor, t))
            for array in one.arrays(stage)]


def moved(prefill: Geometry, decode: Geometry, totals: dict[str, int]) -> None:
    """Carry out the plan on bytes as sender and receiver do, and look at every byte of decode's blocks."""
    for rank, sources in enumerate(mapping.plan(prefill, decode)):
        wanted = blocks_of_rank(decode, rank, totals)
        got = [bytearray(len(block)) for block in wanted]
        writes = [bytearray(len(block)) for block in wanted]
        for source in sources:
            theirs = blocks_of_rank(prefill, source.rank, totals)
            for region, part in source.parts:
                each = source.arrays[region].head_bytes
                piece = theirs[region][part.head * each:(part.head + part.heads) * each]
                assert len(piece) == part.heads * each
                got[part.into][part.at * each:(part.at + part.heads) * each] = piece
                for at in range(part.at * each, (part.at + part.heads) * each):
                    writes[part.into][at] += 1
        assert [bytes(one) for one in got] == wanted
        assert all(set(one) == {1} for one in writes)


@pytest.mark.parametrize("total", [0, 1, 2, 3, 4, 6, 8], ids=lambda n: f"{n} heads" if n else "latent")
def test_every_byte_of_decodes_cache_comes_once_and_from_the_right_head(total: int) -> None:
    """All pairs of tensor sizes up to 8 and of three ways to cut four layers: GQA, MQA, MLA, fewer heads than ranks."""
    names = ["l0", "l1", "l2", "l3"]
    totals = dict.fromkeys(names, total)
    stages = ([names], [names[:2], names[2:]], [names[:1], names[1:2], names[2:]])
    checked = 0
    for p, d in product((1, 2, 3, 4, 6, 8), repeat=2):
        for ours, theirs in product(stages, repeat=2):
            if fits(total, p) and fits(total, d):
                moved(small(p, ours, totals), small(d, theirs, totals), totals)
                checked += 1
    assert checked >= 81


def test_layers_of_different_kinds_in_one_model() -> None:
    totals = {"l0": 4, "l1": 1, "l2": 0, "l3": 2, "l4": 8}
    names = list(totals)
    for p, d in product((1, 2, 4, 8), repeat=2):
        for ours, theirs in product(([names], [names[:3], names[3:]]), repeat=2):
            moved(small(p, ours, totals), small(d, theirs, totals), totals)


@pytest.mark.parametrize(("total", "p", "d", "side"), [
    (total, p, d, side) for total in (1, 2, 3, 4, 6, 8) for p, d in product((1, 2, 3, 4, 5, 6, 8), repeat=2)
    for side in ["decode" if not fits(total, d) else "prefill"] if p != d and not (fits(total, p) and fits(total, d))])
def test_sizes_that_do_not_go_into_the_heads_are_refused_with_layer_and_field(total: int, p: int, d: int,
                                                                              side: str) -> None:
    odd = {"decode": d, "prefill": p}[side]
    with pytest.raises(Unmappable) as refused:
        mapping.plan(uneven(p, total), uneven(d, total))
    assert str(refused.value).startswith(f"parallel.tensor: {odd} in {side} does not divide the {total} KV heads of l0")


def small(tensor: int, stages: list[list[str]], totals: dict[str, int]) -> Geometry:
    return mapping.geometry(tensor, [
        [Array(name, ArrayKind("uint8", len(held(totals[name], tensor, 0)), (BLOCK_OF_HEAD,), BLOCK_OF_HEAD, totals[name]))
         for name in stage] for stage in stages for _ in range(tensor)])


def uneven(tensor: int, total: int) -> Geometry:
    """What an engine would say that shards heads in a way that vLLM does not."""
    return mapping.geometry(tensor, [[Array("l0", ArrayKind("uint8", max(1, total // tensor), (4,), 4, total))]] * tensor)
