"""Whether two engines may exchange KV at all: checked once per connection, before anything else a peer says is used."""

from __future__ import annotations

import msgspec

from xpyd_sidecar.contract.fingerprint import FingerprintFields, difference
from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.contract.membership import Parallel
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.messages import Hello


class Self(msgspec.Struct, frozen=True):
    """What an engine says of itself."""

    instance: InstanceName
    incarnation: Incarnation
    fingerprint: FingerprintFields
    parallel: Parallel
    geometry: str
    """Arrays and bytes per block of each rank, in words."""

    def hello(self, expects: Incarnation) -> Hello:
        """The first message to the decode engine of incarnation ``expects``."""
        return Hello(self.instance, self.incarnation, expects, self.fingerprint, self.parallel, self.geometry)


def refusal(ours: Self, theirs: Hello) -> tuple[Outcome, str] | None:
    """Why KV of ``theirs`` is not right for ``ours``, with the fields that differ; None: it is."""
    if theirs.expects != ours.incarnation:
        return Outcome.INCARNATION, f"incarnation {theirs.expects} is gone, {ours.incarnation} is here"
    if text := difference(ours.fingerprint, theirs.fingerprint):
        return Outcome.INCOMPATIBLE, f"fingerprint: {text}"
    for name in ("tensor", "pipeline"):
        here, there = getattr(ours.parallel, name), getattr(theirs.parallel, name)
        if here != there:
            return Outcome.INCOMPATIBLE, f"parallel.{name}: {here} here, {there} there (they must be equal)"
    if ours.geometry != theirs.geometry:
        return Outcome.INCOMPATIBLE, f"geometry: {ours.geometry!r} here, {theirs.geometry!r} there"
    return None
