"""The calibration recovers a model from outcomes that the model itself made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from xpyd_operator.simulation.controllers import Static
from xpyd_operator.simulation.engine import EngineModel
from xpyd_operator.simulation.world import World
from xpyd_operator.traffic.measures import Outcome

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "bench/planner"))
import calibrate

MODEL = EngineModel(prefill_start=0.01, prefill_rate=4000, step_base=0.01, step_per_request=0.002, kv_tokens=10**6,
                    handover=0.01)


def outcomes(rate: float, seed: int) -> tuple[list[Outcome], list[calibrate.Arrival]]:
    trace = calibrate.load(rate, 150, (50, 500), (16, 96), seed)
    run = World(trace, MODEL, (1, 1), Static()).play()
    return [
        Outcome(planned=each.at, started=each.at, prompt_tokens=each.prompt, output_tokens=each.output,
                first=each.at + ttft, ended=each.at + ttft + tpot * (each.output - 1))
        for each, ttft, tpot in zip(trace, run.ttft, run.tpot, strict=True)
    ], trace


def test_a_model_is_found_again_in_what_it_did() -> None:
    first, _ = outcomes(2.0, 1)
    model = calibrate.fit(first)
    assert model.prefill_rate == pytest.approx(MODEL.prefill_rate, rel=0.1)
    assert model.step_s(3, 0) == pytest.approx(MODEL.step_s(3, 0), rel=0.1)
    second, trace = outcomes(3.0, 2)
    assert calibrate.compare(second, model, trace)["calibration_error"] < 0.1


def test_a_wrong_model_shows() -> None:
    second, trace = outcomes(3.0, 2)
    slow = EngineModel(prefill_rate=1000, step_base=0.03, kv_tokens=10**6)
    assert calibrate.compare(second, slow, trace)["calibration_error"] > 0.5
