"""The one judge of documents: ``check``, ``render pods``, ``up``, ``join`` and the operator all ask it, and say its words.

    faults         the document is not of its form, or breaks a rule of the API        ┐ refusals
    unsupported    right, but nothing that a backend could make of it would be right   ┘
    warnings       what engines of a version of vLLM would not start with or not do, and addresses that the service's own
                   NetworkPolicy cuts off, and what others may do with it; followed all the same
    notes          what holds elsewhere, or is perhaps not meant so

Everything is said at once: what is unsupported is looked for as soon as the document has its form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from xpyd_operator.api import devices, kubernetes, notes, outside, speculation, vllm
from xpyd_operator.api.decode import examine
from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService
from xpyd_operator.errors import Fault, SpecError
from xpyd_operator.render.unsupported import kube_refusals, local_refusals

BARE = "a host without GPUs"


class Judgement(msgspec.Struct, frozen=True):
    """What is said of one document."""

    service: DisaggService | None
    """The document, refused or not; None where it has not its form."""
    faults: tuple[Fault, ...] = ()
    unsupported: tuple[Fault, ...] = ()
    starts: tuple[Fault, ...] = ()
    """What engines would not start with, or not do: warnings."""
    cut_off: tuple[Fault, ...] = ()
    """Addresses that the service's own NetworkPolicy cuts off: warnings."""
    opened: tuple[Fault, ...] = ()
    """What others may do with it that was hardly meant: warnings."""
    ignored: tuple[Fault, ...] = ()
    """Fields that are not known (lenient only)."""
    notes: tuple[Fault, ...] = ()

    @property
    def refusals(self) -> tuple[Fault, ...]:
        """Why the document is not followed; none where it is."""
        return (*self.faults, *self.unsupported)

    @property
    def warnings(self) -> tuple[Fault, ...]:
        """What is followed all the same, and does not come out as it was meant."""
        return (*self.starts, *self.cut_off, *self.opened)

    def accepted_service(self) -> DisaggService:
        """The document where it is followed.

        Raises:
            SpecError: it is refused; with every refusal.
        """
        if self.service is None or self.refusals:
            raise SpecError(self.refusals)
        return self.service


def judge(value: Any, target: Target | None, *, strict: bool = True, gpus: int = 1) -> Judgement:
    """Judge what a YAML or JSON parser gave.

    Args:
        value: the document.
        target: where it is to run; None: it is refused only where no target can run it.
        strict: unknown fields are faults; otherwise they are ignored and named (a running operator may be older than the
            document).
        gpus: of the host, for the local target.
    """
    seen = examine(value, strict=strict, target=target)
    service = seen.service
    if service is None:
        return Judgement(None, seen.faults, ignored=seen.warnings)
    already = {fault.path for fault in seen.faults}
    refused, elsewhere = _unsupported(service, target, gpus)
    told = already | {fault.path for fault in (*refused, *(fault for _, fault in elsewhere))}
    misnamed = tuple(one for one in _faults(_unknown_fields(service)) if one.path not in told)
    elsewhere = (*((str(only), fault) for only, fault in seen.notes), *elsewhere)
    others = dict.fromkeys(Fault(fault.path, f"not for {only}: {fault.message}") for only, fault in elsewhere)
    clusters = target is not Target.LOCAL
    in_clusters = (*notes.rdma(service), *notes.exposed_kv(service), *notes.prefetch(service),
                   *outside.notes(service)) if clusters else ()
    devices_too = tuple(devices.warnings(service)) if clusters else ()
    return Judgement(
        service=service,
        faults=(*seen.faults, *(misnamed if strict else ())),
        unsupported=tuple(one for one in refused if one.path not in already),
        starts=(*vllm.warnings(service), *devices_too),
        opened=tuple(notes.wakes(service)) if clusters else (),
        cut_off=tuple(outside.warnings(service)) if clusters else (),
        ignored=(*seen.warnings, *(() if strict else misnamed)),
        notes=(*others, *notes.judging(service), *notes.values(service), *speculation.notes(service),
               *devices.notes(service), *notes.queue(service), *in_clusters),
    )


def _unknown_fields(service: DisaggService) -> Iterator[tuple[str, str]]:
    """Fields of what the document preserves of Kubernetes that no version has."""
    for path, template in service.spec.templates():
        yield from kubernetes.faults("PodTemplateSpec", template, path)
    for index, variable in enumerate(service.spec.engine.env):
        if variable.value_from is not None:
            yield from kubernetes.faults("EnvVarSource", variable.value_from, f"spec.engine.env[{index}].valueFrom")


def _unsupported(
    service: DisaggService, target: Target | None, gpus: int
) -> tuple[tuple[Fault, ...], tuple[tuple[str, Fault], ...]]:
    """What the backends cannot do, and what only others could not, with their names."""
    kube = _faults(kube_refusals(service))
    if target is Target.KUBERNETES:
        return kube, ()
    local = _faults(local_refusals(service, gpus))
    if target is Target.LOCAL:
        bare = _faults(local_refusals(service, gpus=0))
        return local, tuple((BARE, one) for one in bare if one not in local)
    both = tuple(one for one in kube if one in local)
    only = [(str(Target.KUBERNETES), one) for one in kube if one not in both]
    only += [(str(Target.LOCAL), one) for one in local if one not in both]
    return both, tuple(only)


def _faults(found: Iterable[tuple[str, str]]) -> tuple[Fault, ...]:
    return tuple(dict.fromkeys(Fault(path, reason) for path, reason in found))
