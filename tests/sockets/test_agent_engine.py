"""Looks at an engine: what each answer, or its absence, is taken for."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from agent_fakes import FakeEngine, config_of, record_of
from files import no_files

from xpyd_sidecar.agent import engine as engine_module
from xpyd_sidecar.agent.engine import BadAnswer, Probe, choose_model, parse_load
from xpyd_sidecar.contract import pair_notes, record
from xpyd_sidecar.contract.adapters import AdapterState
from xpyd_sidecar.contract.group import MemberRanks
from xpyd_sidecar.contract.ids import HostPort, Incarnation, InstanceName
from xpyd_sidecar.contract.launch import GroupConfig
from xpyd_sidecar.contract.membership import MAX_ALSO, Drafts, Load
from xpyd_sidecar.contract.pair_notes import PairNotes, RefusedPeer
from xpyd_sidecar.process import resources

TWO_ENGINES = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a } b"} 3.0
vllm:num_requests_running{engine="1",model_name="a } b"} 4.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:kv_cache_usage_perc{engine="1"} 0.25
xpyd_kv_sends_open{engine="0"} 2.0
xpyd_kv_receives_open{engine="1"} 1e0
xpyd_kv_receives_open_created{engine="1"} 1.7e9
"""


def test_series_of_several_engines_are_added_and_usage_is_averaged() -> None:
    assert parse_load(TWO_ENGINES) == Load(running=7, waiting=1, kv_usage=0.375, transfers=3)


def test_an_engine_that_speculates_says_what_it_drafted_of_how_much() -> None:
    """As vLLM names it (``test_engine_drafting``)."""
    series = (b'vllm:spec_decode_num_draft_tokens_total{engine="0"} 2274.0\n'
              b'vllm:spec_decode_num_draft_tokens_created{engine="0"} 1.7e9\n'
              b'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 400.0\n'
              b'vllm:spec_decode_num_accepted_tokens_total{engine="1"} 178.0\n'
              b'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 300.0\n'
              b'vllm:generation_tokens_total{engine="0"} 784.0\n')
    assert parse_load(TWO_ENGINES + series).drafts == Drafts(drafted=2274, accepted=578, generated=784)
    assert parse_load(TWO_ENGINES + b'vllm:generation_tokens_total{engine="0"} 784.0\n').drafts is None


def test_series_without_labels_are_read_and_those_that_are_no_number_skipped() -> None:
    assert parse_load(b"vllm:num_requests_running 2\nvllm:num_requests_waiting NaN\nvllm:num_requests_waiting 5\n"
                      b"vllm:kv_cache_usage_perc +Inf\n") == Load(running=2, waiting=5)


@pytest.mark.parametrize(("text", "message"), [
    (b"", "no vllm:num_requests_running and no vllm:num_requests_waiting"),
    (b"vllm:num_requests_running 1\n", "no vllm:num_requests_waiting"),
    (b"vllm:num_requests_running many\n", "'many', not a number"),
    (b"<html>not metrics</html>", "is it a vLLM engine"),
])
def test_what_is_no_load_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(BadAnswer, match=message):
        parse_load(text)


def test_the_first_model_is_taken_unless_one_is_wanted() -> None:
    answer = b'{"data": [{"id": "a", "max_model_len": 10, "x": 1}, {"id": "b"}]}'
    assert choose_model(answer, "")[:3] == ("a", 10, ("b",))
    assert choose_model(answer, "b")[:3] == ("b", 0, ("a",))
    with pytest.raises(BadAnswer, match=r"serves \['a', 'b'\], not 'c'"):
        choose_model(answer, "c")


def test_adapters_that_the_server_tells_take_the_place_of_those_that_it_began_with() -> None:
    served = choose_model(b'{"data": [{"id": "a"}, {"id": "alias"}, {"id": "begun", "parent": "a"}]}', "")
    assert served.also == ("alias", "begun")
    assert served.with_adapters(None) == served
    state = AdapterState(loaded=("later",))
    told = served.with_adapters(state)
    assert (told.also, told.adapters) == (("alias", "later"), state)


def test_an_engine_has_no_more_names_than_a_beat_may_have() -> None:
    def answer(count: int) -> bytes:
        return msgspec.json.encode({"data": [{"id": f"m{number}"} for number in range(count)]})

    assert len(choose_model(answer(MAX_ALSO + 1), "m0").also) == MAX_ALSO
    with pytest.raises(BadAnswer, match=f"{MAX_ALSO + 1} names besides 'm0', more than {MAX_ALSO}"):
        choose_model(answer(MAX_ALSO + 2), "m0")


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"data": 1}', b'{"data": [{"name": "a"}]}',
                                    b'{"data": [{"id": "\xff"}]}'])
