"""Settings of the connector: every bad one is refused with its field and what works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from xpyd_sidecar.contract import keys
from xpyd_sidecar.engine import settings
from xpyd_sidecar.errors import ConfigError


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    keys.write(tmp_path / "key", keys.mint())
    return {"XPYD_HOST": "127.0.0.1", "XPYD_KEY_FILE": str(tmp_path / "key"), "XPYD_RUN_DIR": str(tmp_path),
            "XPYD_INSTANCE": "s-e0"}


def test_everything_has_a_default_but_host_and_key(environ: dict[str, str]) -> None:
    found = settings.read({}, environ)
    assert (found.instance, found.host, found.options.transport) == ("s-e0", "127.0.0.1", "auto")
    assert found.run_dir == Path(environ["XPYD_RUN_DIR"])
    del environ["XPYD_RUN_DIR"]
    assert settings.read({"other": 1}, environ).run_dir is None


@pytest.mark.parametrize(("options", "text"), [
    ({"nccl_groups": 0}, r"nccl_groups: 0 must be at least 1 and at most 1024"),
    ({"nccl_ctas": 33}, r"nccl_ctas: 33 must be at least 1 and at most 32"),
    ({"shared_folder": "/nowhere"}, r"shared_folder: /nowhere is no folder"),
    ({"transport": "pigeon"}, r"Invalid enum value 'pigeon' - at `\$\.transport`"),
    ({"mode": "pull"}, r"Invalid enum value 'pull' - at `\$\.mode`"),
    ({"buffer_bytes": -1}, r"buffer_bytes: -1 must be at least 0"),
    ({"buffer_share": 1.5}, r"buffer_share: 1.5 must be at least 0 and at most 1"),
    ({"buffer_bytes": 1, "buffer_share": 0.1}, r"buffer_share: give it or buffer_bytes"),
    ({"host_pool_bytes": -1}, r"host_pool_bytes: -1 must"),
    ({"put_wait_s": 0}, r"put_wait_s: 0(.0)? must be above 0"),
    ({"window_bytes": 0}, r"window_bytes: 0 must be above 0"),
    ({"keep_bytes": 0}, r"keep_bytes: 0 must be above 0"),
    ({"keep_ttl_s": -1}, r"keep_ttl_s: -1\.0 must be above 0"),
    ({"load_timeout_s": 0}, r"load_timeout_s"),
    ({"load_limit_s": 0}, r"load_limit_s: 0\.0 must be above 0"),
    ({"peer_timeout_s": "fast"}, r"Expected `float`, got `str` - at `\$\.peer_timeout_s`"),
    ({"control_port": 70000}, r"control_port: 70000 is no port"),
    ({"data_port": -1}, r"data_port: -1 is no port"),
    ({"advertise_data": "here"}, r"advertise_data: 'here' is not host:port"),
    ({"advertise_data": "host.example:5"}, r"advertise_data: 'host\.example' is not an IP address"),
    ({"keepbytes": 1}, r"unknown field `keepbytes`"),
    ("tcp", r'kv_connector_extra_config\["xpyd"\]: Expected `object`, got `str`'),
])
def test_bad_options_are_refused_with_the_field(environ: dict[str, str], options: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        settings.read({"xpyd": options}, environ)


@pytest.mark.parametrize(("changes", "text"), [
    ({"XPYD_HOST": "localhost"}, "XPYD_HOST: 'localhost' is not an IP address"),
    ({"XPYD_HOST": ""}, "XPYD_HOST: '' is not an IP address"),
    ({"XPYD_KEY_FILE": ""}, "XPYD_KEY_FILE is not set"),
    ({"XPYD_KEY_FILE": "/nowhere/key"}, "XPYD_KEY_FILE: .*No such file"),
    ({"XPYD_RUN_DIR": "/nowhere"}, "XPYD_RUN_DIR: /nowhere is no folder"),
    ({"VLLM_API_KEY": "sk"}, "VLLM_API_KEY is set.* write spec.router.apiKeySecret"),
])
def test_bad_environment_is_refused_with_the_variable(environ: dict[str, str], changes: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        settings.read({}, environ | changes)


def test_an_empty_api_key_is_none(environ: dict[str, str]) -> None:
    assert settings.read({}, environ | {"VLLM_API_KEY": ""}).host == "127.0.0.1"


def test_a_key_file_with_something_else_in_it_is_refused(environ: dict[str, str]) -> None:
    Path(environ["XPYD_KEY_FILE"]).chmod(0o600)
    Path(environ["XPYD_KEY_FILE"]).write_text("secret")
    with pytest.raises(ConfigError, match="a service key is 64 hex digits"):
        settings.read({}, environ)


def test_an_engine_does_not_take_a_key_that_somebody_else_put_there(environ: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / keys.file_name(keys.mint())
    path.write_text("ab" * 32)
    with pytest.raises(ConfigError, match=r"XPYD_KEY_FILE: .* it holds another key .* than the service's"):
        settings.read({}, environ | {"XPYD_KEY_FILE": str(path)})
