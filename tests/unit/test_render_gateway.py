"""What a gateway is given of a service: the route, what stands behind it, and who is let in."""

from __future__ import annotations

from typing import Any

import pytest
from kube_documents import UID, service

from xpyd_operator.render import labels
from xpyd_operator.render.compare import differs
from xpyd_operator.render.gateway import POOL, ROUTE, TLS, duration, gateway_objects
from xpyd_operator.render.needs import Need, needs
from xpyd_operator.render.objects import manifests
from xpyd_operator.render.policies import clients_policy
from xpyd_operator.render.settings import KubeSettings

SETTINGS = KubeSettings(sidecar_image="sidecar:1")
PUBLIC = {"parentRefs": [{"name": "public", "namespace": "gateways", "sectionName": "https"}]}
HTTPS = {"tls": {"secret": "certificate"}}


def made(gateway: dict[str, Any] | None = None, **router: Any) -> dict[str, dict[str, Any]]:
    asked = service(router={"gateway": PUBLIC | (gateway or {})} | router)
    return {each["kind"]: each for each in gateway_objects(asked)}


def test_a_document_without_a_gateway_has_nothing_of_one() -> None:
    assert gateway_objects(service()) == ()
    assert {each["kind"] for each in manifests(service(), SETTINGS)}.isdisjoint({ROUTE, TLS, POOL})


def test_the_route_goes_to_the_clients_service_of_the_gateways_that_are_named() -> None:
    asked = {"hostnames": ["chat.example.com"], "parentRefs": [*PUBLIC["parentRefs"], {"name": "inner"}]}
    found = made(asked, requestTimeout="90m", ports={"http": 12000})
    assert set(found) == {ROUTE}
    assert found[ROUTE]["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert found[ROUTE]["spec"] == {
        "parentRefs": [
            {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "public", "namespace": "gateways",
             "sectionName": "https"},
            {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "inner"}],
        "hostnames": ["chat.example.com"],
        "rules": [{
            "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
            "backendRefs": [{"group": "", "kind": "Service", "name": "qwen", "port": 12000, "weight": 1}],
            "timeouts": {"request": "1h30m10s", "backendRequest": "1h30m10s"}}],
    }


def test_a_prefix_of_the_path_is_taken_away_before_a_router_sees_it() -> None:
    (rule,) = made({"path": "/qwen"})[ROUTE]["spec"]["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/qwen"}}]
    assert rule["filters"] == [
        {"type": "URLRewrite", "urlRewrite": {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}}}]


def test_the_endpoints_of_a_pool_are_routers_and_a_gateway_goes_on_without_its_picker() -> None:
    found = made({"pool": {"picker": "epp"}})
    assert found[POOL]["apiVersion"] == "inference.networking.k8s.io/v1"
    assert found[POOL]["spec"] == {
        "selector": {"matchLabels": {labels.SERVICE: "qwen", labels.ROUTER: "true"}},
        "targetPorts": [{"number": 10001}],
        "endpointPickerRef": {"group": "", "kind": "Service", "name": "epp", "port": {"number": 9002},
                              "failureMode": "FailOpen"}}
    (rule,) = found[ROUTE]["spec"]["rules"]
    assert rule["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "qwen", "weight": 1}]
    assert needs(found[ROUTE], ()) == (Need(POOL, "qwen"),), "a route to a pool that is not there answers 500"


@pytest.mark.parametrize(("asked", "validation"), [
    ({"hostname": "qwen.internal"}, {"hostname": "qwen.internal", "wellKnownCACertificates": "System"}),
    ({"hostname": "qwen.internal", "caConfigMap": "ca"},
     {"hostname": "qwen.internal", "caCertificateRefs": [{"group": "", "kind": "ConfigMap", "name": "ca"}]}),
])
def test_the_gateway_checks_the_certificate_of_routers_that_serve_https(
    asked: dict[str, Any], validation: dict[str, Any]
) -> None:
    found = made({"tls": asked}, **HTTPS)
    target = {"group": "", "kind": "Service", "name": "qwen"}
    assert found[TLS]["spec"] == {"targetRefs": [target], "validation": validation}
    assert needs(found[ROUTE], ["qwen"]) == (Need(TLS, "qwen"),), "else prompts would go in clear to a port of TLS"


def test_all_of_it_outlives_the_service_until_its_last_pod_has_gone() -> None:
    found = [*made({"tls": {"hostname": "a"}}, **HTTPS).values(), *made({"pool": {"picker": "epp"}}).values()]
    for each in found:
        meta = each["metadata"]
        assert meta["ownerReferences"] == [], "or running streams would be cut with the route"
        assert meta["labels"][labels.SERVICE_UID] == UID
        assert labels.INSTANCE not in meta["labels"]
        assert labels.APPLIED in meta["annotations"]


@pytest.mark.parametrize(("seconds", "text"), [
    (0, "0s"), (1, "1s"), (0.2, "1s"), (60, "1m"), (3600, "1h"), (3610, "1h10s"), (7 * 86400 + 10, "168h10s"),
    (36610.2, "10h10m11s"),
])
def test_durations_are_of_the_form_that_gateway_api_takes(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_where_only_some_clients_are_let_in_the_gateways_pods_are_too() -> None:
    asked: dict[str, Any] = {"router": {"gateway": {"parentRefs": [
        {"name": "public", "namespace": "gateways"}, {"name": "own", "sectionName": "a"},
        {"name": "own", "sectionName": "b"}]}}}
    everybody = clients_policy(service(**asked))["spec"]["ingress"]
    assert "from" not in everybody[0], "everybody is let in already"
    some = {"podSelector": {"matchLabels": {"app": "chat"}}}
    (rule,) = clients_policy(service(**asked, networkPolicy={"clients": [some]}))["spec"]["ingress"]
    assert rule["from"] == [
        some,
        {"podSelector": {"matchLabels": {"gateway.networking.k8s.io/gateway-name": "public"}},
         "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}},
        {"podSelector": {"matchLabels": {"gateway.networking.k8s.io/gateway-name": "own"}},
         "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "team-a"}}}]
    assert rule["ports"] == [{"protocol": "TCP", "port": 10001}]


def test_two_listeners_of_one_gateway_are_not_written_again_and_again() -> None:
    asked = {"parentRefs": [{"name": "a", "sectionName": "http"}, {"name": "a", "sectionName": "https"}]}
    wanted = made(asked)[ROUTE]
    live = {**wanted, "spec": {**wanted["spec"], "parentRefs": [dict(each) for each in wanted["spec"]["parentRefs"]]}}
    assert differs(wanted, live) == ""
    live["spec"]["parentRefs"][0]["sectionName"] = "other"
    assert differs(wanted, live) == "spec.parentRefs[0].sectionName"