def test_what_is_no_list_of_models_is_refused(answer: bytes) -> None:
    with pytest.raises(BadAnswer, match="/v1/models"):
        choose_model(answer, "")


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeEngine]:
    async with FakeEngine(tmp_path) as engine:
        engine.write_record()
        yield engine


@pytest.fixture
async def probe(fake: FakeEngine) -> AsyncIterator[Probe]:
    probe = make_probe(fake)
    yield probe
    await probe.close()


def make_probe(fake: FakeEngine, **fields: object) -> Probe:
    agent = config_of(fake.run_dir, fake.address, **fields).agent
    assert agent is not None
    return Probe(agent, fake.run_dir)


async def test_a_healthy_engine(fake: FakeEngine, probe: Probe) -> None:
    fake.running, fake.receives_open, fake.usage = 2, 3, 0.5
    look = await probe.probe(scrape=True)
    assert (look.health, look.problem, look.records) == ("up", "", (record_of(),))
    assert look.load == Load(running=2, kv_usage=0.5, transfers=3)
    assert (look.model, look.max_model_len) == ("tiny", 2048)
    assert (await probe.probe(scrape=False)).load is None


async def test_what_the_engine_has_found_of_its_peers_is_read_with_each_look(fake: FakeEngine, probe: Probe,
                                                                            caplog: pytest.LogCaptureFixture) -> None:
    """What is of another start is not; what cannot be read is as it was read last, and is said once."""
    ours, nothing = Incarnation("a" * 32), PairNotes(Incarnation("a" * 32))
    assert (await probe.probe(scrape=True)).pairs == nothing
    found = PairNotes(ours, (RefusedPeer(InstanceName("p0"), Incarnation("1"), "another model"),), ("over tcp",))
    pair_notes.write(fake.run_dir, 0, found)
    assert (await probe.probe(scrape=True)).pairs == found
    pair_notes.path_of(fake.run_dir, 0).write_bytes(b"{")
    for _ in range(2):
        look = await probe.probe(scrape=False)
        assert (look.health, look.problem, look.pairs) == ("up", "", found)
    assert [record.getMessage() for record in caplog.records].count(
        f"what the engine has found of its peers cannot be read: {pair_notes.path_of(fake.run_dir, 0)}: "
        "Input data was truncated") == 1
    pair_notes.write(fake.run_dir, 0, PairNotes(Incarnation("b" * 32), found.refused, found.links))
    assert (await probe.probe(scrape=True)).pairs == nothing


async def test_nobody_listens(fake: FakeEngine, probe: Probe) -> None:
    await fake.stop()
    look = await probe.probe(scrape=True)
    assert look.health == "down"
    assert "Cannot connect" in look.problem or "refused" in look.problem


async def test_an_error_status_is_down(fake: FakeEngine, probe: Probe) -> None:
    fake.health = 503
    assert (await probe.probe(scrape=True)).problem == "GET /health: status 503"


async def test_a_server_that_is_slow_with_its_metrics_alone_has_answered(
        fake: FakeEngine, probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "SCRAPE_TIMEOUT_S", 0.0001)
    look = await probe.probe(scrape=True)
    assert (look.health, look.answered) == ("slow", True)
    monkeypatch.setattr(engine_module, "HEALTH_TIMEOUT_S", 0.05)
    fake.health_delay_s = 1.0
    look = await probe.probe(scrape=True)
    assert (look.health, look.answered) == ("slow", False)


async def test_a_late_answer_is_slow(fake: FakeEngine, probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "HEALTH_TIMEOUT_S", 0.05)
    fake.health_delay_s = 0.5
    look = await probe.probe(scrape=True)
    assert (look.health, look.problem) == ("slow", "GET /health took longer than 0.05 s")


async def test_no_record_yet(fake: FakeEngine, probe: Probe) -> None:
    record.path_of(fake.run_dir, 0).unlink()
    look = await probe.probe(scrape=True)
    assert (look.health, look.records, look.problem) == ("up", (), "")


async def test_a_spoilt_record_names_the_file(fake: FakeEngine, probe: Probe) -> None:
    record.path_of(fake.run_dir, 0).write_text('{"v": 1}')
    look = await probe.probe(scrape=True)
    assert look.records == ()
    assert "engine-0.json" in look.problem


async def test_a_record_of_another_version_is_refused(fake: FakeEngine, probe: Probe) -> None:
    record.write(fake.run_dir, msgspec.structs.replace(record_of(), v=9))
    assert (await probe.probe(scrape=True)).problem == "engine record of version 9, this agent reads 1"


