"""Whether two engines may exchange KV at all: checked once per connection, before anything else a peer says is used."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from xpyd_sidecar.contract.fingerprint import FingerprintFields, difference
from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.contract.membership import Parallel
from xpyd_sidecar.contract.speculation import Speculation
from xpyd_sidecar.kv import speculation
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
    speculation: Speculation = Speculation()

    def hello(self, expects: Incarnation) -> Hello:
        """The first message to the decode engine of incarnation ``expects``."""
        return Hello(self.instance, self.incarnation, expects, self.fingerprint, self.parallel, self.geometry,
                     self.speculation)


class Met(NamedTuple):
    """What a prefill engine is to a decode engine."""

    refused: tuple[Outcome, str] | None
    """Why its KV cannot be taken, with the fields that differ."""
    ranks: int
    plan: Plan = ()
    """Which of its ranks each rank here takes from, and what."""
    warning: str = ""
    """What is lost although its KV is taken."""
    alike: bool = False
    """Each rank here takes all that its own number has there, array by array: what comes unasked may be taken as it is."""


def meet(ours: Self, theirs: Hello) -> Met:
    """Whether KV of ``theirs`` is right for ``ours``, and how it is laid out."""
    refused = _refusal(ours, theirs)
    if refused is None:
        drafts = speculation.judge(ours.speculation, theirs.speculation)
        # Whatever a peer calls a draft's: what is a layer of the model here is taken.
        layers = {name.partition("#")[0] for stage in ours.geometry.stages for name, _ in stage}
        mine = layers - set(ours.speculation.layers)
        left_out = drafts.left_out - mine
        try:
            made = plan(theirs.geometry, ours.geometry, left_out)
            alike = theirs.geometry == ours.geometry and not left_out
            return Met(None, theirs.geometry.ranks, made, drafts.warning, alike)
        except Unmappable as error:
            refused = Outcome.INCOMPATIBLE, str(error)
    return Met(refused, theirs.geometry.ranks)


def _refusal(ours: Self, theirs: Hello) -> tuple[Outcome, str] | None:
    if theirs.expects != ours.incarnation:
        return Outcome.INCARNATION, f"incarnation {theirs.expects} is gone, {ours.incarnation} is here"
    if drafts := speculation.judge(ours.speculation, theirs.speculation).refused:
        return Outcome.INCOMPATIBLE, drafts
    if text := difference(ours.fingerprint, theirs.fingerprint):
        return Outcome.INCOMPATIBLE, f"fingerprint: {text}"
    return None
