from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from xpyd_operator.api.status import Condition, ServiceStatus
from xpyd_operator.cli.table import duration, headline, load, notes, render
from xpyd_operator.local.view import InstanceView, Snapshot
from xpyd_sidecar.contract.membership import Drafts, Load


def view(name: str, **more: object) -> InstanceView:
    given: dict[str, object] = {
        "name": name, "role": "decode", "state": "ready", "ready": True, "load": Load(running=2, kv_usage=0.123),
        "address": "127.0.0.1:20001", "uptime_s": 130.0, "restarts": 1, "pid": 7, "problem": "", "log": "/l",
    } | more
    return InstanceView(**given)  # type: ignore[arg-type]


READY = Snapshot(
    service="qwen",
    model="Qwen/Qwen3-8B",
    url="http://127.0.0.1:10001",
    supervisor=5,
    stopping=False,
    status=ServiceStatus(
        wanted="1P3D", ready="1P2D", conditions=(Condition(type="Ready", status="True", reason="AllReady"),)
    ),
    instances=(view("qwen-e0"),),
    router=view("router", role="router"),
    requests_total=10,
    requests_failed=1,
)


def shown(snapshot: Snapshot) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(render(snapshot))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_headline_says_wanted_and_ready_and_where() -> None:
    assert headline(READY) == (
        "qwen: 1P3D wanted, 1P2D ready · http://127.0.0.1:10001 · model Qwen/Qwen3-8B · 10 requests, 1 failed"
    )


def test_rows_have_state_load_address_uptime_and_restarts() -> None:
    text = shown(READY)
    row = next(line for line in text.splitlines() if line.startswith("qwen-e0"))
    assert row.split() == [
        "qwen-e0", "decode", "ready", "2", "running,", "KV", "12", "%", "127.0.0.1:20001", "2m10s", "1",
    ]
    assert "Not ready" not in text


def test_an_engine_that_speculates_says_how_many_drafts_it_accepted() -> None:
    def drafted(drafts: Drafts) -> str:
        return load(view("e", load=Load(running=2, kv_usage=0.5, drafts=drafts)))

    assert drafted(Drafts(200, 75, 400)) == "2 running, 38 % of drafts accepted, KV 50 %"
    assert drafted(Drafts()) == "2 running, KV 50 %"


def test_progress_problems_and_joined_engines_are_noted() -> None:
    instances = (
        view("e1", state="starting", progress="loading the model", problem="x"),
        view("e2", state="crashed", problem="exit code 3"),
        view("e3", joined=True),
    )
    text = shown(msgspec.structs.replace(READY, instances=instances))
    assert "loading the model" in text
    assert "exit code 3" in text
    assert "joined by hand" in text


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"stopping": True}, "The service is being stopped."),
        ({"supervisor": 0}, "No supervisor runs"),
        ({"supervisor": 0, "instances": (), "router": None}, "`xpyd up` starts it"),
    ],
)
def test_notes_say_what_a_person_should_know(change: dict[str, object], note: str) -> None:
    assert any(note in line for line in notes(msgspec.structs.replace(READY, **change)))


def test_plan_and_conditions_are_said_when_something_is_wrong() -> None:
    status = ServiceStatus(
        plan="create e3",
        conditions=(
            Condition(type="Ready", status="False", reason="Crashed", message="0 of 1 ready"),
            Condition(type="Degraded", status="True", reason="CrashLoop", message="e2 crashed 5 times"),
        ),
    )
    said = notes(msgspec.structs.replace(READY, status=status))
    assert said == ["Plan: create e3", "Degraded: e2 crashed 5 times", "Not ready: 0 of 1 ready"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.5, "0s"), (59, "59s"), (190, "3m10s"), (18120, "5h02m"), (273600, "3d4h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_load_in_words() -> None:
    assert load(view("e", load=Load(1, 2, 0.5, 3))) == "1 running, 2 waiting, 3 transfers, KV 50 %"
    assert load(view("router", role="router")) == "-"
