"""What of a document points outside: what its own NetworkPolicy cuts off, and what would take the place of a field."""

from __future__ import annotations

from typing import Any

import pytest
from render_service import service

from xpyd_operator.api import outside
from xpyd_operator.api.rule import Target
from xpyd_operator.plan.desired import Revision
from xpyd_operator.render.judge import judge
from xpyd_operator.render.pod import engine_pods
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract.ids import InstanceName, Role

PROXY = {"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}


def env(*pairs: tuple[str, str]) -> dict[str, Any]:
    return {"env": [{"name": name, "value": value} for name, value in pairs]}


def cut_off(**spec: Any) -> dict[str, str]:
    return {fault.path: fault.message for fault in outside.warnings(service(Target.KUBERNETES, **spec))}


def test_each_address_that_is_cut_off_is_said_with_its_field_and_port() -> None:
    store = {"connector": "LMCacheMPConnector",
             "options": {"lmcache.mp.host": "tcp://lmcache.storage", "lmcache.mp.port": 5555}}
    found = cut_off(
        engine=env(("HTTPS_PROXY", "http://proxy.example:3128"), ("HF_ENDPOINT", "http://mirror.example:8080"),
                   ("AWS_ENDPOINT_URL", "http://minio.storage:9000"), ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://otel:4317")),
        router={"tracing": {"endpoint": "http://otel.observability:4318"}}, kv={"offload": {"store": store}})
    ports = {"spec.engine.env[0].value": 3128, "spec.engine.env[1].value": 8080, "spec.engine.env[2].value": 9000,
             "spec.engine.env[3].value": 4317, "spec.router.tracing.endpoint": 4318,
             'spec.kv.offload.store.options["lmcache.mp.host"]': 5555}
    assert found.keys() == ports.keys()
    for path, port in ports.items():
        assert f"goes to port {port}" in found[path]
        assert f"add it to spec.networkPolicy.egress, e.g. {{ports: [{{port: {port}}}]}}" in found[path]


@pytest.mark.parametrize(("name", "value", "ports"), [
    ("HTTP_PROXY", "http://u:p@proxy:8080/", [8080]),
    ("https_proxy", "proxy.corp:3128", [3128]),
    ("ANY", "https://mirror.corp:8443/x?y=1", [8443]),
    ("ANY", "http://plain.corp", [80]),
    ("REDIS", "redis://cache", [6379]),
    ("LMCACHE_REMOTE_URL", "lm://kv.storage:65432", [65432]),
    ("MOONCAKE_MASTER", "master.storage:50051", [50051]),
    ("BROKERS_ADDRESS", "a:9092,b:9093", [9092, 9093]),
    ("V6_ENDPOINT", "http://[fd00::5]:9000", [9000]),
    ("ANY", "https://huggingface.co", []),
    ("NO_PROXY", "10.0.0.0/8,svc:8080", []),
    ("ANY", "http://localhost:9000", []),
    ("ANY", "http://127.0.0.1:9000", []),
    ("ANY", "tcp://*:5557", []),
    ("ANY", "s3://bucket/folder", []),
    ("ANY", "python:3", []),
    ("ANY", "a sentence with http://x:1 inside", []),
    ("ANY", "http://qwen:10001", []),
    ("ANY", "http://qwen-members.ns.svc:30001", []),
], ids=str)
def test_what_is_an_address_and_what_only_looks_like_it(name: str, value: str, ports: list[int]) -> None:
    document = service(Target.KUBERNETES, engine=env((name, value)))
    said = [fault.message for fault in outside.warnings(document)]
    assert [int(words.partition("port ")[2].partition(" ")[0]) for words in said] == ports


def test_variables_of_templates_and_arguments_are_looked_at_too() -> None:
    main = {"spec": {"containers": [{"name": "main", "env": [PROXY]}],
                     "initContainers": [{"name": "fetch", "env": [PROXY]}]}}
    found = cut_off(
        template=main, decode={"template": main, "args": ["--otlp-traces-endpoint", "http://otel:4317"]},
        router={"placement": "deployment", "template": {"spec": {"containers": [{"name": "router", "env": [PROXY]}]}}},
        engine={"args": ["--otlp-traces-endpoint=http://otel:4319", "--kv-events-config", '{"endpoint": "tcp://hub:5557"}']})
    assert set(found) == {
        "spec.template.spec.containers[0].env[0].value", "spec.template.spec.initContainers[0].env[0].value",
        "spec.decode.template.spec.containers[0].env[0].value", "spec.decode.template.spec.initContainers[0].env[0].value",
        "spec.router.template.spec.containers[0].env[0].value", "spec.decode.args[1]", "spec.engine.args[0]",
        "spec.engine.args[2]"}


@pytest.mark.parametrize(("rule", "lets"), [
    ({}, True),
    ({"ports": [{"port": 3128}]}, True),
    ({"ports": [{"port": 3000, "endPort": 4000}]}, True),
    ({"ports": [{"port": 3129}]}, False),
    ({"ports": [{"protocol": "UDP", "port": 3128}]}, False),
    ({"ports": [{"port": "proxy"}]}, True),
    ({"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}, True),
    ({"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": 443}]}, False),
], ids=str)
def test_a_rule_that_may_let_it_out_is_believed(rule: dict[str, Any], lets: bool) -> None:
    found = cut_off(engine={"env": [PROXY]}, networkPolicy={"egress": [rule]})
    assert bool(found) is not lets


def test_a_number_is_compared_with_the_blocks() -> None:
    def lets(block: dict[str, Any]) -> bool:
        return outside.lets_out([{"to": [{"ipBlock": block}]}], "10.1.2.3", 3128)

    assert lets({"cidr": "10.0.0.0/8"})
    assert not lets({"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]})
    assert not lets({"cidr": "192.168.0.0/16"})
    assert not lets({"cidr": "fd00::/8"})
    assert not outside.lets_out([{"to": [{"podSelector": {}}]}], "10.1.2.3", 3128)
    assert outside.lets_out([{"to": [{"podSelector": {}}]}], "proxy", 3128)
    assert lets({"cidr": "nonsense"})  # the API server's business


def test_without_a_policy_nothing_is_cut_off_and_on_a_host_there_is_none() -> None:
    assert cut_off(engine={"env": [PROXY]}, networkPolicy={"enabled": False}) == {}
    document = {"apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService", "metadata": {"name": "qwen"},
                "spec": {"model": {"source": "Qwen/Qwen3-8B"}, "engine": {"env": [PROXY]}}}
    assert judge(document, Target.LOCAL).warnings == ()
    assert len(judge(document, Target.KUBERNETES).warnings) == len(judge(document, None).warnings) == 1


# --- the hub ---


def refused(**spec: Any) -> dict[str, str]:
    document = {"apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService", "metadata": {"name": "qwen"}, "spec": spec}
    return {fault.path: fault.message for fault in judge(document, Target.KUBERNETES).refusals}


GATED = {"source": "Qwen/Qwen3-8B", "tokenSecret": {"name": "hub", "key": "token"}, "cache": {"claim": "weights"}}


def test_a_variable_that_would_take_the_place_of_a_field_is_refused() -> None:
    found = refused(model=GATED, engine=env(("HF_TOKEN", "x"), ("A", "b"), ("HF_HOME", "/home/xpyd/hub")))
    words = "would take the place of what spec.model.{} says, and that would be of no effect; keep one of them"
    assert found == {"spec.engine.env[0].name": f"HF_TOKEN {words.format('tokenSecret')}",
                     "spec.engine.env[2].name": f"HF_HOME {words.format('cache')}"}
    main = {"spec": {"containers": [{"name": "logs"}, {"name": "main", "env": [{"name": "HF_HUB_CACHE", "value": "/x"}]}]}}
    assert list(refused(model=GATED, template=main)) == ["spec.template.spec.containers[1].env[0].name"]
    assert list(refused(model=GATED, decode={"template": main})) == ["spec.decode.template.spec.containers[1].env[0].name"]


def test_without_the_field_it_is_the_users_own() -> None:
    plain = {"source": "Qwen/Qwen3-8B"}
    assert refused(model=plain, engine=env(("HF_TOKEN", "x"), ("HF_HOME", "/x"))) == {}
    assert refused(model=GATED, engine=env(("HF_HUB_DISABLE_XET", "1"), ("HF_ENDPOINT", "https://mirror"))) == {}


def variables(**spec: Any) -> dict[str, Any]:
    document = service(Target.KUBERNETES, **spec)
    (pod,) = engine_pods(document, Role.DECODE, InstanceName("e"), Revision("r"), KubeSettings(sidecar_image="x"))
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in pod["spec"]["containers"][0]["env"]}


def test_a_pod_has_the_hubs_variables_from_the_fields() -> None:
    found = variables(model=GATED)
    assert (found["HF_HOME"], found["HF_TOKEN"]) == ("/cache", {"secretKeyRef": {"name": "hub", "key": "token"}})
    assert "MODELSCOPE_CACHE" not in found
    assert variables(model={"source": "/models/qwen"})["HF_HUB_OFFLINE"] == "1"


def test_model_scope_downloads_into_the_cache() -> None:
    for word, there in (("True", True), ("1", True), ("0", False)):
        found = variables(model=GATED, engine=env(("VLLM_USE_MODELSCOPE", word)))
        assert (found.get("MODELSCOPE_CACHE") == "/cache/modelscope") is there


def test_a_service_account_whose_credentials_are_cut_off_is_noted() -> None:
    account = {"spec": {"serviceAccountName": "models"}}
    document = service(Target.KUBERNETES, template=account)
    assert [fault.path for fault in outside.notes(document)] == ["spec.template.spec.serviceAccountName"]
    rule = {"to": [{"ipBlock": {"cidr": "169.254.169.254/32"}}], "ports": [{"port": 80}]}
    assert list(outside.notes(service(Target.KUBERNETES, template=account, networkPolicy={"egress": [rule]}))) == []
    assert list(outside.notes(service(Target.KUBERNETES, template={"spec": {}}))) == []
