"""The fingerprint: everything counts, and what differs is named."""

from __future__ import annotations

import msgspec
import pytest

from xpyd_sidecar.contract.fingerprint import FingerprintFields, difference, digest

CPU = FingerprintFields("m1", "float32", "float32", 128, "KVCacheLayout.LBHNC", "avx2", "0.32.0")


@pytest.mark.parametrize(("field", "other"), [("layout", ""), ("kv_abi", "0.33.0")])
def test_what_differs_is_named_with_both_values(field: str, other: str) -> None:
    assert difference(msgspec.structs.replace(CPU, **{field: other}), CPU) == (
        f"{field}: {other!r} here, {getattr(CPU, field)!r} there")


@pytest.mark.parametrize("field", FingerprintFields.__struct_fields__)
def test_every_field_is_in_the_digest(field: str) -> None:
    other = msgspec.structs.replace(CPU, **{field: 64 if field == "block_size" else "other"})
    assert digest(other) != digest(CPU)
    assert digest(msgspec.structs.replace(other)) == digest(other)
