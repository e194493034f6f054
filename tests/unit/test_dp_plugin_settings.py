import pytest
from vllm.platforms import current_platform  # noqa: F401 (its first import starts processes, here and in no test)

from xpyd_sidecar.engine.dp_plugin import register
from xpyd_sidecar.engine.dp_plugin.settings import StepSyncSettings, read
from xpyd_sidecar.errors import ConfigError


@pytest.mark.parametrize("environ", [
    {}, {"XPYD_DP_SYNC": "disabled"}, {"XPYD_DP_SYNC": "disabled", "XPYD_DP_TIMEOUT_S": "x"}])
def test_nothing_happens_unless_it_is_asked_for(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(environ) is None
    monkeypatch.delenv("XPYD_DP_SYNC", raising=False)
    register()


def test_everything_that_can_be_set() -> None:
    assert read({"XPYD_DP_SYNC": "auto"}) == StepSyncSettings("auto")
    found = read({"XPYD_DP_SYNC": "shm", "XPYD_DP_LOOKAHEAD": "24", "XPYD_DP_TIMEOUT_S": "7.5"})
    assert found is not None
    assert (found.mode, found.policy.fixed, found.timeout_s) == ("shm", 24, 7.5)


@pytest.mark.parametrize(("name", "value"), [
    ("XPYD_DP_SYNC", "zmq"), ("XPYD_DP_SYNC", "off"), ("XPYD_DP_SYNC", ""), ("XPYD_DP_LOOKAHEAD", "-1"),
    ("XPYD_DP_LOOKAHEAD", "2000"), ("XPYD_DP_LOOKAHEAD", "many"), ("XPYD_DP_TIMEOUT_S", "0"),
    ("XPYD_DP_TIMEOUT_S", "soon"), ("XPYD_DP_TIMEOUT_S", "nan"), ("XPYD_DP_TIMEOUT_S", "inf")])
def test_a_bad_value_is_refused_with_the_variables_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read({"XPYD_DP_SYNC": "rpc", name: value})
