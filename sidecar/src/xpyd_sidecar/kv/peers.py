"""Whether two engines may exchange KV at all: checked once per connection, before anything else a peer says is used.

Where their speculative decoding differs, some arrays are not transferred, or no KV is taken at all ("─": no speculation):

    decode          prefill         model without states                            model with states
    ─               ─               all                                             all
    any             the same        all, the draft's too                            all, the draft's too
    by a model      otherwise, ─    all but drafts'; warned: few are accepted       refused, with the field
    by tokens, ─    by a model      all but drafts'; warned: they are for nothing   refused, with the field
    by tokens       ─, by tokens    all                                             refused, with the field

"By a model": the draft has KV of its own (EAGLE, MTP, draft models); "by tokens": it has none (n-gram, suffix). "States"
are those of Mamba, gated delta nets and the like. The number of drafts per step must be equal for states alone, whose
pages hold a column for each draft.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from xpyd_sidecar.contract import fingerprint
from xpyd_sidecar.contract.fingerprint import FingerprintFields
from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.contract.membership import Parallel
from xpyd_sidecar.contract.speculation import ALIKE, Speculation, difference
from xpyd_sidecar.kv import mapping, messages, wire
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.mapping import Geometry, Plan, Unmappable, plan
from xpyd_sidecar.kv.messages import Hello

SPOKEN: Final = f"{messages.WIRE_VERSION}.{wire.WIRE_VERSION}.{mapping.VERSION}"
"""Which versions of the KV plane an engine speaks, as one word: ``control.data.geometry``, such as ``1.3.1``.

Engines whose words differ cannot exchange KV, whatever their fingerprints: each would refuse what the other says. So the
word goes into the engine's record, and from there into what its agent tells routers (``agent.beat``).
"""
ALL: Final = (*ALIKE, "num_speculative_tokens")
"""What engines compare of their speculation where states are handed over, whose pages hold a column for each draft."""


class Self(msgspec.Struct, frozen=True):
    """What an engine tells a peer of itself when a connection begins: who it is, and what its KV is like."""

    instance: InstanceName
    incarnation: Incarnation
    fingerprint: FingerprintFields
    parallel: Parallel
    geometry: Geometry
    speculation: Speculation = Speculation()

    def hello(self, expects: Incarnation) -> Hello:
        """HELLO, a prefill engine's first message, to the decode engine of incarnation ``expects``."""
        return Hello(self.instance, self.incarnation, expects, self.fingerprint, self.parallel, self.geometry,
                     self.speculation)


class PeerTerms(NamedTuple):
    """On what terms a decode engine takes KV from a prefill engine, or why it does not. ``ranks``: how many prefill has."""

    refused: tuple[Outcome, str] | None
    """Why its KV cannot be taken, with the fields that differ."""
    ranks: int
    plan: Plan = ()
    """Which of its ranks each rank here takes from, and what."""
    warning: str = ""
    """What is lost although its KV is taken."""


def meet(ours: Self, theirs: Hello) -> PeerTerms:
    """Whether the decode engine ``ours`` can take KV from the prefill engine that sent ``theirs``, and which of its ranks
    takes what from which. Nothing is raised for an engine that does not fit: ``refused`` says why.
    """
    refused = _refusal(ours, theirs)
    if refused is None:
        drafts = draft_rule(ours.speculation, theirs.speculation)
        # Whatever a peer calls a draft's: what is a layer of the model here is taken.
        layers = {name.partition("#")[0] for stage in ours.geometry.stages for name, _ in stage}
        mine = layers - set(ours.speculation.layers)
        left_out = drafts.left_out - mine
        try:
            made = plan(theirs.geometry, ours.geometry, left_out)
            return PeerTerms(None, theirs.geometry.ranks, made, drafts.warning)
        except Unmappable as error:
            refused = Outcome.INCOMPATIBLE, str(error)
    return PeerTerms(refused, theirs.geometry.ranks)


def _refusal(ours: Self, theirs: Hello) -> tuple[Outcome, str] | None:
    if theirs.expects != ours.incarnation:
        return Outcome.INCARNATION, f"incarnation {theirs.expects} is gone, {ours.incarnation} is here"
    if drafts := draft_rule(ours.speculation, theirs.speculation).refused:
        return Outcome.INCOMPATIBLE, drafts
    if text := fingerprint.difference(ours.fingerprint, theirs.fingerprint):
        return Outcome.INCOMPATIBLE, f"fingerprint: {text}"
    return None


class DraftRule(NamedTuple):
    """What the speculative decoding of two engines means for the transfer of KV between them."""

    refused: str = ""
    """Why no KV is taken at all, with the field."""
    warning: str = ""
    """What is lost although KV is taken."""
    left_out: frozenset[str] = frozenset()
    """Layers whose arrays are not handed over."""


def draft_rule(decode: Speculation, prefill: Speculation) -> DraftRule:
    """Which KV a decode engine takes from a prefill engine, by the speculative decoding of both: all, all but the drafts'
    layers with a warning, or none (the table in this module's docstring).
    """
    differs = difference(decode, prefill, ALL)
    if differs and (decode.states or prefill.states):
        words = "the states of this model are laid out by it, so both roles must speculate alike"
        return DraftRule(refused=f"{differs}; {words}")
    if not (decode.layers or prefill.layers) or not (differs := difference(decode, prefill)):
        return DraftRule()
    left_out = frozenset(decode.layers) | frozenset(prefill.layers)
    if decode.layers:
        words = f"{differs}; prefill computes no KV for decode's draft ({decode.method}), so few drafts will be accepted"
    else:
        words = f"{differs}; decode has no use for the KV of prefill's draft ({prefill.method}), which costs prefill time"
    return DraftRule(warning=words, left_out=left_out)
