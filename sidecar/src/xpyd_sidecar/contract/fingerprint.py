"""When KV computed by one engine is right for another.

Two engines may exchange KV exactly when every field below is equal. Parallel sizes are left out on purpose: whole blocks
are sliced on heads only, so prefill and decode may differ in them.
"""

from __future__ import annotations

import hashlib

import msgspec

from xpyd_sidecar.contract.ids import Fingerprint


class FingerprintFields(msgspec.Struct, frozen=True):
    """Everything that KV bytes depend on."""

    model: str
    """Hub revision, or hash of the weight index and the config files of a local folder."""
    dtype: str
    kv_dtype: str
    block_size: int
    """Tokens per block."""
    layout: str
    """Order of dimensions in memory where the bytes of a copy depend on it (CPUs, packed types); else empty: copies travel
    in their logical order."""
    isa: str
    """Instruction set where the layout inside a block depends on it (CPU), else empty."""
    kv_abi: str
    """How this vLLM writes KV: the first version that wrote it so, else the exact version (``engine.compat``)."""
    states: str = ""
    """What layers that keep a state instead of KV have in it: kind, types, layout, columns for speculation."""


def digest(fields: FingerprintFields) -> Fingerprint:
    """32 hex digits over the fields, by name and in order."""
    raw = msgspec.json.encode(fields)
    return Fingerprint(hashlib.sha256(b"xpyd fingerprint 2\n" + raw).hexdigest()[:32])


def difference(ours: FingerprintFields, theirs: FingerprintFields) -> str:
    """The fields that differ, in words a person can act on; empty when equal."""
    return ", ".join(
        f"{name}: {getattr(ours, name)!r} here, {getattr(theirs, name)!r} there"
        for name in FingerprintFields.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    )
