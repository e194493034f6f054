"""Pods have their key from a Secret, and in a file, that are named for it."""

from __future__ import annotations

import msgspec
import pytest
from kube_documents import service

from xpyd_operator.plan.desired import Revision
from xpyd_operator.render import keys
from xpyd_operator.render.keys import PodKey
from xpyd_operator.render.objects import children, key_secret
from xpyd_operator.render.pod import engine_pods
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.contract.keys import ServiceKey, digest, file_name
from xpyd_sidecar.contract.launch import SidecarConfig

KEY = ServiceKey(bytes(range(32)))
SETTINGS = KubeSettings(sidecar_image="sidecar:1")
ID = digest(KEY)[:8]


def pod(key: PodKey) -> tuple[dict[str, object], SidecarConfig, dict[str, str]]:
    """The key's volume, what the sidecar is told, and the engine's environment."""
    made = engine_pods(service(), Role.DECODE, InstanceName("qwen-e0"), Revision("r"), SETTINGS, key=key)[0]["spec"]
    volume, = (each["secret"] for each in made["volumes"] if each["name"] == "key")
    config = msgspec.json.decode(made["initContainers"][1]["command"][-1], type=SidecarConfig)
    return volume, config, {each["name"]: each.get("value", "") for each in made["containers"][0]["env"]}


def test_a_derived_key_names_its_secret_and_its_file() -> None:
    volume, config, environment = pod(keys.derived_pod_key("qwen", KEY))
    assert volume["secretName"] == f"qwen-key-{ID}"
    assert volume["items"] == [{"key": "key", "path": file_name(KEY)}, {"key": "before", "path": "before"}]
    assert config.key_file == environment["XPYD_KEY_FILE"] == f"/etc/xpyd/key/{file_name(KEY)}"
    assert config.agent is not None
    assert (config.agent.previous_key_file, config.agent.key_mark) == ("/etc/xpyd/key/before", ID)


def test_a_key_that_is_not_known_has_the_plain_names() -> None:
    """Of a document that is rendered without a cluster."""
    volume, config, environment = pod(keys.unknown("qwen"))
    assert (volume["secretName"], volume["items"]) == ("qwen-key", [{"key": "key", "path": "key"}])
    assert config.key_file == environment["XPYD_KEY_FILE"] == "/etc/xpyd/key/key"
    assert config.agent is not None
    assert (config.agent.previous_key_file, config.agent.key_mark) == (None, "")


def test_routers_in_pods_of_their_own_get_the_key_that_they_are_given() -> None:
    apart, counts = service(router={"placement": "deployment"}), dict.fromkeys(Role, 1)
    mine = keys.derived_pod_key("qwen", KEY)
    made = next(each for each in children(apart, counts, SETTINGS, mine) if each["kind"] == "Deployment")
    spec = made["spec"]["template"]["spec"]
    assert [each["secret"]["secretName"] for each in spec["volumes"] if each["name"] == "key"] == [f"qwen-key-{ID}"]
    assert file_name(KEY) in spec["containers"][0]["command"][-1]


def test_the_secret_holds_both_keys_and_cannot_be_changed() -> None:
    made = key_secret(service(), KEY.hex(), keys.derived_pod_key("qwen", KEY), "ab" * 32)
    assert (made["metadata"]["name"], made["immutable"]) == (f"qwen-key-{ID}", True)
    assert made["stringData"] == {"key": KEY.hex(), "before": "ab" * 32}
    assert key_secret(service(), KEY.hex(), keys.derived_pod_key("qwen", KEY))["stringData"]["before"] == ""
    assert made["metadata"]["ownerReferences"][0]["uid"] == service().metadata.uid


@pytest.mark.parametrize(("secret", "derived"), [
    (f"qwen-key-{ID}", True), ("qwen-key", False), ("qwen-key-1234567", False), ("qwen-key-1234567g", False),
    ("other-key-12345678", False), ("qwen-key-12345678-x", False), ("qwen-two-key-12345678", False),
])
def test_derived_keys_are_told_by_the_name(secret: str, derived: bool) -> None:
    assert keys.is_derived("qwen", secret) is derived


def test_names_fit() -> None:
    assert len(keys.derived_pod_key("q" * 45, KEY).secret) <= 63


def test_no_pod_of_a_service_has_a_token_of_kubernetes() -> None:
    apart = service(router={"placement": "deployment"})
    engine = engine_pods(apart, Role.DECODE, InstanceName("qwen-e0"), Revision("r"), SETTINGS)[0]["spec"]
    made = children(apart, dict.fromkeys(Role, 1), SETTINGS, keys.derived_pod_key("qwen", KEY))
    routers = next(each for each in made if each["kind"] == "Deployment")["spec"]["template"]["spec"]
    assert [spec["automountServiceAccountToken"] for spec in (engine, routers)] == [False, False]
