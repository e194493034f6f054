"""What is worth saying of a document that is followed all the same: notes of ``xpyd check``, not faults.

    judging    arguments by which an engine judges requests, and that differ by role. Decode answers a request, so it has
               the last word; what prefill alone refuses is served by decode without prefill. That is right, but slower,
               and mostly not what was meant
    rdma       engines that move KV by RDMA need a device for it. How a pod gets one differs from cluster to cluster: a key
               of a device plugin, a claim, a network that a template names. An engine without one says so when it starts,
               and ends (``xpyd_sidecar.engine.worker.nixl_setup``)
    values     what makes KV what it is and is stated for one role alone: whether the other's default is the same, the model
               says
    queue      a label of Kueue's on the service itself
    wakes      a service that requests start, where anybody may send one
    prefetch   images that are fetched ahead onto every node, and weights for which there is no place
    exposed    over rdma and nccl nothing is encrypted, and nobody is asked who it is; whether others can reach that network
               cannot be seen here
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from xpyd_operator.api import arguments
from xpyd_operator.api.devices import networks
from xpyd_operator.api.roles import RoleSpec
from xpyd_operator.api.service import DisaggService
from xpyd_operator.api.source import Hub
from xpyd_operator.errors import Fault
from xpyd_sidecar.contract.ids import Role

JUDGING: Final = frozenset({
    "--chat-template", "--chat-template-content-format", "--enable-auto-tool-choice", "--enable-lora",
    "--enable-prompt-embeds", "--limit-mm-per-prompt", "--lora-modules", "--max-logprobs", "--max-lora-rank",
    "--max-model-len", "--reasoning-parser", "--tokenizer", "--tokenizer-mode", "--tool-call-parser",
    "--tool-parser-plugin", "--trust-request-chat-template",
})
"""By full name; a test holds them against vLLM's parser."""
_WORDS = "decode has the last word, so what prefill alone refuses goes without prefill; write it in spec.engine.args"
KV_TYPE: Final = "--kv-cache-dtype"
QUEUE: Final = "kueue.x-k8s.io/queue-name"
CHOICE: Final = "UCX_TLS"
"""UCX's own variable: what it may take. Whoever sets it needs no RDMA device."""


def judging(service: DisaggService) -> list[Fault]:
    """Where the roles differ in such an argument; the path is that of one that is set."""
    spec = service.spec
    if not spec.prefill.max_instances:
        return []
    common = dict(_given(spec.engine.args))
    own = {"prefill": dict(_given(spec.prefill.args)), "decode": dict(_given(spec.decode.args))}
    found = []
    for name in sorted(JUDGING):
        of = {role: given.get(name, common.get(name)) for role, given in own.items()}
        values = [None if one is None else one[1] for one in of.values()]
        if values[0] == values[1]:
            continue
        role = next(role for role, given in own.items() if name in given)
        if None in values:
            words = f"{name} is set for {role} alone: {_WORDS}"
        else:
            words = f"{name} differs from the other role's: {_WORDS}"
        found.append(Fault(f"spec.{role}.args[{own[role][name][0]}]", words))
    return found


def values(service: DisaggService) -> Iterator[Fault]:
    """A type of KV that one role states and the other leaves to its default."""
    spec = service.spec
    if not spec.prefill.max_instances or any(one.name == KV_TYPE for one in arguments.given_options(spec.engine.args)):
        return
    given = {role: [one for one in arguments.given_options(spec.role(role).args) if one.name == KV_TYPE] for role in Role}
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        stated = given[role][-1] if given[role] else None
        if stated is None or given[other] or stated.values[:1] in ((), ("auto",)):
            continue
        words = (f"{KV_TYPE} {stated.values[0]} is set for {role} alone: {other} takes what the model says, and unless "
                 "that is the same no pair can hand over KV; write it in spec.engine.args")
        yield Fault(f"spec.{role}.args[{stated.index}]", words)


