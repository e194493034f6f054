"""A model of plain engines, and what is learned of engines from a sample of traffic."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from clinic import GPU, healthy, instance, intake, reading, traffic

from xpyd_operator.doctor import worth
from xpyd_operator.doctor.examine import examine
from xpyd_operator.doctor.learned import LEAST, learn
from xpyd_operator.doctor.plain import CHUNK, PlainEngine, Played, as_pd, as_plain, measured
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.contract.intake import IntakeRates
from xpyd_sidecar.contract.sample import Sample, SampledRequest


def asked(at: float, prompt: int, output: int) -> Played:
    return Played(at, prompt, prompt, output, tokens=output, begun=at)


def test_one_request_takes_its_prefill_and_a_step_for_each_further_token() -> None:
    engine = PlainEngine(GPU)
    one = asked(3.0, 1000, 11)
    engine.take(one)
    engine.until(float("inf"))
    assert one.first == pytest.approx(3.0 + GPU.prefill_s(1000))
    assert one.ended == pytest.approx(one.first + 10 * GPU.step_s(1))
    assert engine.work == pytest.approx(0.0)


def test_a_prompt_that_comes_slows_those_that_decode() -> None:
    def ended(*, with_prompt: bool) -> float:
        engine = PlainEngine(GPU)
        first = asked(0.0, 100, 200)
        engine.take(first)
        if with_prompt:
            engine.until(0.5)
            engine.take(asked(0.5, 4 * CHUNK, 1))
        engine.until(float("inf"))
        return first.ended

    assert ended(with_prompt=True) - ended(with_prompt=False) > 0.9 * 4 * CHUNK * GPU.prefill_per_token


def test_every_request_ends_however_the_clock_is_cut() -> None:
    def run(cuts: int) -> list[float]:
        engine, random = PlainEngine(GPU), Random(7)
        played = [asked(at, random.randrange(8, 5000), random.randrange(1, 90)) for at in range(20)]
        for one in played:
            for cut in range(1, cuts + 1):
                engine.until(one.arrived - 1 + cut / cuts)
            engine.take(one)
        engine.until(float("inf"))
        assert engine.work == pytest.approx(0.0, abs=1e-6)
        assert all(one.arrived < one.first <= one.ended for one in played)
        return [one.ended for one in played]

    assert run(1) == pytest.approx(run(17))


def test_what_engines_take_is_learned_from_their_traffic() -> None:
    learned = learn(traffic(2000, 3.0), 1)
    assert learned is not None
    for name in ("prefill_per_token", "step_base"):
        assert getattr(learned, name) == pytest.approx(getattr(GPU, name), rel=0.15), name
    assert learned.way_s == pytest.approx(GPU.handover, rel=0.15), "without decode's own steps"
    assert learned.prefill_s(2000) == pytest.approx(GPU.prefill_s(2000), rel=0.1)
    assert learned.pays_from == pytest.approx((learned.handover - GPU.prefill_start) / GPU.prefill_per_token, abs=120)


def test_a_few_requests_teach_nothing() -> None:
    few = traffic(2000, 1.0, seconds=LEAST // 2)
    assert learn(few, 1) is None
    assert learn(None, 1) is None
    unknown = tuple(msgspec.structs.replace(one, output=-1) for one in traffic(2000, 3.0).requests)
    assert learn(Sample(few.service, 600.0, unknown), 1) is None, "no answer's length is known"


def test_the_model_of_what_ran_is_near_what_ran() -> None:
    sample = traffic(4000, 3.0, decodes=2)
    learned = learn(sample, 2)
    assert learned is not None
    was, played = measured(sample.requests), as_pd(sample.requests, learned, 1, 2)
    assert played.ttft_p50 == pytest.approx(was.ttft_p50, rel=0.15)
    assert played.tpot_p50 == pytest.approx(was.tpot_p50, rel=0.15)


def test_long_prompts_cost_plain_engines_their_steps_and_spread_their_prefill() -> None:
    sample = traffic(13_000, 0.8, output=300)
    learned = learn(sample, 1)
    assert learned is not None
    pd, plain = as_pd(sample.requests, learned, 1, 1), as_plain(sample.requests, learned, 2)
    assert plain.tpot_p95 > 1.25 * pd.tpot_p95
    assert plain.ttft_p95 < pd.ttft_p95


def test_plain_engines_are_named_where_they_would_do_better() -> None:
    decodes = [instance(f"d{number}", Role.DECODE, intake=intake(1500.0)) for number in range(7)]
    prefill = instance("p0", Role.PREFILL, intake=IntakeRates(computed_s=11_000.0))
    service = healthy(traffic(1500, 8.0, decodes=7, seconds=200), instances=(prefill, *decodes))
    found = examine(reading(service))
    assert [one.name for one in found.findings if one.level == "advice"] == ["plain-engines"]
    assert found.compared is not None
    assert found.compared.engines == 8


def test_a_model_that_does_not_fit_says_nothing() -> None:
    sample = traffic(13_000, 0.8, output=300)
    slow = tuple(msgspec.structs.replace(one, ttft=one.ttft + 5, total=one.total + 5) for one in sample.requests)
    compared = examine(reading(healthy(Sample(sample.service, 600.0, slow)))).compared
    assert compared is not None
    assert compared.verdict == "unknown"
    assert "says nothing here" in worth.words_of(compared)


def test_what_is_played_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "MOST_PLAYED", 200)
    service = healthy(traffic(4000, 2.0))
    compared = worth.compare(service, learn(service.sample, 1))
    assert compared is not None
    assert compared.requests == 100


def test_a_request_without_a_known_answer_takes_the_mean_of_the_others() -> None:
    sample = traffic(4000, 2.0)
    learned = learn(sample, 1)
    assert learned is not None
    odd = [SampledRequest(1.0, 100, -1, -1.0, 2.0, 0.0, -1.0, -1.0)]
    assert as_plain(odd, learned, 1).tpot_p50 == pytest.approx(learned.step_s(1), rel=0.01)
