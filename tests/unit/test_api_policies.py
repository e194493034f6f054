"""Fields of ``spec.networkPolicy.clients`` and ``egress`` that Kubernetes does not know."""

from __future__ import annotations

from typing import Any

import pytest
from kube_documents import document

from xpyd_operator.api.rule import Target
from xpyd_operator.render.judge import judge

CIDR = {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}
PODS = {"podSelector": {"matchLabels": {"any.thing/here": "x"}, "matchExpressions": [
    {"key": "tier", "operator": "In", "values": ["a"]}]}, "namespaceSelector": {}}


def found(**policy: Any) -> list[str]:
    judged = judge(document(networkPolicy=policy), Target.KUBERNETES, strict=True)
    return [str(each).removeprefix("spec.networkPolicy.") for each in judged.refusals]


def test_what_kubernetes_knows_is_taken() -> None:
    ports = [{"protocol": "TCP", "port": 8443, "endPort": 8450}, {"port": "https"}]
    assert found(clients=[PODS, CIDR], egress=[{"to": [PODS, CIDR], "ports": ports}, {"to": None}, {}]) == []


NONE = "is no field of "


@pytest.mark.parametrize(("policy", "words"), [
    ({"egress": [{"to": [CIDR], "port": 8443}]}, f"egress[0].port: {NONE}NetworkPolicyEgressRule; write ports"),
    ({"clients": [{"namespaceSelector": {"matchLabel": {"team": "a"}}}]},
     f"clients[0].namespaceSelector.matchLabel: {NONE}LabelSelector; write matchLabels"),
    ({"clients": [{"from": []}]},
     f"clients[0].from: {NONE}NetworkPolicyPeer; there are ipBlock, namespaceSelector, podSelector"),
    ({"clients": [{"ipBlock": {"cidrs": []}}]}, f"clients[0].ipBlock.cidrs: {NONE}IPBlock; write cidr"),
    ({"egress": [{"ports": [{"ports": 1}]}]}, f"egress[0].ports[0].ports: {NONE}NetworkPolicyPort; write port"),
    ({"egress": [{"ports": {"port": 1}}]}, "egress[0].ports: must be a list"),
    ({"egress": [{"ports": [8443]}]}, "egress[0].ports[0]: must be an object with endPort, port, protocol"),
    ({"egress": [{"to": [{"podSelector": {"matchExpressions": [{"op": "In"}]}}]}]},
     f"egress[0].to[0].podSelector.matchExpressions[0].op: {NONE}LabelSelectorRequirement; write operator"),
], ids=str)
def test_a_field_that_it_does_not_know_is_named_with_the_one_that_was_meant(policy: dict[str, Any], words: str) -> None:
    assert found(**policy) == [words]
