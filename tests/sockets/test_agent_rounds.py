"""Members of a group find each other, begin together and end together: real sockets, files and launchers, no engines."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import msgspec
import pytest
from agent_fakes import record_of
from files import no_files
from group_on_host import NAME, OVER_S, GroupOnHost, MemberOnHost, wait_for

from xpyd_sidecar.agent import group as rules
from xpyd_sidecar.agent import rounds as rounds_module
from xpyd_sidecar.agent.beat import ProbeResult
from xpyd_sidecar.contract import record
from xpyd_sidecar.contract.group import MOST_WORDS, ROUND, WIRE_VERSION, MemberAnswer, MemberHello, MemberRanks
from xpyd_sidecar.contract.ids import HostPort


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "LOOK_S", 0.03)
    monkeypatch.setattr(rounds_module, "HELLO_S", 0.1)


def test_members_begin_one_life_together_and_after_a_death_another_one(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with GroupOnHost(tmp_path, 2) as group:
            life = await group.wait_serves()
            assert re.fullmatch(r"[0-9a-f]{32}", life)
            (leader,), (follower,) = (member.engines() for member in group.members)
            assert leader[1:] == follower[1:] == [life, "127.0.0.1", leader[3]]
            assert group.members[1].answers[-1].epoch == 3
            os.kill(group.members[1].pid(), signal.SIGKILL)
            second = await group.wait_serves(after=life)
            assert [len(member.engines()) for member in group.members] == [2, 2]
            os.kill(group.members[0].pid(), signal.SIGKILL)
            await group.wait_serves(after=second)
            assert group.members[0].state().why == ""
            assert "the round is over: the engine of member 0 ended: killed by SIGKILL" in caplog.text
            assert group.members[0].rounds is not None
            assert f"the round is over: {group.members[0].rounds.status()['ended']}" in caplog.text
    asyncio.run(body())


def test_a_member_whose_launcher_or_worker_is_stopped_ends_the_round_and_nothing_begins_without_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(rounds_module, "SILENT_S", 2.0)

    async def body() -> None:
        async with GroupOnHost(tmp_path, 2) as group:
            life, stopped = await group.wait_serves(), group.members[1]
            assert stopped.launcher is not None
            stopped.launcher.send_signal(signal.SIGSTOP)
            await wait_for(lambda: group.members[0].runs() == "")
            assert "the round is over: member 1 was silent" in caplog.text
            assert stopped.runs() == life, "who should end it is stopped"
            await asyncio.sleep(0.5)
            assert group.members[0].runs() == "", "no engine without all"
            monkeypatch.setattr(rounds_module, "SILENT_S", rules.SILENT_S)  # the life that comes is to last
            stopped.launcher.send_signal(signal.SIGCONT)
            second = await group.wait_serves(after=life)
            for beat in range(20):
                stopped.pulse(beat)
                await asyncio.sleep(0.1)
            assert stopped.runs() == second
            monkeypatch.setattr("xpyd_sidecar.agent.pulses.STALE_S", 0.3)
            await group.wait_serves(after=second)
    asyncio.run(body())


def test_a_leaders_agent_that_is_started_again_goes_on_with_the_life(tmp_path: Path) -> None:
    async def body() -> None:
        async with GroupOnHost(tmp_path, 3) as group:
            life = await group.wait_serves()
            await group.members[0].stop_agent()
            await asyncio.sleep(0.5)
            await group.members[0].start_agent()
            assert await group.wait_serves() == life
            await group.members[2].start_agent()
            await asyncio.sleep(0.5)
            assert await group.wait_serves() == life
            assert [len(member.engines()) for member in group.members] == [1, 1, 1]
    asyncio.run(body())


def test_members_without_their_leader_end_their_engines(tmp_path: Path) -> None:
    async def body() -> None:
        async with GroupOnHost(tmp_path, 2) as group:
            await group.wait_serves()
            await group.members[0].stop_agent()
            await wait_for(lambda: group.members[1].runs() == "")
            assert group.members[1].rounds is not None
            assert "does not answer: " in group.members[1].rounds.problem
    asyncio.run(body())


def test_a_member_of_another_layout_is_refused_by_name(tmp_path: Path) -> None:
    async def body() -> None:
        async with GroupOnHost(tmp_path, 2) as group:
            await group.members[1].stop_agent()
            assert group.members[0].config.agent is not None
            leader = group.members[0].config.agent.listen
            other = MemberOnHost(tmp_path, 1, 2, leader or HostPort(""), layout="y")
            await other.start_agent()
            assert other.rounds is not None
            rounds = other.rounds
            await wait_for(lambda: "member 1 is of another layout (y) than the leader (x)" in rounds.problem)
            await other.close()
    asyncio.run(body())


def test_the_leaders_look_at_its_engine_says_what_the_group_lacks(tmp_path: Path) -> None:
    async def body() -> None:
        group = GroupOnHost(tmp_path, 2)
        await group.members[0].start_agent()
        rounds = group.members[0].rounds
        assert rounds is not None
        assert rounds.judge_probe(ProbeResult("up")) == ProbeResult("up", "waits for members 0, 1 of 2")
        assert rounds.judge_probe(ProbeResult("slow", "x")) == ProbeResult("unready", "waits for members 0, 1 of 2")
        assert rules.SILENT_S == 5.0
        await group.members[0].close()
    asyncio.run(body())


def test_followers_say_the_ranks_of_the_life_and_the_leader_forgets_those_of_one_that_is_over(tmp_path: Path) -> None:
    async def body() -> None:
        async with GroupOnHost(tmp_path, 3, data=6) as group:
            await group.wait_serves()
            leader = group.members[0].rounds
            assert leader is not None
            assert leader.follower_ranks() == ()

            def all_said() -> bool:
                """Should the machine be so busy that a life ends meanwhile, the next one has its records, too."""
                for rank in (2, 3, 4, 5):
                    if not record.path_of(folder := group.members[rank // 2].folder, rank).exists():
                        record.write(folder, record_of(dp_rank=rank))
                return len(leader.follower_ranks()) == 2

            await wait_for(all_said)
            assert [(said.first.dp_rank, said.control) for said in leader.follower_ranks()] == [
                (2, ("127.0.0.1:4002", "127.0.0.1:4003")), (4, ("127.0.0.1:4004", "127.0.0.1:4005"))]
            life = group.members[0].runs()
            await group.members[1].stop_agent()  # what it has said last is of this life
            os.kill(group.members[2].pid(), signal.SIGKILL)
            await wait_for(lambda: leader.follower_ranks() == ())
            await group.members[1].start_agent()
            await group.wait_serves(after=life)
            assert leader.follower_ranks() == (), "the launchers have removed what is of the life before"
    asyncio.run(body())


def test_ranks_that_are_not_a_members_own_are_refused(tmp_path: Path) -> None:
    async def body() -> None:
        async with GroupOnHost(tmp_path, 2, data=2) as group:
            await group.wait_serves()
            follower = group.members[1]
            assert follower.rounds is not None
            follower.rounds._ranks = lambda: MemberRanks(  # type: ignore[method-assign]
                HostPort("h:1"), record_of(dp_rank=0), (HostPort("h:2"),))
            await wait_for(lambda: "member 1 says ranks 0 to 0, it has 1 to 1" in str(follower.rounds.problem))
            assert group.members[0].rounds is not None
            assert group.members[0].rounds.follower_ranks() == ()
    asyncio.run(body())


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("how", ["lost", "torn"])
def test_a_member_whose_rounds_file_is_lost_ends_what_runs_and_the_group_begins_anew(
        tmp_path: Path, which: int, how: str) -> None:
    async def body() -> None:
        async with GroupOnHost(tmp_path, 2) as group:
            life, member = await group.wait_serves(), group.members[which]
            await member.stop_agent()
            file = member.folder / ROUND
            file.unlink()
            if how == "torn":
                file.touch()
            await member.start_agent()
            await group.wait_serves(after=life)
    asyncio.run(body())


def test_agents_without_files_say_nothing_of_engines_and_end_no_round(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with GroupOnHost(tmp_path, 2) as group:
            life, leader = await group.wait_serves(), group.members[0].rounds
            assert leader is not None
            for member in group.members:
                member.pulse(1)
            await asyncio.sleep(0.5)
            with no_files():
                for _ in range(round((OVER_S + 1.5) / 0.1)):
                    await asyncio.sleep(0.1)
                    assert group.problem == ""
            assert leader.status()["life"] == life
            assert await group.wait_serves() == life
    asyncio.run(body())
    assert "cannot be looked at, and counts as before: no file descriptors are left to this process" in caplog.text


def test_a_life_that_begins_without_a_file_to_look_for_a_port_has_one(tmp_path: Path) -> None:
    with no_files():
        assert rounds_module._free_port("127.0.0.1") in rounds_module.PORTS


def test_words_at_their_longest_are_said_so_that_followers_can_read_them(tmp_path: Path) -> None:
    async def body() -> None:
        async with GroupOnHost(tmp_path, 2) as group:
            await group.wait_serves()
            leader, hears = group.members[0].rounds, group.members[1].rounds
            assert leader is not None
            assert hears is not None
            await group.members[1].stop_agent()
            await asyncio.sleep(0.5)
            call = hears.status()["life"]
            hello = MemberHello(WIRE_VERSION, NAME, 1, "x", "z", 1, "over", call, why="w" * MOST_WORDS)
            raw = msgspec.json.encode(leader.receive(hello))
            assert "member 1 ended: www" in msgspec.json.decode(raw, type=MemberAnswer).problem
    asyncio.run(body())


def test_a_hello_that_comes_late_takes_no_drain_back(tmp_path: Path) -> None:
    async def body() -> None:
        group = GroupOnHost(tmp_path, 2)
        await group.members[0].start_agent()
        rounds = group.members[0].rounds
        assert rounds is not None
        asked = []
        for seq, drain in ((4, False), (6, True), (5, False), (7, True), (8, False)):
            rounds.receive(MemberHello(WIRE_VERSION, NAME, 1, "x", "b", seq, "free", drain=drain))
            asked.append(sorted(rounds.asking))
        assert asked == [[], [1], [1], [1], []]
        await group.members[0].close()
    asyncio.run(body())


def test_of_two_that_speak_as_one_member_the_first_is_heard_and_the_other_begins_nothing(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a pod that was deleted by force and goes on where nobody reaches it, beside the one in its place."""
    monkeypatch.setattr(rounds_module, "HELLO_S", 0.5)  # the other may speak once the first is late by some hellos

    async def body() -> None:
        (folder := tmp_path / "twin").mkdir()
        async with GroupOnHost(tmp_path, 2) as group:
            life = await group.wait_serves()
            assert group.members[0].config.agent is not None
            twin = MemberOnHost(folder, 1, 2, group.members[0].config.agent.listen or HostPort(""))
            try:
                twin.launch()
                await twin.start_agent()
                rounds = twin.rounds
                assert rounds is not None
                await wait_for(lambda: "another process has spoken as member 1" in rounds.problem)
                await asyncio.sleep(2.0)
                assert (await group.wait_serves(), twin.engines()) == (life, [])
                await group.members[1].stop_agent()
                await wait_for(lambda: group.problem == "" and twin.runs() == group.members[0].runs() != life)
            finally:
                await twin.close()
    asyncio.run(body())
