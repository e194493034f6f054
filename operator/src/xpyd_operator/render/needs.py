"""Which Kubernetes objects must exist before a rendered object is created, by the table in ``render.dependencies``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

import msgspec

from xpyd_operator.plan.names import member_name
from xpyd_operator.render import labels
from xpyd_operator.render.dependencies import TABLE
from xpyd_operator.render.gang import Kind, joined_by
from xpyd_operator.render.keys import secret_of

Body = dict[str, Any]


class Need(msgspec.Struct, frozen=True):
    """One Kubernetes object that must exist before another one is created."""

    kind: str
    name: str
    of: Kind | None = None
    """Of a PodGroup: which scheduler's (``render.gang``)."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def needs(made: Body, policies: Collection[str]) -> tuple[Need, ...]:
    """The objects that must exist before a rendered object is created.

    Args:
        made: the rendered object.
        policies: names of the service's NetworkPolicies; where ``made`` is an HTTPRoute, of its BackendTLSPolicies.
    """
    return tuple(need for kind in TABLE[made["kind"]].needs for need in _NAMED[kind](made, policies))


def lacking(made: Body, policies: Collection[str], why_not: Callable[[Need], str]) -> str:
    """What a rendered object waits for, in words; empty where it may be created.

    Args:
        made: the rendered object.
        policies: names of the service's NetworkPolicies; where ``made`` is an HTTPRoute, of its BackendTLSPolicies.
        why_not: why an object is not there as it should be (``"is not there yet"``); empty where it is.
    """
    return "; ".join(f"{need} {why}" for need in needs(made, policies) if (why := why_not(need)))


def _secret(made: Body, policies: Collection[str]) -> Iterator[Need]:
    del policies
    if name := secret_of(made["spec"]["template"] if made["kind"] == "Deployment" else made):
        yield Need("Secret", name)


def _policies(made: Body, policies: Collection[str]) -> Iterator[Need]:
    """All NetworkPolicies of the service, not only those that select the pod now: it may become a router later."""
    del made
    yield from (Need("NetworkPolicy", name) for name in policies)


def _tls(made: Body, policies: Collection[str]) -> Iterator[Need]:
    """The BackendTLSPolicies of a route: without them the gateway would send prompts in clear to a port that speaks TLS."""
    del made
    yield from (Need("BackendTLSPolicy", name) for name in policies)


def _pool(made: Body, policies: Collection[str]) -> Iterator[Need]:
    del policies
    behind = [each for rule in made["spec"]["rules"] for each in rule["backendRefs"] if each["kind"] == "InferencePool"]
    yield from (Need("InferencePool", each["name"]) for each in behind)


def _group(made: Body, policies: Collection[str]) -> Iterator[Need]:
    del policies
    if (kind := joined_by(made)) is not None:
        yield Need("PodGroup", made["metadata"]["labels"][labels.INSTANCE_OF], kind)


def _members(made: Body, policies: Collection[str]) -> Iterator[Need]:
    del policies
    meta = made["metadata"]
    if meta["labels"].get(labels.MEMBER) == labels.LEADER:
        size = int(meta["annotations"][labels.MEMBERS])
        yield from (Need("Pod", member_name(meta["labels"][labels.INSTANCE_OF], index)) for index in range(1, size))


_NAMED: Final[Mapping[str, Callable[[Body, Collection[str]], Iterator[Need]]]] = {
    "Secret": _secret,
    "NetworkPolicy": _policies,
    "BackendTLSPolicy": _tls,
    "InferencePool": _pool,
    "PodGroup": _group,
    "Pod": _members,
}
"""By a kind of the table's column ``needs``: which objects of it a rendered one needs."""
