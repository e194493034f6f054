"""The fingerprint, beside what engines and agents of the version before say and read: ``vllm``, the exact version."""

from __future__ import annotations

import msgspec
import pytest

from xpyd_sidecar.contract.fingerprint import FingerprintFields, difference, digest

CPU = FingerprintFields("m1", "float32", "float32", 128, "KVCacheLayout.LBHNC", "avx2", "0.32.0")


class Before(msgspec.Struct, frozen=True):
    """The fields as they were."""

    model: str
    dtype: str
    kv_dtype: str
    block_size: int
    layout: str
    isa: str
    vllm: str


SAID_BEFORE = bytes.fromhex(
    "87a56d6f64656ca26d31a56474797065a7666c6f61743332a86b765f6474797065a7666c6f61743332aa626c6f636b5f73697a65cc80a66c61796f7574"
    "b34b5643616368654c61796f75742e4c42484e43a3697361a461767832a4766c6c6da6302e33322e30")
"""In a HELLO of the version before, of a CPU with vLLM 0.32.0."""
DIGEST_BEFORE = "4729d8d59b2f7eac86c79e2c82eccd47"


def test_engines_of_before_are_read_and_are_a_group_of_their_own() -> None:
    """They hand over other tokens, and their wire is another too (``kv.peers.SPOKEN``)."""
    assert msgspec.msgpack.decode(SAID_BEFORE, type=FingerprintFields) == CPU
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(CPU), type=Before) == Before(*msgspec.structs.astuple(CPU)[:-1])
    assert digest(CPU) != DIGEST_BEFORE


@pytest.mark.parametrize("codec", [msgspec.json, msgspec.msgpack], ids=["the agent's record", "HELLO"])
@pytest.mark.parametrize("changes", [{"layout": ""}, {"kv_abi": "0.33.0"}], ids=str)
def test_what_differs_is_read_by_both_and_named_by_both(codec: type, changes: dict[str, str]) -> None:
    """``layout`` is empty for devices now: their engines of before and of now go in groups of their own."""
    now = msgspec.structs.replace(CPU, **changes)
    read_before = codec.decode(codec.encode(now), type=Before)  # type: ignore[attr-defined]
    ((field, value),) = changes.items()
    assert getattr(read_before, {"kv_abi": "vllm"}.get(field, field)) == value
    assert digest(now) != DIGEST_BEFORE
    assert difference(now, CPU) == f"{field}: {value!r} here, {getattr(CPU, field)!r} there"


@pytest.mark.parametrize("field", FingerprintFields.__struct_fields__)
def test_every_field_is_in_the_digest(field: str) -> None:
    other = msgspec.structs.replace(CPU, **{field: 64 if field == "block_size" else "other"})
    assert digest(other) != digest(CPU)
    assert digest(msgspec.structs.replace(other)) == digest(other)
