"""What the environment says about the queue under vLLM's executor."""

from __future__ import annotations

from pathlib import Path

import pytest

from xpyd_sidecar.contract import keys, launch
from xpyd_sidecar.contract.group import ENV_LIFE
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.engine.executor_queue.settings import QueueSettings, read
from xpyd_sidecar.errors import ConfigError

KEY = ServiceKey(bytes(range(32)))
ASKED = {launch.ENV_QUEUE: "xpyd"}


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    keys.write(tmp_path / "key", KEY)
    return str(tmp_path / "key")


@pytest.mark.parametrize("environ", [{}, {launch.ENV_QUEUE: "vllm", launch.ENV_KEY_FILE: "/nowhere"}])
def test_unless_it_is_asked_for_nothing_is_read(environ: dict[str, str]) -> None:
    assert read(environ) is None


def test_on_one_host_there_need_be_no_key() -> None:
    assert read(ASKED) == QueueSettings()


def test_an_engine_without_members_uses_the_key_of_the_service(key_file: str) -> None:
    assert read(ASKED | {launch.ENV_KEY_FILE: key_file, launch.ENV_HOST: "::1"}) == QueueSettings(KEY, "::1")


def test_members_use_a_key_of_their_life(key_file: str) -> None:
    one, other = (read(ASKED | {launch.ENV_KEY_FILE: key_file, ENV_LIFE: life})
                  for life in ("ab" * 16, "cd" * 16))
    assert one == QueueSettings(keys.of_life(KEY, "ab" * 16), "", "ab" * 16)
    assert one is not None
    assert other is not None
    assert len({KEY, one.key, other.key}) == 3


@pytest.mark.parametrize(("environ", "tells"), [
    ({launch.ENV_QUEUE: "auto"}, "'auto' is none of vllm, xpyd"),
    (ASKED | {ENV_LIFE: "ab" * 16}, "XPYD_KEY_FILE is not set"),
    (ASKED | {launch.ENV_KEY_FILE: "/nowhere/key"}, "XPYD_KEY_FILE: "),
])
def test_what_is_wrong_is_named(environ: dict[str, str], tells: str) -> None:
    with pytest.raises(ConfigError, match=tells):
        read(environ)