def queue(service: DisaggService) -> Iterator[Fault]:
    """A queue of Kueue that is named where it is on other kinds of objects: here it has no effect."""
    if QUEUE in service.metadata.labels:
        words = "has no effect on a service, whose pods are queued; write it in metadata.labels of both roles' templates"
        yield Fault(f'metadata.labels["{QUEUE}"]', words)


def rdma(service: DisaggService) -> Iterator[Fault]:
    """What seems to be lacking in a document for Kubernetes."""
    if service.spec.kv.transport != "rdma":
        return
    chosen = [index for index, one in enumerate(service.spec.engine.env) if one.name == CHOICE]
    for index in chosen:
        words = "blocks go over what this allows; over tcp and shared memory UCX checks nobody: for trusted networks alone"
        yield Fault(f"spec.engine.env[{index}]", words)
    for which in Role if not chosen else ():
        if not _connected(service.spec.role(which), service.spec.written_section(which).template is not None):
            words = (
                "transport rdma needs an RDMA device, and nothing here seems to bring one: add e.g. limits rdma/ib: 1, "
                "a claim, or a network in template"
            )
            yield Fault(f"spec.{which}.resources", words)


def wakes(service: DisaggService) -> Iterator[Fault]:
    """A warning: without client keys whoever finds the port starts instances."""
    if service.spec.to_zero and service.spec.router.api_key_secret is None:
        words = ("with decode.scaling.min 0 and without client keys whoever reaches the router starts instances, scanners "
                 "too; write router.apiKeySecret")
        yield Fault("spec.decode.scaling.min", words)


def exposed_kv(service: DisaggService) -> Iterator[Fault]:
    """A warning where others may read or change KV in transfer, for all that the document says."""
    kv = service.spec.kv
    if kv.transport in ("rdma", "nccl") and kv.encryption == "disabled":
        words = (
            f"transport {kv.transport} does not encrypt: who reaches that network may read or change KV. Keep others out "
            "(partition keys, IPsec or MACsec in the NIC) and write encryption: network, or write transport: tcp and "
            "encryption: enabled"
        )
        yield Fault("spec.kv.encryption", words)


def prefetch(service: DisaggService) -> Iterator[Fault]:
    """Where ``model.prefetch`` fetches more than is meant, or less."""
    spec = service.spec
    if not spec.model.prefetch:
        return
    if not all(_names_nodes(spec.role(role)) for role in Role if spec.role(role).max_instances):
        words = ("images are pulled onto every node, since the template of a role names none; write nodeSelector or a node "
                 "affinity in its template")
        yield Fault("spec.model.prefetch", words)
    if isinstance(spec.model.origin, Hub) and spec.model.cache.claim is None:
        words = "images alone are fetched, as there is no volume on which weights would stay; write model.cache.claim"
        yield Fault("spec.model.cache.claim", words)


def _names_nodes(role: RoleSpec) -> bool:
    given = (role.template or {}).get("spec")
    spec = given if isinstance(given, dict) else {}
    affinity = spec.get("affinity")
    nodes = affinity.get("nodeAffinity") if isinstance(affinity, dict) else None
    required = isinstance(nodes, dict) and bool(nodes.get("requiredDuringSchedulingIgnoredDuringExecution"))
    return bool(spec.get("nodeSelector")) or required


def _given(args: Sequence[str]) -> Iterator[tuple[str, tuple[int, tuple[str, ...]]]]:
    """``(name, (index, values))`` of the arguments that are in the table; of one that is repeated the last one counts."""
    for one in arguments.given_options(args):
        if one.name in JUDGING:
            yield one.name, (one.index, one.values)


def _connected(role: RoleSpec, template: bool) -> bool:
    """Whether something may bring an RDMA device. What a role's template or a claim brings is not known here."""
    if template:
        return True
    given = role.resources
    if given is None:
        return False
    return bool(given.claims) or bool(networks(role))
