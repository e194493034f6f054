"""A peer whose KV would be wrong is refused, with the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from xpyd_sidecar.contract.fingerprint import FingerprintFields
from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.contract.membership import Parallel
from xpyd_sidecar.contract.speculation import Speculation
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.mapping import Array, ArrayKind, Geometry, geometry
from xpyd_sidecar.kv.peers import PeerTerms, Self, meet

FIELDS = FingerprintFields("m", "float32", "float32", 128, "HND", "vec", "0.32.0")


def shape(tensor: int, *, dtype: str = "float32") -> Geometry:
    return geometry(tensor, [[Array("layer0", ArrayKind(dtype, 4 // tensor, (8, 8), 256, 4))]] * tensor)


HERE = Self(InstanceName("d"), Incarnation("d" * 32), FIELDS, Parallel(2, 1, 1), shape(2))


def hello(**changes: Any) -> Any:
    there = msgspec.structs.replace(HERE, instance=InstanceName("p"), incarnation=Incarnation("p" * 32))
    return msgspec.structs.replace(there.hello(HERE.incarnation), **changes)


def test_an_equal_peer_is_welcome() -> None:
    met = meet(HERE, hello())
    assert (met.refused, met.ranks) == (None, 2)
    assert [[source.rank for source in sources] for sources in met.plan] == [[0], [1]]


def test_a_peer_whose_arrays_come_in_another_order_is_welcome() -> None:
    kinds = [ArrayKind("float32", 2, (8, 8), 256, 4), ArrayKind("float32", 2, (8, 8), 256, 4)]
    arrays = [Array(f"layer{n}", kind) for n, kind in enumerate(kinds)]
    ours = msgspec.structs.replace(HERE, geometry=geometry(2, [arrays] * 2))
    met = meet(ours, hello(geometry=geometry(2, [arrays[::-1]] * 2)))
    assert met.refused is None
    assert [[(region, part.into) for region, part in source.parts]
            for sources in met.plan for source in sources] == [[(0, 1), (1, 0)]] * 2


def test_parallel_sizes_may_differ() -> None:
    assert meet(HERE, hello(parallel=Parallel(2, 1, 4))).refused is None
    met = meet(HERE, hello(parallel=Parallel(4, 1, 1), geometry=shape(4)))
    assert (met.refused, met.ranks) == (None, 4)
    assert [[source.rank for source in sources] for sources in met.plan] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 1), (4, 8)])
def test_attention_of_data_parallel_ranks_is_mapped_rank_by_rank(here: int, there: int) -> None:
    """Each data-parallel rank has a control address and a tensor size of its own; how many there are changes nothing."""
    ours = msgspec.structs.replace(HERE, parallel=Parallel(2, 1, here))
    alone = meet(HERE, hello(parallel=Parallel(1, 1, 1), geometry=shape(1)))
    met = meet(ours, hello(parallel=Parallel(1, 1, there), geometry=shape(1)))
    assert met == alone
    assert [[(source.rank, source.takers) for source in sources] for sources in met.plan] == [[(0, 2)], [(0, 2)]]


@pytest.mark.parametrize("field", FingerprintFields.__struct_fields__)
def test_every_field_of_the_fingerprint_counts_and_is_named(field: str) -> None:
    other = msgspec.structs.replace(FIELDS, **{field: 64 if field == "block_size" else "other"})
    found = meet(HERE, hello(fingerprint=other)).refused
    assert found is not None
    assert found[0] is Outcome.INCOMPATIBLE
    assert f"{field}: {getattr(FIELDS, field)!r} here" in found[1]


@pytest.mark.parametrize(("changes", "outcome", "text"), [
    ({"expects": Incarnation("e" * 32)}, Outcome.INCARNATION, "d" * 32),
    ({"geometry": shape(4, dtype="uint8")}, Outcome.INCOMPATIBLE,
     "kv cache layer0, dtype: float32 in decode, uint8 in prefill"),
])
def test_other_differences_are_named_too(changes: dict[str, Any], outcome: Outcome, text: str) -> None:
    found = meet(HERE, hello(**changes)).refused
    assert found is not None
    assert found[0] is outcome
    assert text in found[1]


# --- drafts ---

DRAFT = "model.layers.1.self_attn.attn"
EAGLE = Speculation("eagle", "h", "float32", num_speculative_tokens=3, layers=(DRAFT,))


def drafted(tensor: int = 2, *, first: bool = False) -> Geometry:
    """With a draft's layer after the model's, or before it."""
    kind = ArrayKind("float32", 4 // tensor, (8, 8), 256, 4)
    arrays = [Array("layer0", kind), Array("layer1", kind)]
    arrays.insert(0 if first else 2, Array(DRAFT, kind))
    return geometry(tensor, [arrays] * tensor)


def target(tensor: int = 2) -> Geometry:
    kind = ArrayKind("float32", 4 // tensor, (8, 8), 256, 4)
    return geometry(tensor, [[Array(name, kind) for name in ("layer0", "layer1")]] * tensor)


def pair(decode: tuple[Geometry, Speculation], prefill: tuple[Geometry, Speculation]) -> PeerTerms:
    ours = msgspec.structs.replace(HERE, geometry=decode[0], speculation=decode[1])
    theirs = msgspec.structs.replace(HERE, geometry=prefill[0], speculation=prefill[1])
    return meet(ours, theirs.hello(ours.incarnation))


def taken(met: PeerTerms) -> list[list[tuple[int, int, bool]]]:
    """By decode rank: (prefill's array, the array here, nothing stays) of what comes from its only source."""
    return [[(region, part.into, len(source.parts) == len(source.arrays)) for region, part in source.parts]
            for sources in met.plan for source in sources]


def test_the_same_draft_moves_as_any_layer() -> None:
    met = pair((drafted(), EAGLE), (drafted(), EAGLE))
    assert (met.refused, met.warning) == (None, "")
    assert taken(met) == [[(0, 0, True), (1, 1, True), (2, 2, True)]] * 2


def test_a_decode_engine_that_drafts_alone_takes_all_but_its_drafts_arrays() -> None:
    for first, into in ((False, [0, 1]), (True, [1, 2])):
        met = pair((drafted(first=first), EAGLE), (target(), Speculation()))
        assert met.refused is None
        assert "few drafts will be accepted" in met.warning
        assert taken(met) == [[(at, to, True) for at, to in enumerate(into)]] * 2


def test_a_prefill_engine_that_drafts_alone_keeps_its_drafts_arrays() -> None:
    for first, regions in ((False, [0, 1]), (True, [1, 2])):
        met = pair((target(), Speculation("ngram", num_speculative_tokens=2)), (drafted(first=first), EAGLE))
        assert met.refused is None
        assert "costs prefill time" in met.warning
        assert taken(met) == [[(region, into, False) for into, region in enumerate(regions)]] * 2, "something stays there"


def test_drafts_of_other_models_stay_even_where_their_arrays_look_alike() -> None:
    other = msgspec.structs.replace(EAGLE, model="z")
    met = pair((drafted(), EAGLE), (drafted(), other))
    assert met.warning.startswith("speculation.model: 'h' here, 'z' there")
    assert taken(met) == [[(0, 0, False), (1, 1, False)]] * 2
    assert taken(pair((drafted(4), EAGLE), (drafted(2), other))) == [[(0, 0, False), (1, 1, False)]] * 4, "other sizes"


def test_what_a_peer_calls_a_drafts_is_taken_where_it_is_a_layer_of_the_model_here() -> None:
    met = pair((target(), Speculation()), (target(), msgspec.structs.replace(EAGLE, layers=("layer1",))))
    assert taken(met) == [[(0, 0, True), (1, 1, True)]] * 2


def test_arrays_that_nobody_calls_a_drafts_must_be_on_both_sides() -> None:
    found = pair((drafted(), msgspec.structs.replace(EAGLE, layers=())), (target(), Speculation())).refused
    assert found == (Outcome.INCOMPATIBLE, f"kv cache {DRAFT}: only decode has it")


def test_states_and_another_number_of_drafts_are_refused_with_the_field() -> None:
    here = msgspec.structs.replace(EAGLE, method="mtp", states=True)
    met = pair((drafted(), msgspec.structs.replace(here, num_speculative_tokens=2)), (drafted(), here))
    assert met.refused is not None
    assert met.refused[0] is Outcome.INCOMPATIBLE
    assert met.refused[1].startswith("speculation.num_speculative_tokens: 2 here, 3 there")
    assert met.plan == ()
