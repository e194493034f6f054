"""The rules in vLLM's own engine core, by the sources of each version that is known; ranks are threads, no engine runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from dp_cores import Core, cores, wait
from vllm.v1.engine import EngineCoreRequestType
from vllm_places import MODULE

from xpyd_sidecar.engine.dp_plugin import compat

pytestmark = pytest.mark.timeout(300)  # vLLM looks at the model in a process of its own, once


@pytest.fixture(params=["rpc", "shm"])
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Core]]:
    stock = dict(vars(compat.DPEngineCoreProc))
    with cores(monkeypatch, request.param) as made:
        yield made
    assert dict(vars(compat.DPEngineCoreProc)) == stock, "vLLM's class is its own again"


def over(core: Core, name: str) -> None:
    wait(lambda: core.reason(name), f"{name} ends")


def test_a_request_of_one_rank_is_accompanied_by_dummies_and_nothing_runs_for_nothing(ranks: list[Core]) -> None:
    one, other = ranks
    name = one.ask([1, 2, 3], 5)
    over(one, name)
    assert (one.tokens(name), one.reason(name)) == (5, "length")
    wait(lambda: len(other.executor.forwards) == 5, "the other rank's dummies")
    assert (one.executor.forwards, other.executor.forwards) == (["real"] * 5, ["dummy"] * 5)


def test_requests_of_both_ranks_run_in_the_same_steps(ranks: list[Core]) -> None:
    names = [[core.ask([1, 2, 3, number], 3 + number) for number in range(4)] for core in ranks]
    for core, mine in zip(ranks, names, strict=True):
        for number, name in enumerate(mine):
            over(core, name)
            assert core.tokens(name) == 3 + number
    wait(lambda: len({len(core.executor.forwards) for core in ranks}) == 1, "the same number of forwards")


def test_no_rank_starts_or_ends_a_wave_and_a_wave_that_somebody_starts_is_dropped(ranks: list[Core]) -> None:
    one, other = ranks
    other.send(EngineCoreRequestType.START_DP_WAVE, (0, 0))
    name = one.ask([1, 2], 2)
    over(one, name)
    said = [output for core in ranks for output in core.outputs()]
    assert said
    assert all(output.start_wave is None and output.wave_complete is None for output in said)
    assert len(other.executor.forwards) <= 2


def pause(ranks: list[Core], method: str, *args: Any) -> None:
    """All ranks agree on a step."""
    numbers = [core.begin(method, *args) for core in ranks]
    for core, number in zip(ranks, numbers, strict=True):
        core.result(number)


def test_a_pause_waits_for_what_runs_and_after_it_all_goes_on(ranks: list[Core]) -> None:
    one, other = ranks
    name = one.ask([1, 2, 3], 100)
    wait(lambda: one.tokens(name), "its first token")
    pause(ranks, "pause_scheduler", "wait", False)
    over(one, name)
    assert one.tokens(name) == 100
    queued = other.ask([4, 5], 3)
    with pytest.raises(AssertionError, match="not within"):
        wait(lambda: other.tokens(queued), "a token while paused", deadline_s=0.3)
    for core in ranks:
        core.result(core.begin("resume_scheduler"))
    over(other, queued)
    assert other.tokens(queued) == 3


def test_resuming_while_a_pause_is_under_way_is_refused(ranks: list[Core]) -> None:
    one, other = ranks
    pausing = one.begin("pause_scheduler", "keep", False)
    with pytest.raises(RuntimeError, match="while a pause is under way"):
        one.result(one.begin("resume_scheduler"))
    other.result(other.begin("pause_scheduler", "keep", False))
    one.result(pausing)
    for core in ranks:
        core.result(core.begin("resume_scheduler"))
    name = one.ask([1], 1)
    over(one, name)


@pytest.mark.skipif(MODULE == "v032", reason="0.32 queues what comes while generation is paused")
def test_what_a_users_pause_turns_away_is_let_in_again_by_resuming(ranks: list[Core]) -> None:
    one, _ = ranks
    pause(ranks, "pause_generation", "abort", False)
    refused = one.ask([1, 2], 3)
    over(one, refused)
    assert (one.tokens(refused), one.reason(refused)) == (0, "error")
    for core in ranks:
        core.result(core.begin("resume_scheduler"))
    name = one.ask([1, 2], 3)
    over(one, name)
    assert (one.tokens(name), one.reason(name)) == (3, "length")
