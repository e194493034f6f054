"""``make campaign-groups``, with real engines: data-parallel ranks with shared experts, over two process sets of `xpyd up`.

Decode and prefill in turn are such a group of two ranks; answers are those of one engine, decode computes no prompt, and a
member that is killed ends the group, which comes back by itself. Half an hour on two processors.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from dp_engines import PLUGIN
from engines import BASE_ARGS, BASE_ENV, MODEL_NAME, complete, metric
from make_model import ensure_moe
from service import Service, wait

from xpyd_operator.local import procs
from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.fleet import Fleet, FleetInstance

PROMPTS = [[3 + number, 40, 50 + number, 7] * (3 + 9 * number) for number in range(6)]
OTHERS = [[90 + number, 41, 60 + number, 8] * (3 + 9 * number) for number in range(6)]
TOKENS = 12
BACK_S = 300.0
LOCAL = {"name": "vllm:prompt_tokens_by_source_total", "source": "local_compute"}


@contextmanager
def service(folder: Path, role: str, replicas: int = 1, data: int = 2) -> Iterator[Service]:
    """One service whose ``role`` is a group of two members with so many ranks in all, the other one a single engine."""
    with Service(folder, plugins=(PLUGIN,)) as one:
        env = {**BASE_ENV, "GLOO_SOCKET_IFNAME": "lo"}
        one.spec = {
            "model": {"source": str(ensure_moe()), "servedName": MODEL_NAME},
            "engine": {"args": [*BASE_ARGS, "--num-gpu-blocks-override", "64"], "startupTimeout": "20m",
                       "env": [{"name": name, "value": value} for name, value in env.items()]},
            "prefill": {"replicas": 1}, "decode": {"replicas": 1},
        }
        one.spec[role] = {"replicas": replicas, "parallelism": {"data": data, "pods": 2}}
        one.up(one.spec["prefill"]["replicas"], one.spec["decode"]["replicas"])
        yield one


def fleet(one: Service, role: str) -> list[FleetInstance]:
    """Instances of a role, as the router knows them."""
    token = keys.admin_token(keys.read(one.home / "t" / "key"))
    asked = urllib.request.Request(f"{one.url}/fleet", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        found = msgspec.json.decode(answer.read(), type=Fleet)
    return [each for each in found.instances if each.role == role]


def counted(instance: FleetInstance, name: str, **labels: str) -> list[float]:
    """A series of each server of an instance."""
    return [metric(f"http://{door}", name, **labels) for door in dict.fromkeys(instance.http)]


def engine_of(one: Service, name: str, index: int) -> int:
    """Process of a member's engine."""
    launcher = one.processes()[f"{name}/engine-{index}" if index else f"{name}/engine"]
    (found,) = [each.pid for each in procs.everyone() if each.parent == launcher]
    return found


def core_of(one: Service, name: str, index: int) -> int:
    """Process of the engine core of a member's rank, as the member's log names it last."""
    log = one.home / "t" / "instances" / name / (f"engine-{index}.log" if index else "engine.log")
    return int(re.findall(rf"EngineCore_DP{index} pid=(\d+)", log.read_text("utf-8", errors="replace"))[-1])


