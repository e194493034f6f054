"""The xpyd command over stand-ins for vLLM, agent and router: up, change, crash, kill -9 of the supervisor, down."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_service import LocalService, wait

from xpyd_operator.cli import main
from xpyd_operator.local import remains
from xpyd_operator.local.paths import ServiceFolder


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalService]:
    one = LocalService(tmp_path, monkeypatch)
    yield one
    one.clean()


SHM = f"xpyd_test_{os.getpid()}_"
"""Begins the names of shared memory of these tests' engines, and of nobody else's."""


def states(answer: dict) -> dict[str, str]:
    return {view["name"]: view["state"] for view in answer["instances"]}


def test_a_service_from_up_to_down(service: LocalService, capsys: pytest.CaptureFixture[str]) -> None:
    """1P1D → 1P3D → 2P1D by a switch, a killed engine, a killed supervisor, a second up that takes over, nothing left."""
    service.write(env={"STAND_IN_SHM": SHM})
    assert service.up("--detach") == 0
    assert f"http://127.0.0.1:{service.port}/v1" in capsys.readouterr().out
    answer = service.wait_status(capsys, lambda seen: (
        seen["status"]["ready"] == "1P1D" and seen["router"]["ready"] and seen["requests_total"]))
    assert answer["status"]["wanted"] == "1P1D"
    assert answer["requests_total"] == 7
    compatible = next(each for each in answer["status"]["conditions"] if each["type"] == "Compatible")
    assert (compatible["status"], compatible["reason"]) == ("True", "SameFingerprint")
    assert answer["router"]["state"] == "ready"
    assert main.main(["doctor", "tiny", "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["service"], [one for one in told["findings"] if one["level"] == "broken"]) == ("tiny", [])

    first = service.pid("instances", "tiny-e0", "engine")
    service.write(1, 3)
    assert service.up() == 0
    service.wait_status(capsys, lambda seen: states(seen) == {f"tiny-e{n}": "ready" for n in range(4)})
    switched = service.pid("instances", "tiny-e3", "engine"), service.pid("instances", "tiny-e3", "agent")
    service.write(2, 1)
    assert service.up() == 0
    service.wait_status(capsys, lambda seen: seen["status"]["ready"] == "2P1D")
    left = {"tiny-e0", "tiny-e1", "tiny-e3"}  # tiny-e2 may still drain
    answer = service.wait_status(capsys, lambda seen: set(states(seen)) == left)
    assert next(view["role"] for view in answer["instances"] if view["name"] == "tiny-e3") == "prefill"
    assert switched == (service.pid("instances", "tiny-e3", "engine"), service.pid("instances", "tiny-e3", "agent"))
    assert service.pid("instances", "tiny-e0", "engine") == first, "what need not be restarted is not"

    wait((service.folder.instance("tiny-e0") / "shm").exists)  # what it would leave is written down every 5 s
    os.kill(first, signal.SIGKILL)
    wait(lambda: service.pid("instances", "tiny-e0", "engine") not in (0, first))

    def again(seen: dict) -> bool:
        view = next(view for view in seen["instances"] if view["name"] == "tiny-e0")
        return (view["state"], view["restarts"]) == ("ready", 1)

    service.wait_status(capsys, again)  # what is said may be a look older than what is done

    service.kill_supervisor()
    before = service.pid("instances", "tiny-e1", "engine")
    answer = service.wait_status(capsys, lambda seen: seen["status"]["ready"] == "2P1D")  # they go on without it
    assert answer["supervisor"] == 0
    service.write(1, 1)
    assert service.up("--detach") == 0
    assert service.pid("instances", "tiny-e1", "engine") == before, "they are adopted"

    run_dir = Path(json.loads(service.folder.settings.read_text())["run_dir"])
    assert run_dir.exists()
    assert list(Path("/dev/shm").glob(f"{SHM}*"))
    assert main.main(["down"]) == 0
    assert "tiny has ended" in capsys.readouterr().out
    assert service.pids() == []
    assert not run_dir.exists()
    assert not list(Path("/dev/shm").glob(f"{SHM}*"))
    assert main.main(["down", "tiny", "--purge"]) == 0
    assert "nothing of tiny runs" in capsys.readouterr().out
    assert not service.folder.path.exists()
    assert main.main(["down"]) == 0
    assert "nothing runs" in capsys.readouterr().out


def test_down_after_kill_9_of_supervisor_and_an_engine(service: LocalService, capsys: pytest.CaptureFixture[str]) -> None:
    service.write(env={"STAND_IN_SHM": SHM})
    assert service.up("--detach") == 0
    wait((service.folder.instance("tiny-e1") / "shm").exists)
    service.kill_supervisor()
    os.kill(service.pid("instances", "tiny-e1", "engine"), signal.SIGKILL)
    wait(lambda: len(service.pids()) == 6)  # router, two agents, an engine with its child, and the other's orphan
    assert main.main(["down"]) == 0
    assert service.pids() == []
    assert not list(Path("/dev/shm").glob(f"{SHM}*"))


def test_what_no_longer_serves_of_a_service_that_is_taken_down_is_not_shown_as_starting(
    service: LocalService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.write()
    assert service.up("--detach") == 0
    service.kill_supervisor()
    os.kill(service.pid("instances", "tiny-e1", "agent"), signal.SIGKILL)
    wait(lambda: states(service.status(capsys)) == {"tiny-e0": "ready", "tiny-e1": "starting"})
    service.folder.stop.touch()
    service.wait_status(capsys, lambda seen: states(seen) == {"tiny-e0": "ready", "tiny-e1": "stopping"})


def test_down_by_name_ends_what_runs_although_its_folder_is_gone(
    service: LocalService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.write()
    assert service.up("--detach") == 0
    run_dir = json.loads(service.folder.settings.read_text())["run_dir"]
    service.kill_supervisor()
    shutil.rmtree(service.folder.path)
    assert len(service.pids()) == 7
    assert main.main(["down", "tiny"]) == 0
    assert "its folder was gone" in capsys.readouterr().out
    assert service.pids() == []
    shutil.rmtree(run_dir)


def test_a_supervisor_whose_folder_was_removed_ends_everything(service: LocalService) -> None:
    service.write()
    assert service.up("--detach") == 0
    run_dir = Path(json.loads(service.folder.settings.read_text())["run_dir"])
    assert len(service.pids()) == 7
    subprocess.run(["rm", "-rf", service.folder.path], check=False)  # fails where a round makes a file in the meantime
    wait(lambda: not service.pids() and not run_dir.exists() and not service.folder.path.exists())


def test_down_now_does_not_wait_for_work(
    service: LocalService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = tmp_path / "busy"
    busy.touch()
    monkeypatch.setenv("STAND_IN_BUSY", str(busy))
    service.write(drain={"timeout": "10m"})
    assert service.up("--detach") == 0
    began = time.monotonic()
    assert main.main(["down", "--now"]) == 0
    assert time.monotonic() - began < 120, "of ten minutes"
    assert service.pids() == []


def test_surplus_is_removed_only_when_it_is_drained(
    service: LocalService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = tmp_path / "busy"
    monkeypatch.setenv("STAND_IN_BUSY", str(busy))
    service.write(1, 2)
    assert service.up("--detach") == 0
    busy.touch()
    service.write(1, 1)
    os.replace(service.file, service.folder.desired)  # whole: the supervisor reads it at any moment
    for _ in range(2):
        service.wait_status(capsys, lambda seen: states(seen).get("tiny-e2") == "draining")
        time.sleep(0.7)  # who is gone is not drained again
    busy.unlink()
    wait(lambda: "tiny-e2" not in states(service.status(capsys)))


def test_an_engine_that_always_crashes_fails_up_with_its_last_words(
    service: LocalService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.write(env={"STAND_IN_EXIT": "3"})
    assert service.up("--detach") == 1
    said = capsys.readouterr().err
    assert "crashes again and again (exit code 3)" in said
    assert "ValueError: told to end" in said


def test_logs_are_found_by_service_and_instance(service: LocalService, capsys: pytest.CaptureFixture[str]) -> None:
    service.write()
    assert service.up("--detach") == 0
    capsys.readouterr()
    assert main.main(["logs", "tiny-e0/engine"]) == 0
    assert "Application startup complete" in capsys.readouterr().out
    assert main.main(["logs", "tiny", "supervisor"]) == 0
    assert "create tiny-e1 as decode" in capsys.readouterr().out
    assert main.main(["logs"]) == 0
    out = capsys.readouterr().out
    assert "tiny-e0/engine | " in out
    assert "tiny-e1/engine | " in out
    assert main.main(["logs", "tiny", "tiny-e9"]) == 2
    assert "tiny has no instance tiny-e9" in capsys.readouterr().err


def read_until(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if words in line:
            return text
    raise AssertionError(f"{words!r} not in {text}")


def test_in_the_foreground_ctrl_c_drains_and_stops(service: LocalService) -> None:
    service.write()
    process = service.foreground()
    try:
        assert "tiny is ready: 1P1D" in read_until(process, f"http://127.0.0.1:{service.port}/v1")
        process.send_signal(signal.SIGINT)
        said = read_until(process, "tiny has ended")
        assert "draining and stopping; Ctrl-C again stops at once" in said
        assert process.wait(240) == 0
    finally:
        process.kill()
        process.communicate()
    assert service.pids() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_in_the_foreground_other_signals_take_it_down_too(service: LocalService, number: signal.Signals) -> None:
    service.write()
    process = service.foreground()
    try:
        read_until(process, f"http://127.0.0.1:{service.port}/v1")
        process.send_signal(number)
        assert "draining and stopping" in read_until(process, "tiny has ended")
        assert process.wait(240) == 0
    finally:
        process.kill()
        process.communicate()
    assert service.pids() == []


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM], ids=lambda number: number.name)
def test_signals_take_it_down_where_nobody_reads_any_more(service: LocalService, number: signal.Signals) -> None:
    service.write()
    master, terminal = pty.openpty()
    process = service.foreground(output=terminal)
    os.close(terminal)
    try:
        said = bytearray()
        while b"is ready" not in said:  # a terminal gives a line in parts
            said += os.read(master, 1 << 16)
        os.close(master)  # the terminal is gone, and writing to it fails
        process.send_signal(number)
        assert process.wait(240) == 0
        assert "nobody reads any more" in service.folder.log.read_text()
    finally:
        process.kill()
        process.communicate()
    assert service.pids() == []


def test_a_second_ctrl_c_stops_at_once(service: LocalService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = tmp_path / "busy"
    busy.touch()
    monkeypatch.setenv("STAND_IN_BUSY", str(busy))
    service.write(drain={"timeout": "10m"})
    process = service.foreground()
    try:
        read_until(process, "/v1")
        process.send_signal(signal.SIGINT)
        read_until(process, "draining (1 running)")
        process.send_signal(signal.SIGINT)
        read_until(process, "stopping at once")
        assert process.wait(240) == 0
    finally:
        process.kill()
        process.communicate()
    assert service.pids() == []


def test_in_the_foreground_a_crash_loop_ends_the_service_with_exit_code_1(service: LocalService) -> None:
    service.write(env={"STAND_IN_EXIT": "3"})
    process = service.foreground()
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "crashes again and again (exit code 3)" in said
    assert service.pids() == []


def test_a_document_may_change_while_another_terminal_runs_it(
    service: LocalService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.write()
    process = service.foreground()
    try:
        read_until(process, "/v1")
        service.write(1, 2)
        assert service.up() == 0
        assert "tiny is ready: 1P2D" in capsys.readouterr().out
        assert main.main(["down"]) == 0
        read_until(process, "tiny has ended")
        assert process.wait(240) == 0
    finally:
        process.kill()
        process.communicate()


def test_an_engine_joined_by_hand_serves_and_leaves(
    service: LocalService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.write()
    assert service.up("--detach") == 0
    run_dir = json.loads(service.folder.settings.read_text())["run_dir"]
    command = [sys.executable, "-m", "xpyd_operator.cli.main", "join", "--service", "tiny", "--role", "decode"]
    command += ["--router", f"127.0.0.1:{service.members}", "--key-file", str(service.folder.key), "--host", "127.0.0.1"]
    command += ["--model", str(tmp_path / "model"), "--name", "tiny-guest", "--python", service.python]
    command += ["--", "--enforce-eager"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert "--enforce-eager" not in read_until(process, "tiny-guest: ready")
        folder = ServiceFolder(".joined")
        record = json.loads((folder.instance("tiny-guest") / "instance.json").read_text())
        assert record["role"] == "decode"
        assert "--enforce-eager" in record["process"]["argv"]
        (Path(run_dir) / "beats" / "tiny-guest.json").write_text(_beat_of(folder))
        service.wait_status(capsys, lambda seen: any(
            one["name"] == "tiny-guest" and one["joined"] for one in seen["instances"]))
        os.kill(_pid(folder, "tiny-guest", "engine"), signal.SIGKILL)
        assert "engine ended: killed by SIGKILL (1 in a row)" in read_until(process, "1 in a row")
        read_until(process, "tiny-guest: ready")
        process.send_signal(signal.SIGINT)
        assert "draining" in read_until(process, "tiny-guest: ended")
        assert process.wait(240) == 0
    finally:
        process.kill()
        process.communicate()
    assert remains.pids(folder) == []
    shutil.rmtree(_run_base(folder) / "beats")
    _run_base(folder).rmdir()


def _run_base(folder: ServiceFolder) -> Path:
    """The run folder of joined engines, where the stand-ins leave theirs."""
    record = json.loads((folder.path / "previous" / "tiny-guest" / "agent.json").read_text())
    return Path(record["run_dir"]).parent


def _beat_of(folder: ServiceFolder) -> str:
    """What the stand-in router would hear from the joined agent, whose run folder is another one."""
    run_dir = json.loads((folder.instance("tiny-guest") / "agent.json").read_text())["run_dir"]
    beat = Path(run_dir).parent / "beats" / "tiny-guest.json"
    wait(beat.exists)  # another thread of the agent writes it
    return beat.read_text()


def _pid(folder: ServiceFolder, name: str, unit: str) -> int:
    return int(json.loads((folder.instance(name) / f"{unit}.pid").read_text())["pid"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--router", "nowhere"], "--router: 'nowhere' is not host:port"),
        (["--key-file", "/no/such/key"], "--key-file: "),
        (["--name", "tiny-e0"], "--name tiny-e0: names like tiny-e0 belong to `xpyd up`"),
        (["--name", "Not_A_Label"], "--name Not_A_Label: write at most 63"),
        (["--host", "192.0.2.1"], "--host 192.0.2.1: this host cannot listen there"),
        (["--model", "pvc://claim/x"], "spec.model.source"),
        (["--", "--port", "1"], "spec.engine.args[0]"),
    ],
)
def test_join_refuses_what_is_wrong(
    service: LocalService, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    given = ["join", "--service", "tiny", "--role", "decode", "--router", "127.0.0.1:30001", "--key-file", str(key)]
    given += ["--model", "a/b", "--host", "127.0.0.1"]
    if "--router" in arguments:
        given = [word for word in given if word not in ("--router", "127.0.0.1:30001")]
    assert main.main([*given, *arguments]) == 2
    assert said in capsys.readouterr().err
