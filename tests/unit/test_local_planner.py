"""The planner within the supervisor of local processes: what it decides is in force from the next round on."""

from __future__ import annotations

import logging
from pathlib import Path
from random import Random
from typing import Any

import pytest
from planner_traffic import Traffic
from render_service import service

from xpyd_operator.local import store
from xpyd_operator.local.backend import LocalBackend
from xpyd_operator.local.observe import Picture
from xpyd_operator.local.paths import ServiceFolder
from xpyd_operator.plan.observed import ObservedService
from xpyd_sidecar.contract.ids import Role

SCALING: dict[str, Any] = {
    "prefill": {"scaling": {"min": 1, "max": 6}}, "decode": {"scaling": {"min": 1, "max": 4}},
    "limits": {"maxInstances": 8},
}


def backend_of(tmp_path: Path, mode: str) -> LocalBackend:
    folder = ServiceFolder("qwen", tmp_path)
    folder.make()
    store.save_desired(folder, service(**SCALING, planner={"mode": mode, "slo": {"ttftP95": "3s", "tpotP95": "60ms"}}))
    settings = store.settings_for(folder, "127.0.0.1")
    store.save(folder.settings, settings)
    store.service_key(folder)
    return LocalBackend(folder, settings, Random(1))


def drive(backend: LocalBackend, traffic: Traffic, seconds: int, now: float) -> float:
    for _ in range(seconds // 5):
        now += 5.0
        traffic.go_on(now)
        backend._plan(Picture(ObservedService(), (), traffic.fleet()), now)
    return now


@pytest.mark.parametrize(("mode", "acts"), [("auto", True), ("observe", False), ("disabled", False)])
def test_a_load_sets_the_counts_in_mode_auto_alone(tmp_path: Path, mode: str, acts: bool) -> None:
    backend, traffic = backend_of(tmp_path, mode), Traffic()
    traffic.rate = 20.0
    drive(backend, traffic, 180, 1000.0)
    desired = backend.blueprint.desired_service()
    assert (desired.target(Role.PREFILL).replicas > 1) == acts
    planned = backend.blueprint.planned_counts()
    assert (planned is None) == (mode == "disabled")
    if planned is not None:
        assert planned.sentence.startswith(f"planner ({mode}): ")
    again = LocalBackend(backend.folder, backend.settings, Random(2))
    assert again.blueprint.desired_service().shape == desired.shape


def test_a_document_that_cannot_be_read_stops_no_round(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend, traffic = backend_of(tmp_path, "auto"), Traffic()
    backend.folder.desired.write_text("{")
    with caplog.at_level(logging.WARNING):
        drive(backend, traffic, 10, 1000.0)
    assert "the planner waits" in caplog.text
