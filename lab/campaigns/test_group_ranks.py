"""``campaign-groups``, with real engines: data-parallel ranks with shared experts, over two process sets of `xpyd up`.

Decode and prefill in turn are such a group of two ranks; answers are those of one engine, decode computes no prompt, and a
member that is killed ends the group, which comes back by itself. Half an hour on two processors.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from engines import complete, metric
from group_service import GroupService, counted, groups, stream
from service import wait

PROMPTS = [[3 + number, 40, 50 + number, 7] * (3 + 9 * number) for number in range(6)]
OTHERS = [[90 + number, 41, 60 + number, 8] * (3 + 9 * number) for number in range(6)]
TOKENS = 12
BACK_S = 300.0
LOCAL = {"name": "vllm:prompt_tokens_by_source_total", "source": "local_compute"}


def core_of(one: GroupService, name: str, index: int) -> int:
    """Process of the engine core of a member's rank, as the member's log names it last."""
    return int(re.findall(rf"EngineCore_DP{index} pid=(\d+)", one.log(name, index))[-1])


def test_decode_of_two_members_answers_as_one_engine_and_comes_back_after_a_death(tmp_path: Path) -> None:
    with groups(tmp_path, "decode", {"data": 2}) as one:
        (group,), (prefill,) = one.fleet("decode"), one.fleet("prefill")
        assert len(group.http) == len(set(group.http)) == len(set(group.control)) == 2
        plain = f"http://{prefill.http[0]}"
        before = counted(group, **LOCAL)
        found = [complete(one.url, prompt, TOKENS)["token_ids"] for prompt in PROMPTS]
        computed = [after - early for after, early in zip(counted(group, **LOCAL), before, strict=True)]
        assert sum(computed) <= len(PROMPTS), "no more than the last token of each"
        assert counted(group, "xpyd_kv_loaded_tokens_total") == [
            sum(len(prompt) - 1 for prompt in PROMPTS[first::2]) for first in (0, 1)]
        assert found == [complete(plain, prompt, TOKENS)["token_ids"] for prompt in PROMPTS]
        logs = "".join(one.log(group.instance, index) for index in (0, 1))
        assert logs.count("runs in step by rpc over several hosts") == 2
        for index, process, how in ((1, GroupService.server, signal.SIGKILL), (0, GroupService.server, signal.SIGKILL),
                                    (1, core_of, signal.SIGSTOP)):
            before_death = {name: pid for name, pid in one.processes().items() if "/core" not in name}
            (lived,), began = one.fleet("decode"), time.monotonic()
            os.kill(process(one, group.instance, index), how)
            wait(lambda: not one.ready(), 30, "seen as not ready")
            seen = time.monotonic()
            wait(lambda: one.ready() == "1P1D", BACK_S, "back by itself")
            after_s = time.monotonic() - seen
            print(f"{how.name} of member {index}: seen after {seen - began:.0f} s, back {after_s:.0f} s later", flush=True)
            assert {name: pid for name, pid in one.processes().items() if "/core" not in name} == before_death
            (again,) = one.fleet("decode")
            assert again.incarnation != lived.incarnation
            assert [complete(one.url, prompt, TOKENS)["token_ids"] for prompt in PROMPTS] == found


def test_two_ranks_behind_the_server_of_each_member_get_their_own_requests(tmp_path: Path) -> None:
    with groups(tmp_path, "decode", {"data": 4}) as one:
        (group,), (prefill,) = one.fleet("decode"), one.fleet("prefill")
        assert [group.http.count(door) for door in group.http] == [2, 2, 2, 2]
        prompts = [*PROMPTS, *OTHERS[:2]]
        found = [complete(one.url, prompt, TOKENS)["token_ids"] for prompt in prompts]
        loaded = [metric(f"http://{door}", "xpyd_kv_loaded_tokens_total", engine=str(rank))
                  for rank, door in enumerate(group.http)]
        assert loaded == [sum(len(prompt) - 1 for prompt in prompts[rank::4]) for rank in range(4)]
        assert sum(counted(group, **LOCAL)) <= len(prompts)
        assert found == [complete(f"http://{prefill.http[0]}", prompt, TOKENS)["token_ids"] for prompt in prompts]


def test_prefill_of_two_members_computes_all_of_the_prompts_and_decode_none(tmp_path: Path) -> None:
    with groups(tmp_path, "prefill", {"data": 2}) as one:
        (group,), (decode,) = one.fleet("prefill"), one.fleet("decode")
        plain = f"http://{decode.http[0]}"
        found = [complete(one.url, prompt, TOKENS)["token_ids"] for prompt in PROMPTS]
        assert metric(plain, **LOCAL) <= len(PROMPTS)
        assert counted(group, "xpyd_kv_pushed_tokens_total") == [
            sum(len(prompt) - 1 for prompt in PROMPTS[first::2]) for first in (0, 1)]
        assert found == [complete(plain, prompt, TOKENS)["token_ids"] for prompt in PROMPTS]
        os.kill(one.server(group.instance, 1), signal.SIGKILL)
        assert len(complete(one.url, OTHERS[0], TOKENS)["token_ids"]) == TOKENS, "whoever decodes can do without"
        wait(lambda: not one.ready(), 30, "seen as not ready")
        wait(lambda: one.ready() == "1P1D", BACK_S, "back by itself")
        assert [complete(one.url, prompt, TOKENS)["token_ids"] for prompt in OTHERS] == [
            complete(plain, prompt, TOKENS)["token_ids"] for prompt in OTHERS]


@pytest.mark.parametrize("index", [0, 1])
def test_streams_of_a_group_whose_member_dies_go_on_at_another_group(tmp_path: Path, index: int) -> None:
    with groups(tmp_path, "decode", {"data": 2}, replicas=2) as one:
        (prefill,) = one.fleet("prefill")
        expected = [complete(f"http://{prefill.http[0]}", prompt, 800)["token_ids"] for prompt in PROMPTS]
        found: list[list[int]] = [[] for _ in PROMPTS]
        clients = [threading.Thread(target=stream, args=(one.url, prompt, 800, into))
                   for prompt, into in zip(PROMPTS, found, strict=True)]
        for client in clients:
            client.start()
        wait(lambda: all(into for into in found), 60, "all begun")
        victim = max(one.fleet("decode"), key=lambda each: each.in_flight)
        assert victim.in_flight
        os.kill(one.server(victim.instance, index), signal.SIGKILL)
        for client in clients:
            client.join(300)
        assert found == expected
        wait(lambda: one.ready() == "1P2D", BACK_S, "back by itself")
