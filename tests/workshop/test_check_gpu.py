"""``make check-gpu`` on a CPU: checks hold and can fail, a broken one takes nothing with it, wheels need no registry."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import load

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "lab/gpu"))
import gpu_cache
import gpu_copies
import gpu_costs
import gpu_graphs
import gpu_host
import gpu_link_checks
import gpu_runner
import gpu_wheels
from gpu_runner import Check, Outcome, Row
from gpu_seen import LeftOutError, NotHeldError

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "lab/gpu"
command = load(GPU / "__main__.py")
CPU = torch.device("cpu")
ABSENT = ("vllm", "aiohttp", "httptools", "uvloop", "prometheus_client", "yaml", "xpyd_operator")
FAKE = """
import json, os, signal, subprocess, sys, time
order = json.loads(sys.argv[sys.argv.index("--order") + 1])
says = lambda **said: open(order["result"], "w").write(json.dumps(said))
print("what it prints")
if order["run"] == "well": says(figures={"gb_s": order["arguments"][0]})
if order["run"] == "bad": says(figures={"grown": 7}, why="too much")
if order["run"] == "nothing": raise RuntimeError("CUDA error: an illegal memory access")
if order["run"] == "crash": os.kill(os.getpid(), signal.SIGSEGV)
if order["run"] == "here": says(left_out="not here")
if order["run"] == "hang":
    child = subprocess.Popen(["sleep", "300"])
    print(child.pid, file=open(order["arguments"][0], "w"), flush=True)
    time.sleep(300)
