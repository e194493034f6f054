"""A peer whose KV would be wrong is refused, with the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from xpyd_sidecar.contract.fingerprint import FingerprintFields
from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.contract.membership import Parallel
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.mapping import Array, Geometry, Kind, geometry
from xpyd_sidecar.kv.peers import Self, meet

FIELDS = FingerprintFields("m", "float32", "float32", 128, "HND", "vec", "0.32.0")


def shape(tensor: int, *, dtype: str = "float32") -> Geometry:
    return geometry(tensor, [[Array("layer0", Kind(dtype, 4 // tensor, (8, 8), 256, 4))]] * tensor)


HERE = Self(InstanceName("d"), Incarnation("d" * 32), FIELDS, Parallel(2, 1, 1), shape(2))


def hello(**changes: Any) -> Any:
    there = msgspec.structs.replace(HERE, instance=InstanceName("p"), incarnation=Incarnation("p" * 32))
    return msgspec.structs.replace(there.hello(HERE.incarnation), **changes)


def test_an_equal_peer_is_welcome() -> None:
    met = meet(HERE, hello())
    assert (met.refused, met.ranks) == (None, 2)
    assert [[source.rank for source in sources] for sources in met.plan] == [[0], [1]]


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