async def test_ranks_that_have_not_come_are_named(fake: FakeEngine) -> None:
    probe = make_probe(fake, data_parallel=3)
    assert "DP ranks [1, 2]" in (await probe.probe(scrape=True)).problem
    await probe.close()


async def test_a_record_that_changes_during_the_look_is_a_problem(fake: FakeEngine, probe: Probe) -> None:
    fake.health_told.clear()
    look = asyncio.ensure_future(probe.probe(scrape=True))
    await asyncio.wait_for(fake.health_asked.wait(), 10)
    fake.write_record("b" * 32)
    fake.health_told.set()
    assert (await look).problem == "the engine record changed during the look"


async def test_a_model_that_is_not_served_is_a_problem(fake: FakeEngine) -> None:
    probe = make_probe(fake, model="other")
    assert "not 'other'" in (await probe.probe(scrape=True)).problem
    await probe.close()


async def test_the_model_is_asked_for_once_per_incarnation(fake: FakeEngine, probe: Probe) -> None:
    assert (await probe.probe(scrape=False)).model == "tiny"
    fake.model = "renamed"
    assert (await probe.probe(scrape=False)).model == "tiny"
    fake.write_record("b" * 32)
    assert (await probe.probe(scrape=False)).model == "renamed"


async def test_an_engine_with_an_api_key_needs_the_name_configured(fake: FakeEngine) -> None:
    fake.models_status = 401
    nameless, named = make_probe(fake), make_probe(fake, model="tiny")
    assert "set `$.agent.model`" in (await nameless.probe(scrape=True)).problem
    look = await named.probe(scrape=True)
    assert (look.problem, look.model, look.max_model_len) == ("", "tiny", 2048)
    await nameless.close()
    await named.close()


async def test_metrics_of_something_else_are_a_problem(fake: FakeEngine, probe: Probe) -> None:
    fake.metrics_text = "up 1\n"
    look = await probe.probe(scrape=True)
    assert (look.health, look.load) == ("up", None)
    assert "is it a vLLM engine" in look.problem


async def test_an_endless_answer_is_cut(fake: FakeEngine, probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "ANSWER_LIMIT", 1000)
    fake.metrics_text = "#" * 2000
    assert "longer than 1000 bytes" in (await probe.probe(scrape=True)).problem


async def test_a_look_that_the_agent_has_no_file_for_says_nothing_of_the_engine(fake: FakeEngine, tmp_path: Path) -> None:
    probe = Probe(config_of(tmp_path, fake.address).agent, tmp_path)  # type: ignore[arg-type]
    try:
        with no_files():
            first = await probe.probe(scrape=True)
        assert (await probe.probe(scrape=True)).health == "up"
        with no_files():  # its connection is open, the engine record is not
            second = await probe.probe(scrape=True)
        assert (await probe.probe(scrape=True)).health == "up"
    finally:
        await probe.close()
    for look in (first, second):
        assert (look.health, look.records, look.load) == ("unmade", (), None)
        assert look.problem == resources.WORDS[errno.EMFILE]


async def test_servers_of_all_members_are_looked_at_and_the_worst_of_them_counts(fake: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    probe = make_probe(fake, group=GroupConfig(0, 2, "x"), data_parallel=4)
    record.write(fake.run_dir, record_of(dp_rank=1))
    try:
        look = await probe.probe(scrape=True)
        assert (look.health, look.records) == ("up", ())
        assert look.problem == "no engine record of DP ranks [2, 3] from the other members yet"
        async with FakeEngine(tmp_path / "other") as other:
            far = MemberRanks(HostPort(other.address), record_of(dp_rank=2), tuple(record_of(dp_rank=rank).control
                                                                                   for rank in (2, 3)))
            fake.running, other.running, fake.usage, other.usage, other.receives_open = 2, 3, 0.25, 0.75, 1
            look = await probe.probe(scrape=True, others=(far,))
            assert (look.health, look.problem) == ("up", "")
            assert look.records == tuple(record_of(dp_rank=rank) for rank in range(4))
            assert look.doors == ("10.0.0.7:8000", "10.0.0.7:8000", other.address, other.address)
            assert look.load == Load(running=5, kv_usage=0.5, transfers=1)
            other.health = 503
            look = await probe.probe(scrape=True, others=(far,))
            assert (look.health, look.problem) == ("down", f"GET /health of {other.address}: status 503")
            other.health, other.metrics_text = 200, "none"
            look = await probe.probe(scrape=True, others=(far,))
            assert (look.load, "is it a vLLM engine" in look.problem) == (None, True), "half a load is none"
        look = await probe.probe(scrape=False, others=(far,))
        assert look.health == "down"
        assert look.problem.startswith(f"GET /health of {other.address}: ")
    finally:
        await probe.close()