"""


@pytest.fixture(scope="module")
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_copies_out_and_in_hold(one_thread: None) -> None:
    out, into = gpu_copies.copies_out(CPU, 2), gpu_copies.copies_in(CPU, 3)
    assert (out["copies"], out["wrong"]) == (2 * (1 + 3) * gpu_cache.LAYERS, 0)
    assert (into["copies"], into["wrong"]) == (3 + gpu_copies.WARM + 1, 0)
    assert gpu_copies.marks(CPU) == {"late_ms": 0.0}
    assert gpu_costs.strided(CPU) == {"shapes": 4, "wrong": 0}
    assert {"out_1_host_us", "out_16_gb_s", "in_frames_launches"} < gpu_costs.costs(CPU).keys()


def test_a_wrong_copy_is_seen(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gpu_copies.Cache

    class Stale(whole):
        def fill(self, salt: int) -> None:
            super().fill(salt - (salt == 1))

    monkeypatch.setattr(gpu_copies, "Cache", Stale)
    with pytest.raises(NotHeldError, match="12 copies have other bytes") as error:
        gpu_copies.copies_out(CPU, 1)
    assert error.value.figures["wrong"] == 12


def test_a_payload_in_the_wrong_block_is_seen(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    scatter = gpu_cache.KvCache.scatter
    monkeypatch.setattr(gpu_cache.KvCache, "scatter", lambda self, moves: scatter(
        self, [move._replace(ids=(move.ids + 1) % gpu_cache.BLOCKS) for move in moves]))
    with pytest.raises(NotHeldError, match="the cache has other bytes"):
        gpu_copies.copies_in(CPU, 1)


def test_a_mark_that_is_done_too_early_is_seen() -> None:
    cuda, cpu = torch.device("cuda"), CPU
    assert gpu_copies._never_late(cuda, {"rounds": 12, "late": 11}) == "1 marks were done while the stream was busy"
    assert gpu_copies._never_late(cuda, {"rounds": 12, "late": 12}) is None
    assert gpu_copies._never_late(cpu, {"rounds": 12, "late": 0}) is None


def test_device_memory_that_grows_with_kept_copies_is_seen(one_thread: None) -> None:
    assert gpu_copies.kept(CPU, copies=20)["grown_bytes"] == 0
    size = gpu_cache.LAYERS * len(gpu_copies.IDS) * gpu_cache.BLOCK_BYTES
    taken = iter((0, 10 * size))
    with pytest.raises(NotHeldError, match="20 copies in host memory hold") as error:
        gpu_copies.kept(CPU, lambda: next(taken), 20)
    assert error.value.figures == {"copies": 20, "kept_bytes": 20 * size, "grown_bytes": 10 * size}


def test_a_mark_that_never_comes_ends_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never:
        def done(self) -> bool:
            return False

    monkeypatch.setattr(gpu_cache, "WAIT_S", 0.05)
    with pytest.raises(NotHeldError, match="is not done after 0 s"):
        gpu_cache.wait_done(Never())


def test_what_a_cpu_cannot_show_is_left_out() -> None:
    for check in (gpu_graphs.capture_beside, gpu_graphs.capture_whole):
        with pytest.raises(LeftOutError):
            check(CPU)


def test_another_process_sees_the_memory_of_copies_also_when_it_was_given_back_once() -> None:
    right = {"read": "right", "left": 0}
    assert gpu_host.shared_memory(CPU) == {f"{turn}_{name}": value for turn in ("first", "again")
                                           for name, value in right.items()}


def test_memory_that_another_process_sees_otherwise_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_host, "_read", lambda _: "wrong")
    with pytest.raises(NotHeldError, match="first_read: wrong; again_read: wrong"):
        gpu_host.shared_memory(CPU)


def test_the_links_check_moves_kv_between_processes_and_survives_a_death() -> None:
    found = gpu_link_checks.link(CPU, 16 << 10, (1,))
    assert found["killed"] in {"ok", "peer_lost"}
    assert found["groups"] == 0
    assert len(found["gb_s"]) == 1


def test_checks_need_nothing_of_what_the_machine_lacks() -> None:
    """Of what is installed: torch, and what travels as wheels. vLLM, and what routers and agents need, is not there."""
    text = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {ABSENT!r}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        f"sys.path[:0] = [{str(GPU)!r}, {str(ROOT / 'sidecar/src')!r}]\n"
        "import gpu_copies, gpu_graphs, gpu_group_checks, gpu_groups, gpu_host, gpu_link, gpu_link_checks\n"
        "print('all there')\n")
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "all there\n", done.stderr[-2000:]


def fake(tmp_path: Path, *checks: Check) -> tuple[list[Row], list[str]]:
    script, said = tmp_path / "fake.py", list[str]()
    script.write_text(FAKE)
    return gpu_runner.run_all(checks, "cuda", command=(sys.executable, str(script)), say=said.append), said


def test_after_a_check_that_fails_crashes_or_hangs_the_next_runs(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    rows, said = fake(tmp_path, Check("bad", "bad", 30), Check("nothing", "nothing", 30), Check("crash", "crash", 30),
                      Check("hang", "hang", 6, (str(pid),)), Check("here", "here", 30), Check("well", "well", 30, (2.5,)))
    assert {row.name: row.outcome for row in rows} == {
        "bad": Outcome.BAD, "nothing": Outcome.BAD, "crash": Outcome.BAD, "hang": Outcome.BAD, "here": Outcome.LEFT_OUT,
        "well": Outcome.OK}
    why = {row.name: row.why for row in rows}
    assert why["bad"] == "too much"
    assert "exit code 1" in why["nothing"]
    assert "an illegal memory access" in why["nothing"]
    assert "ended by SIGSEGV" in why["crash"]
    assert why["hang"].startswith("not over after 6 s")
    assert len(said) == 6
    assert said[-1].startswith("ok        well ")
    assert said[-1].endswith("gb_s 2.5")
    assert gpu_runner.failed(rows) == ["bad", "nothing", "crash", "hang"]
    end = time.monotonic() + 10
    while alive(int(pid.read_text())):
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_known_fault_is_shown_as_known_and_one_that_has_gone_too() -> None:
    check = Check("kept", "x", 1, known="copies are kept")
    shown = gpu_runner.judged(check, {"figures": {"grown": 7}, "why": "too much"}, 1.0)
    assert (shown.outcome, shown.why) == (Outcome.KNOWN, "copies are kept: too much")
    assert gpu_runner.judged(check, {"figures": {"grown": 0}}, 1.0).outcome is Outcome.MENDED
    assert gpu_runner.judged(check, {"figures": {"grown": 0}, "no_device": True}, 1.0).outcome is Outcome.OK
    assert gpu_runner.judged(check, {"why": "ended by SIGSEGV"}, 1.0).outcome is Outcome.BAD
    assert gpu_runner.failed([shown]) == []


def test_the_file_has_the_machine_and_each_check() -> None:
    rows = [Row("marks", Outcome.OK, 1.26, {"late_ms": 0.2}), Row("kept", Outcome.KNOWN, 2.0, {}, "why")]
    assert json.loads(json.dumps(gpu_runner.told(rows, {"gpu": "one"}, "2026-11-25"))) == {
        "date": "2026-11-25", "machine": {"gpu": "one"}, "checks": {
            "marks": {"outcome": "ok", "seconds": 1.3, "figures": {"late_ms": 0.2}},
            "kept": {"outcome": "known", "seconds": 2.0, "figures": {}, "why": "why"}}}


def test_checks_are_chosen_by_name_and_each_is_explained() -> None:
    assert [check.name for check in command.chosen("kept, marks")] == ["marks", "kept"]
    with pytest.raises(ValueError, match="no such check: nothing; there are: copies-out"):
        command.chosen("nothing")
    page = (ROOT / "docs/development/gpu.md").read_text()
    for check in command.CHECKS:
        name = re.sub(r"-\d+k$", "-…k", check.name)
        assert f"| `{name}` |" in page, name
        module, _, function = check.run.partition(":")
        assert f"\ndef {function}(" in (GPU / f"{module}.py").read_text()


@pytest.mark.parametrize("arguments", ["--write --device cpu", "--write --only marks", "--only nothing"])
def test_what_makes_no_sense_is_refused(arguments: str) -> None:
    with pytest.raises(SystemExit) as error:
        command.main(arguments.split())
    assert error.value.code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_command_says_so(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(GPU)], capture_output=True, text=True, timeout=100, check=False,
                          cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""})
    assert (done.returncode, done.stderr) == (1, "")
    assert re.fullmatch(r"check-gpu: there is no GPU that torch \S+ can use; nothing was checked\n", done.stdout)


def wheel(folder: Path, name: str, version: str, *, value: int = 1) -> str:
    """A wheel of one module; its hash."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", f"VALUE = {value}\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose lists name small wheels that are there."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (tmp_path / "requirements").mkdir()
    for at, (file, name) in enumerate((("gpu", "one"), ("gpu-cu12", "twelve"), ("gpu-cu13", "thirteen"))):
        digest = wheel(wheels, name, "1.0", value=at)
        (tmp_path / f"requirements/{file}.txt").write_text(f"{name}==1.0 --hash=sha256:{digest}\n")
    monkeypatch.setattr(gpu_wheels, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(("cuda", "modules"), [("13.0", {"one", "thirteen"}), ("12.8", {"one", "twelve"}), ("", {"one"})])
def test_wheels_are_installed_for_the_cuda_of_torch_without_a_registry(root: Path, cuda: str, modules: set[str]) -> None:
    target = root / "target"
    assert gpu_wheels.install(root / "wheels", target, cuda=cuda) == ""
    assert {path.stem for path in target.glob("*.py")} == modules


def test_what_is_wrong_with_wheels_is_said(root: Path) -> None:
    target = root / "target"
    assert "there are no wheels (python -m lab extras" in gpu_wheels.install(root / "nothing", target, cuda="13.0")
    assert gpu_wheels.install(root / "wheels", target, cuda="11.8") == "CUDA 11.8: there is no requirements/gpu-cu11.txt"
    wheel(root / "wheels", "one", "1.0", value=99)
    assert "HASHES" in gpu_wheels.install(root / "wheels", target, cuda="").upper()
    (root / "wheels/one-1.0-py3-none-any.whl").unlink()
    assert "No matching distribution found for one==1.0" in gpu_wheels.install(root / "wheels", target, cuda="")


def test_lists_of_wheels_hold_what_the_connector_imports() -> None:
    pinned = {name: (ROOT / f"requirements/{name}.txt").read_text() for name in ("gpu", "gpu-cu12", "gpu-cu13", "cpu")}
    for name in ("msgspec", "pyzmq", "xxhash"):
        version = re.search(rf"^{name}==\S+", pinned["gpu"], flags=re.MULTILINE)
        assert version is not None
        assert version[0] in pinned["cpu"], "the versions that the tests run with"
    assert re.search(r"^nccl4py==0\.6\.0 ", pinned["gpu"], flags=re.MULTILINE)
    assert "nccl4py==0.6.0" in (ROOT / "sidecar/pyproject.toml").read_text()
    assert "\ncuda-bindings==12." in pinned["gpu-cu12"]
    assert "\ncuda-bindings==13." in pinned["gpu-cu13"]
