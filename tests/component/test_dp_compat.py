"""Which vLLM step sync is for, and what it refuses; with vLLM's own classes, without an engine."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm_places import MODULE

from xpyd_sidecar.contract import launch
from xpyd_sidecar.engine.compat import common_id
from xpyd_sidecar.engine.dp_plugin import compat, patch, register
from xpyd_sidecar.engine.dp_plugin.settings import Mode, StepSyncSettings
from xpyd_sidecar.errors import ConfigError


def config(*, moe: bool = True, transfer: Any = None, encoder: bool = False, device: str = "cuda", **parallel: Any) -> Any:
    usual = {"data_parallel_size": 2, "data_parallel_backend": "mp", "enable_elastic_ep": False,
             "enable_fault_tolerance": False, "distributed_executor_backend": "mp"}
    return SimpleNamespace(parallel_config=SimpleNamespace(**{**usual, **parallel}), ec_transfer_config=transfer,
                           is_mm_encoder_only=encoder, model_config=SimpleNamespace(is_moe=moe),
                           device_config=SimpleNamespace(device_type=device))


def engine(*, ranks: bool = True, coordinator: bool = True) -> Any:
    kind = compat.DPEngineCoreProc if ranks else compat.EngineCoreProc
    made = kind.__new__(kind)
    made.has_coordinator = coordinator
    return made


def test_this_vllm_is_the_one_that_the_rules_were_written_for() -> None:
    compat.check_sources()
    assert all(len(pinned) > 25 for pinned in compat.PINNED.values())


def test_other_sources_are_refused_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.PINNED[MODULE], "EngineCore.step", "0" * 16)
    monkeypatch.setitem(compat.PINNED[MODULE], "EngineCore.gone", "0" * 16)
    with pytest.raises(ConfigError, match=r"EngineCore\.step, EngineCore\.gone of vllm/v1/engine/core\.py differ"):
        compat.check_sources()


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    with pytest.raises(ConfigError, match=r"vLLM 0\.34\.0 is not supported"):
        compat.check_sources()


@pytest.mark.parametrize("mode", ["auto", "rpc", "shm"])
def test_ranks_that_share_experts_are_kept_in_step(mode: Mode) -> None:
    assert patch.decide(engine(), config(), StepSyncSettings(mode))


REFUSED = {
    "dense": (engine(ranks=False), config(moe=False)),
    "only one rank": (engine(ranks=False), config(data_parallel_size=1)),
    "elastic_ep": (engine(), config(enable_elastic_ep=True)),
    "fault_tolerance": (engine(), config(enable_fault_tolerance=True)),
    "external_launcher": (engine(), config(distributed_executor_backend="external_launcher")),
    "ray": (engine(), config(data_parallel_backend="ray")),
    "encoder-only": (engine(), config(encoder=True)),
    "only encode": (engine(), config(transfer=SimpleNamespace(is_encode_only=True))),
    "coordinator": (engine(coordinator=False), config()),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_kept_in_step_is_refused_with_its_reason_and_left_alone_by_auto(said: str) -> None:
    one, settings = REFUSED[said]
    with pytest.raises(ConfigError, match=said):
        patch.decide(one, settings, StepSyncSettings("rpc"))
    assert not patch.decide(one, settings, StepSyncSettings("auto"))


@pytest.mark.parametrize("mode", ["auto", "rpc"])
def test_a_cpu_build_that_lacks_the_collectives_is_refused_whatever_is_asked_for(mode: Mode) -> None:
    with pytest.raises(ConfigError, match="data_parallel_size 2: vLLM for CPUs has no collectives"):
        patch.decide(engine(), config(device="cpu"), StepSyncSettings(mode))


def request(most: int, made: int, coming: int = 0) -> Any:
    return SimpleNamespace(max_tokens=most, num_output_tokens=made, num_output_placeholders=coming)


def test_ranks_of_one_start_of_an_engine_share_an_id() -> None:
    ids = [common_id(SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=one)))
           for one in ("0b5c-77_dp0", "0b5c-77_dp1", "9d-12_dp0", "0b5c-77")]
    assert ids[0] == ids[1] != ids[2]
    assert (len(ids[0]), ids[3]) == (32, "")


def test_the_budget_is_that_of_the_request_that_may_make_most() -> None:
    assert patch.budget([]) == 1
    assert patch.budget([request(1, 0)]) == 1
    assert patch.budget([request(10, 4), request(20, 19)]) == 6
    assert patch.budget([request(10, 9, 1)]) == 1


@pytest.fixture(params=["a method differs", "another version"])
def another_vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a rank that starts says of it."""
    monkeypatch.setattr(compat.EngineCore, "_initialize_kv_caches", compat.EngineCore._initialize_kv_caches)
    monkeypatch.setattr(compat.EngineCore, patch._PREPARED, False, raising=False)
    if request.param == "another version":
        monkeypatch.setattr(vllm, "__version__", "0.34.0")
        return "vLLM 0.34.0 is not supported"
    monkeypatch.setitem(compat.PINNED[MODULE], "EngineCore.sleep", "0" * 16)
    return "EngineCore.sleep of vllm/v1/engine/core.py differ"


def test_auto_leaves_another_vllm_to_its_own_way(another_vllm: str, monkeypatch: pytest.MonkeyPatch,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    stock = compat.EngineCore._initialize_kv_caches
    monkeypatch.setattr(patch.vllm_compat, "log_like_vllm", lambda _: None)  # it would take the records elsewhere
    monkeypatch.setenv(launch.ENV_DP_SYNC, "auto")
    with caplog.at_level(logging.WARNING):
        register()
    assert compat.EngineCore._initialize_kv_caches is stock
    assert not getattr(compat.EngineCore, patch._PREPARED)
    (said,) = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert said.startswith("xpyd: no step sync, data-parallel ranks go by vLLM's waves: ")
    assert another_vllm in said


@pytest.mark.parametrize("mode", ["rpc", "shm"])
def test_rules_that_are_asked_for_by_name_are_refused_on_another_vllm(another_vllm: str, mode: Mode,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.ENV_DP_SYNC, mode)
    with pytest.raises(ConfigError, match=another_vllm):
        register()
