"""A peer whose KV would be wrong is refused, with the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from xpyd_sidecar.contract.fingerprint import FingerprintFields
from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.contract.membership import Parallel
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.peers import Self, refusal

FIELDS = FingerprintFields("m", "float32", "float32", 128, "HND", "vec", "0.32.0")
HERE = Self(InstanceName("d"), Incarnation("d" * 32), FIELDS, Parallel(2, 1, 1), "8 arrays")


def hello(**changes: Any) -> Any:
    there = msgspec.structs.replace(HERE, instance=InstanceName("p"), incarnation=Incarnation("p" * 32))
    return msgspec.structs.replace(there.hello(HERE.incarnation), **changes)


def test_an_equal_peer_is_welcome() -> None:
    assert refusal(HERE, hello()) is None


def test_data_parallel_sizes_may_differ() -> None:
    assert refusal(HERE, hello(parallel=Parallel(2, 1, 4))) is None


@pytest.mark.parametrize("field", FingerprintFields.__struct_fields__)
def test_every_field_of_the_fingerprint_counts_and_is_named(field: str) -> None:
    other = msgspec.structs.replace(FIELDS, **{field: 64 if field == "block_size" else "other"})
    found = refusal(HERE, hello(fingerprint=other))
    assert found is not None
    assert found[0] is Outcome.INCOMPATIBLE
    assert f"{field}: {getattr(FIELDS, field)!r} here" in found[1]


@pytest.mark.parametrize(("changes", "outcome", "text"), [
    ({"expects": Incarnation("e" * 32)}, Outcome.INCARNATION, "d" * 32),
    ({"parallel": Parallel(4, 1, 1)}, Outcome.INCOMPATIBLE, "parallel.tensor: 2 here, 4 there"),
    ({"parallel": Parallel(2, 2, 1)}, Outcome.INCOMPATIBLE, "parallel.pipeline: 1 here, 2 there"),
    ({"geometry": "9 arrays"}, Outcome.INCOMPATIBLE, "geometry: '8 arrays' here"),
])
def test_other_differences_are_named_too(changes: dict[str, Any], outcome: Outcome, text: str) -> None:
    found = refusal(HERE, hello(**changes))
    assert found is not None
    assert found[0] is outcome
    assert text in found[1]