def stream(url: str, prompt: list[int], tokens: int, into: list[int]) -> None:
    """Token ids of a stream, as they come."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "stream": True}
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event: dict[str, Any] = json.loads(line[6:])
                assert "error" not in event, event
                into += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]


def test_decode_of_two_members_answers_as_one_engine_and_comes_back_after_a_death(tmp_path: Path) -> None:
    with service(tmp_path, "decode") as one:
        (group,), (prefill,) = fleet(one, "decode"), fleet(one, "prefill")
        assert len(group.http) == len(set(group.http)) == len(set(group.control)) == 2
        plain = f"http://{prefill.http[0]}"
        before = counted(group, **LOCAL)
        found = [complete(one.url, prompt, TOKENS)["token_ids"] for prompt in PROMPTS]
        computed = [after - early for after, early in zip(counted(group, **LOCAL), before, strict=True)]
        assert sum(computed) <= len(PROMPTS), "no more than the last token of each"
        assert counted(group, "xpyd_kv_loaded_tokens_total") == [
            sum(len(prompt) - 1 for prompt in PROMPTS[first::2]) for first in (0, 1)]
        assert found == [complete(plain, prompt, TOKENS)["token_ids"] for prompt in PROMPTS]
        logs = "".join(path.read_text() for path in one.home.glob(f"t/instances/{group.instance}/engine*.log"))
        assert logs.count("runs in step by rpc over several hosts") == 2
        for index, process, how in ((1, engine_of, signal.SIGKILL), (0, engine_of, signal.SIGKILL),
                                    (1, core_of, signal.SIGSTOP)):
            before_death = {name: pid for name, pid in one.processes().items() if "/core" not in name}
            (lived,), began = fleet(one, "decode"), time.monotonic()
            os.kill(process(one, group.instance, index), how)
            wait(lambda: not one.ready(), 30, "seen as not ready")
            seen = time.monotonic()
            wait(lambda: one.ready() == "1P1D", BACK_S, "back by itself")
            after_s = time.monotonic() - seen
            print(f"{how.name} of member {index}: seen after {seen - began:.0f} s, back {after_s:.0f} s later", flush=True)
            assert {name: pid for name, pid in one.processes().items() if "/core" not in name} == before_death
            (again,) = fleet(one, "decode")
            assert again.incarnation != lived.incarnation
            assert [complete(one.url, prompt, TOKENS)["token_ids"] for prompt in PROMPTS] == found


def test_two_ranks_behind_the_server_of_each_member_get_their_own_requests(tmp_path: Path) -> None:
    with service(tmp_path, "decode", data=4) as one:
        (group,), (prefill,) = fleet(one, "decode"), fleet(one, "prefill")
        assert [group.http.count(door) for door in group.http] == [2, 2, 2, 2]
        prompts = [*PROMPTS, *OTHERS[:2]]
        found = [complete(one.url, prompt, TOKENS)["token_ids"] for prompt in prompts]
        loaded = [metric(f"http://{door}", "xpyd_kv_loaded_tokens_total", engine=str(rank))
                  for rank, door in enumerate(group.http)]
        assert loaded == [sum(len(prompt) - 1 for prompt in prompts[rank::4]) for rank in range(4)]
        assert sum(counted(group, **LOCAL)) <= len(prompts)
        assert found == [complete(f"http://{prefill.http[0]}", prompt, TOKENS)["token_ids"] for prompt in prompts]


def test_prefill_of_two_members_computes_all_of_the_prompts_and_decode_none(tmp_path: Path) -> None:
    with service(tmp_path, "prefill") as one:
        (group,), (decode,) = fleet(one, "prefill"), fleet(one, "decode")
        plain = f"http://{decode.http[0]}"
        found = [complete(one.url, prompt, TOKENS)["token_ids"] for prompt in PROMPTS]
        assert metric(plain, **LOCAL) <= len(PROMPTS)
        assert counted(group, "xpyd_kv_pushed_tokens_total") == [
            sum(len(prompt) - 1 for prompt in PROMPTS[first::2]) for first in (0, 1)]
        assert found == [complete(plain, prompt, TOKENS)["token_ids"] for prompt in PROMPTS]
        os.kill(engine_of(one, group.instance, 1), signal.SIGKILL)
        assert len(complete(one.url, OTHERS[0], TOKENS)["token_ids"]) == TOKENS, "whoever decodes can do without"
        wait(lambda: not one.ready(), 30, "seen as not ready")
        wait(lambda: one.ready() == "1P1D", BACK_S, "back by itself")
        assert [complete(one.url, prompt, TOKENS)["token_ids"] for prompt in OTHERS] == [
            complete(plain, prompt, TOKENS)["token_ids"] for prompt in OTHERS]


@pytest.mark.parametrize("index", [0, 1])
def test_streams_of_a_group_whose_member_dies_go_on_at_another_group(tmp_path: Path, index: int) -> None:
    with service(tmp_path, "decode", replicas=2) as one:
        (prefill,) = fleet(one, "prefill")
        expected = [complete(f"http://{prefill.http[0]}", prompt, 800)["token_ids"] for prompt in PROMPTS]
        found: list[list[int]] = [[] for _ in PROMPTS]
        clients = [threading.Thread(target=stream, args=(one.url, prompt, 800, into))
                   for prompt, into in zip(PROMPTS, found, strict=True)]
        for client in clients:
            client.start()
        wait(lambda: all(into for into in found), 60, "all begun")
        victim = max(fleet(one, "decode"), key=lambda each: each.in_flight)
        assert victim.in_flight
        os.kill(engine_of(one, victim.instance, index), signal.SIGKILL)
        for client in clients:
            client.join(300)
        assert found == expected
        wait(lambda: one.ready() == "1P2D", BACK_S, "back by itself")
