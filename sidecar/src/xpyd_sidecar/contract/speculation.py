"""What an engine says of its speculative decoding, and what of it must be equal where.

A model that drafts has KV of its own, in layers beside those of the model that it drafts for. Prefill computes it only
where it drafts alike. A wrong or missing KV of a draft never makes a wrong answer, as every draft is verified: it makes
drafts that are not accepted. A model with states (Mamba, gated delta nets …) lays these out by the number of drafts.

``kv.peers`` judges two engines by this; routers hear of it only where such a model makes it a matter of pairing
(``mark``). Names are those of vLLM's ``--speculative-config``, where it has them.
"""

from __future__ import annotations

import hashlib

import msgspec

ALIKE = ("method", "model", "kv_cache_dtype", "auxiliary_layers", "parallel_drafting")
"""Fields that the KV of a draft depends on."""


class Speculation(msgspec.Struct, frozen=True):
    """Of one engine, equal on all its ranks."""

    method: str = ""
    """As vLLM has found it out, such as ``eagle`` or ``ngram``; empty: it does not speculate."""
    model: str = ""
    """Hash of the model that drafts: its configuration, and its weights or revision; empty where none does."""
    kv_cache_dtype: str = ""
    """Of the draft's KV."""
    auxiliary_layers: tuple[int, ...] = ()
    """Of the model that is drafted for: those whose outputs the draft reads."""
    parallel_drafting: bool = False
    num_speculative_tokens: int = 0
    states: bool = False
    """The model that is drafted for has states."""
    layers: tuple[str, ...] = ()
    """Names of the draft's layers with KV of their own."""


def difference(ours: Speculation, theirs: Speculation, fields: tuple[str, ...] = ALIKE) -> str:
    """The first of some fields that differs, with both values; empty when they are equal."""
    for name in fields:
        here, there = getattr(ours, name), getattr(theirs, name)
        if here != there:
            return f"speculation.{name}: {here!r} here, {there!r} there"
    return ""


def mark(one: Speculation) -> str:
    """What tells engines apart that cannot exchange KV for their speculation alone; empty where they all can."""
    if not one.states or not one.method:
        return ""
    raw = msgspec.json.encode([getattr(one, name) for name in (*ALIKE, "num_speculative_tokens")])
    return hashlib.sha256(b"xpyd speculation 1\n" + raw).hexdigest()[:8]
