"""What is learned of engines from a sample of traffic, and what plain engines would do with it by the simulation."""

from __future__ import annotations

import msgspec
import pytest
from clinic import GPU, healthy, instance, intake, reading, traffic

from xpyd_operator.doctor import worth
from xpyd_operator.doctor.examine import examine
from xpyd_operator.doctor.learned import LEAST, learn
from xpyd_operator.doctor.replay import as_pd, as_plain, engine_of, measured_latency
from xpyd_operator.simulation.world import TAIL_S
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.contract.intake import IntakeRates
from xpyd_sidecar.contract.sample import Sample, SampledRequest


def test_one_request_takes_its_prefill_and_a_step_for_each_further_token() -> None:
    lone = [SampledRequest(3.0, 1000, 11, -1.0, -1.0, 0.0, -1.0, -1.0)]
    for plain in as_plain(lone, GPU, 1):
        assert plain.ttft_p95 == pytest.approx(GPU.prefill_s(1000))
        assert plain.tpot_p95 == pytest.approx(GPU.step_s(1))
    pd = as_pd(lone, GPU, 1, 1)
    handover_s = GPU.handover - GPU.step_s(GPU.running) + GPU.step_s(1)
    assert pd.ttft_p95 == pytest.approx(GPU.prefill_s(1000) + handover_s)
    assert pd.tpot_p95 == pytest.approx(GPU.step_s(1))


def test_who_is_never_answered_has_waited_until_the_end() -> None:
    many = [SampledRequest(at / 100, 20_000, 100, -1.0, -1.0, 0.0, -1.0, -1.0) for at in range(3000)]
    for plain in as_plain(many, GPU, 1):
        assert TAIL_S < plain.ttft_p95 < TAIL_S + many[-1].at, "3,000 prompts of a second each"
        assert 0 < plain.tpot_p95 < 60


def test_quantiles_lie_between_two_requests() -> None:
    two = [SampledRequest(0.0, 10, 2, ttft, ttft + 0.1, 0.0, -1.0, -1.0) for ttft in (1.0, 2.0)]
    assert measured_latency(two).ttft_p50 == pytest.approx(1.5)
    assert measured_latency([]).ttft_p95 == 0.0


def test_the_size_of_chunks_that_is_better_for_plain_engines_counts() -> None:
    service = healthy(traffic(13_000, 0.8, output=300))
    learned = learn(service.sample, 1)
    assert learned is not None
    assert service.sample is not None
    both = as_plain(service.sample.requests, learned, 2)
    assert both[0] != both[1], "or there is nothing to choose"
    compared = worth.compare(service, learned)
    assert compared is not None
    by_chunk = [msgspec.structs.replace(compared, as_plain=each).verdict for each in both]
    assert worth.VERDICTS.index(compared.verdict) == min(map(worth.VERDICTS.index, by_chunk))


def test_what_engines_take_is_learned_from_their_traffic() -> None:
    learned = learn(traffic(2000, 3.0), 1)
    assert learned is not None
    for name in ("prefill_per_token", "step_base"):
        assert getattr(learned, name) == pytest.approx(getattr(GPU, name), rel=0.15), name
    way_s = GPU.handover + GPU.step_base / 2
    assert engine_of(learned).handover == pytest.approx(way_s, rel=0.05), "without decode's first step"
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
    was, played = measured_latency(sample.requests), as_pd(sample.requests, learned, 1, 2)
    assert played.ttft_p50 == pytest.approx(was.ttft_p50, rel=0.15)
    assert played.tpot_p50 == pytest.approx(was.tpot_p50, rel=0.15)


def test_long_prompts_cost_plain_engines_their_steps_and_spread_their_prefill() -> None:
    sample = traffic(13_000, 0.8, output=300)
    learned = learn(sample, 1)
    assert learned is not None
    pd, plain = as_pd(sample.requests, learned, 1, 1), as_plain(sample.requests, learned, 2)
    assert all(each.tpot_p95 > 1.25 * pd.tpot_p95 for each in plain)
    assert all(each.ttft_p95 < pd.ttft_p95 for each in plain)


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
    assert service.sample is not None
    assert compared.covers_s == pytest.approx(service.sample.covers_s - service.sample.requests[-100].at)


def test_a_request_without_a_known_answer_takes_the_mean_of_the_others() -> None:
    sample = traffic(4000, 2.0)
    learned = learn(sample, 1)
    assert learned is not None
    odd = [SampledRequest(1.0, 100, -1, -1.0, 2.0, 0.0, -1.0, -1.0)]
    assert as_plain(odd, learned, 1)[0].tpot_p50 == pytest.approx(learned.step_s(1), rel=0.01)
