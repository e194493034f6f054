"""What may stand in ``spec.networkPolicy.clients`` and ``egress``: the fields of peers and rules of a NetworkPolicy.

A field that Kubernetes does not know would close what was to be open, or let the policy be refused as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from xpyd_operator.api import kubernetes
from xpyd_operator.api.operation import NetworkPolicy
from xpyd_operator.api.rule import Finding, Rule


def _names(policy: NetworkPolicy) -> Iterator[Finding]:
    for section, part, items in (("clients", "NetworkPolicyPeer", policy.clients),
                                 ("egress", "NetworkPolicyEgressRule", policy.egress)):
        for index, one in enumerate(items):
            yield from kubernetes.faults(part, one, f"{section}[{index}]")


RULES: tuple[Rule, ...] = (
    Rule(
        at=("spec.networkPolicy",),
        reads=("clients", "egress"),
        says="",
        wrong=_names,
        no_twin="CEL does not see fields that the schema only preserves",
    ),
)
