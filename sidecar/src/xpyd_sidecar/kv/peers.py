"""Whether two engines may exchange KV at all: checked once per connection, before anything else a peer says is used."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from xpyd_sidecar.contract.fingerprint import FingerprintFields, difference
from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.contract.membership import Parallel
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.mapping import Geometry, Plan, Unmappable, plan
from xpyd_sidecar.kv.messages import Hello


class Self(msgspec.Struct, frozen=True):
    """What an engine says of itself."""

    instance: InstanceName
    incarnation: Incarnation
    fingerprint: FingerprintFields
    parallel: Parallel
    geometry: Geometry

    def hello(self, expects: Incarnation) -> Hello:
        """The first message to the decode engine of incarnation ``expects``."""
        return Hello(self.instance, self.incarnation, expects, self.fingerprint, self.parallel, self.geometry)


class Met(NamedTuple):
    """What a prefill engine is to a decode engine."""

    refused: tuple[Outcome, str] | None
    """Why its KV cannot be taken, with the fields that differ."""
    ranks: int
    plan: Plan = ()
    """Which of its ranks each rank here takes from, and what."""


def meet(ours: Self, theirs: Hello) -> Met:
    """Whether KV of ``theirs`` is right for ``ours``, and how it is laid out."""
    refused = _refusal(ours, theirs)
    if refused is None:
        try:
            return Met(None, theirs.geometry.ranks, plan(theirs.geometry, ours.geometry))
        except Unmappable as error:
            refused = Outcome.INCOMPATIBLE, str(error)
    return Met(refused, theirs.geometry.ranks)


def _refusal(ours: Self, theirs: Hello) -> tuple[Outcome, str] | None:
    if theirs.expects != ours.incarnation:
        return Outcome.INCARNATION, f"incarnation {theirs.expects} is gone, {ours.incarnation} is here"
    if text := difference(ours.fingerprint, theirs.fingerprint):
        return Outcome.INCOMPATIBLE, f"fingerprint: {text}"
    return None
