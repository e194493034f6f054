from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml
from render_service import service

from xpyd_operator.api.rule import Target
from xpyd_operator.errors import LocalError, SpecError
from xpyd_operator.local import store
from xpyd_operator.local.paths import ServiceFolder
from xpyd_operator.local.store import Settings, StopRequest
from xpyd_operator.render.judge import judge
from xpyd_sidecar.contract.ids import InstanceName, ServiceName
from xpyd_sidecar.contract.launch import RouterConfig, SidecarConfig


@pytest.fixture
def folder(tmp_path: Path) -> ServiceFolder:
    one = ServiceFolder("qwen", tmp_path)
    one.make()
    return one


def test_a_document_comes_back_as_it_was_handed_over(folder: ServiceFolder) -> None:
    given = service(decode={"replicas": 3}, engine={"args": ["--enforce-eager"], "env": [{"name": "A", "value": "off"}]})
    store.save_desired(folder, given)
    assert store.load_desired(folder) == given


def test_an_edited_document_is_checked(folder: ServiceFolder) -> None:
    store.save_desired(folder, service())
    folder.desired.write_text(folder.desired.read_text().replace("source:", "sorce:"))
    with pytest.raises(SpecError, match=r"spec\.model\.sorce"):
        store.load_desired(folder)
    folder.desired.unlink()
    with pytest.raises(LocalError, match="cannot read"):
        store.load_desired(folder)


def test_a_rule_that_came_later_stops_nothing_that_was_handed_over(folder: ServiceFolder) -> None:
    store.save_desired(folder, service(rollout={"maxSurge": 2}))
    text = folder.desired.read_text()
    folder.desired.write_text(text.replace("maxSurge: 2", "maxSurge: 0"))  # refused now, as nothing could be replaced
    assert judge(yaml.safe_load(folder.desired.read_text()), Target.LOCAL).refusals
    assert store.load_desired(folder).spec.rollout.max_surge == 0


def test_structs_come_back_and_damage_is_named(folder: ServiceFolder) -> None:
    assert store.load(folder.settings, Settings) is None
    settings = store.settings_for(folder, "127.0.0.1")
    store.save(folder.settings, settings)
    assert store.load_settings(folder) == settings
    folder.settings.write_text("{")
    with pytest.raises(LocalError, match=r"settings\.json is damaged"):
        store.load_settings(folder)
    folder.settings.unlink()
    with pytest.raises(LocalError, match="start the service with `xpyd up`"):
        store.load_settings(folder)


@pytest.mark.parametrize(
    ("given", "host", "listen"),
    [("127.0.0.1", "127.0.0.1", "127.0.0.1"), ("10.1.2.3", "10.1.2.3", "10.1.2.3"), ("0.0.0.0", "127.0.0.1", "0.0.0.0")],
)
def test_all_interfaces_are_for_clients_only(folder: ServiceFolder, given: str, host: str, listen: str) -> None:
    settings = store.settings_for(folder, given)
    assert (settings.host, settings.listen) == (host, listen)


def test_the_key_is_made_once_and_private(folder: ServiceFolder) -> None:
    key = store.service_key(folder)
    assert store.service_key(folder) == key
    assert folder.key.stat().st_mode & 0o077 == 0
    folder.key.write_text("short")
    with pytest.raises(LocalError, match="64 hex digits"):
        store.service_key(folder)


def test_a_wish_to_end(folder: ServiceFolder) -> None:
    store.save(folder.stop, StopRequest(now=True))
    assert store.load(folder.stop, StopRequest) == StopRequest(now=True)


def test_settings_of_a_sidecar_that_are_gone_are_left_out_and_others_are_damage(tmp_path: Path) -> None:
    config = SidecarConfig(service=ServiceName("t"), instance=InstanceName("r"), key_file="/k", run_dir="/r",
                           router=RouterConfig(host="127.0.0.1", port=1, admin_port=2, members_port=3))
    path = tmp_path / "config.json"
    value = msgspec.to_builtins(config)
    value["gone"] = 1
    value["router"] |= {"dashboard": True, "older": {"x": 1}}
    path.write_bytes(msgspec.json.encode(value))
    assert store.load_config(path) == config
    value["router"]["port"] = "none"
    path.write_bytes(msgspec.json.encode(value))
    with pytest.raises(LocalError, match=r"config.json is damaged: .* at `\$.router.port`"):
        store.load_config(path)
    path.write_text("{")
    with pytest.raises(LocalError, match="damaged"):
        store.load_config(path)
    assert store.load_config(tmp_path / "none.json") is None
