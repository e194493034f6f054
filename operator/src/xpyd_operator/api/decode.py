"""From untyped data to ``DisaggService`` and ``DisaggPool``: the one edge where documents become structs."""

from __future__ import annotations

from typing import Any

import msgspec

from xpyd_operator.api import checks
from xpyd_operator.api.pool import DisaggPool
from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService
from xpyd_operator.api.walk import Walk
from xpyd_operator.errors import Fault, SpecError


class DecodedService(msgspec.Struct, frozen=True):
    """A DisaggService that is right, and what is worth saying about it."""

    service: DisaggService
    """The document."""
    warnings: tuple[Fault, ...] = ()
    """Fields that were ignored (lenient decoding only)."""
    notes: tuple[tuple[Target, Fault], ...] = ()
    """What would be wrong for one target, when no target was given."""


class ExaminedService(msgspec.Struct, frozen=True):
    """What is known of a document of a DisaggService, right or not."""

    service: DisaggService | None
    """The document without unknown fields, whatever the rules say of it; None where it has not its form."""
    faults: tuple[Fault, ...] = ()
    warnings: tuple[Fault, ...] = ()
    """Fields that were ignored (lenient decoding only)."""
    notes: tuple[tuple[Target, Fault], ...] = ()
    """What would be wrong for one target, when no target was given."""


class DecodedPool(msgspec.Struct, frozen=True):
    """A pool that is right."""

    pool: DisaggPool
    """The document."""
    warnings: tuple[Fault, ...] = ()
    """Fields that were ignored (lenient decoding only)."""


def decode_service(obj: Any, *, strict: bool = True, target: Target | None = None) -> DecodedService:
    """Decode and check a DisaggService.

    Args:
        obj: what a YAML or JSON parser gave.
        strict: refuse unknown fields (``xpyd check``, ``xpyd up``); otherwise warn (a running operator, which may be older
            than the document).
        target: where it is to run; None: a document is right when some target can run it.

    Raises:
        SpecError: with all faults.
    """
    seen = examine(obj, strict=strict, target=target)
    if seen.service is None or seen.faults:
        raise SpecError(seen.faults)
    return DecodedService(service=seen.service, warnings=seen.warnings, notes=seen.notes)


def examine(obj: Any, *, strict: bool = True, target: Target | None = None) -> ExaminedService:
    """As ``decode_service``, with what was found instead of an error."""
    walk = Walk(strict=strict)
    service = msgspec.convert(walk.convert(DisaggService, obj, ""), DisaggService)
    wrong, notes = checks.faults(service, target, {fault.path for fault in walk.faults})
    if len(notes) == len(Target):
        wrong += [fault for target_notes in notes.values() for fault in target_notes]
    return ExaminedService(
        service=None if walk.formless else service,
        faults=tuple(dict.fromkeys(walk.faults + wrong)),
        warnings=tuple(walk.warnings),
        notes=tuple((only, fault) for only, found in notes.items() for fault in found),
    )


def decode_pool(obj: Any, *, strict: bool = True) -> DecodedPool:
    """Decode and check a DisaggPool.

    Raises:
        SpecError: with all faults.
    """
    walk = Walk(strict=strict)
    pool = msgspec.convert(walk.convert(DisaggPool, obj, ""), DisaggPool)
    wanted = f"{pool.spec.service}-{pool.spec.role}"
    bad = {fault.path for fault in walk.faults}
    wrong: list[Fault] = []
    if pool.metadata.name != wanted and not bad & {"spec", "spec.service", "spec.role", "metadata", "metadata.name"}:
        wrong.append(Fault("metadata.name", f"must be {wanted} (<spec.service>-<spec.role>), not {pool.metadata.name}"))
    _raise(walk.faults + wrong)
    return DecodedPool(pool=pool, warnings=tuple(walk.warnings))


def _raise(faults: list[Fault]) -> None:
    if faults:
        raise SpecError(tuple(dict.fromkeys(faults)))
