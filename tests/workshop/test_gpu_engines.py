"""``make check-gpu-engines``: its figures, what travels to the machine, what it does with a part that fails, its end."""

from __future__ import annotations

import re
import signal
import struct
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lab.gpu import machine
from lab.gpu_engines import __main__ as command
from lab.gpu_engines import archives, clients, cubins, figures, pack, parts, site
from lab.gpu_engines.figures import Seen, Thread
from lab.gpu_engines.models import MODELS, arguments
from lab.gpu_engines.processes import Processes
from lab.gpu_engines.report import OutOfTimeError, Report

METRICS = """# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 7.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="m",source="local_compute"} 5.0
vllm:e2e_request_latency_seconds_bucket{le="0.3"} 4.0
xpyd_kv_link_bytes_total{link="shm"} 1.5e+09
xpyd_kv_link_bytes_created{link="shm"} 1.7e+09
python_gc_objects_collected_total{generation="0"} 9.0
"""


def test_a_ratio_is_of_medians_and_the_base_has_none() -> None:
    rounds = {"plain": [Seen((0.1, 0.2)), Seen((0.2, 0.4)), Seen((0.9, 1.0))], "xpyd": [Seen((0.5,)), Seen((0.3, 0.31))]}
    found = figures.compared(rounds, "plain")
    assert found["plain"] == {"ttft_ms": {"median": 200.0, "least": 100.0, "most": 900.0, "n": 3},
                              "second_ms": {"median": 100.0, "least": 100.0, "most": 200.0, "n": 3}}
    assert (found["xpyd"]["ttft_ratio"], found["xpyd"]["ttft_more_ms"]) == (2.0, 200.0)
    assert found["xpyd"]["second_ms"]["n"] == 1, "a stream of one token has no second"


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [figures.percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 51.0, 100.0, 100.0]


def test_a_routed_answer_counts_as_unlike_where_it_is_none_of_the_plain_engines_two() -> None:
    assert figures.unlike(["a", "b", "c"], ["a", "x", "c"], ["a", "x", "y"]) == {
        "answers": 3, "plain_unlike_itself": 1, "routed_unlike_plain": 1}


def test_metrics_are_summed_over_what_does_not_matter_and_what_is_held_is_found() -> None:
    found = figures.samples(METRICS)
    assert found == {"vllm:num_requests_waiting": 2.0, 'vllm:prompt_tokens_by_source_total{source="local_compute"}': 12.0,
                     'xpyd_kv_link_bytes_total{link="shm"}': 1.5e9}
    assert figures.held(found) == {"vllm:num_requests_waiting": 2.0}


def test_threads_are_shares_of_a_core_the_busiest_first() -> None:
    before = {1: Thread("main", 100, 0, 5), 2: Thread("idle", 3, 0, 0)}
    after = {1: Thread("main", 200, 50, 9), 2: Thread("idle", 4, 0, 0), 3: Thread("new", 300, 0, 1)}
    assert figures.shares(before, after, 2.0) == [
        {"thread": "new", "user": 1.5, "system": 0.0, "faults": 1},
        {"thread": "main", "user": 0.5, "system": 0.25, "faults": 4}]


def test_stacks_are_folded_by_thread_and_last_function() -> None:
    text = "\n".join(("process 7;thread (1): MainThread;run (a.py:1);step (b.py:2) 30",
                      "process 7;thread (1): MainThread;run (a.py:1);step (b.py:9) 10",
                      "process 7;thread (2): receiver;take (c.py:3) 5", "nonsense"))
    assert figures.folded(text) == {"thread (1): MainThread": {"samples": 40, "in": {"step (b.py)": 40}},
                                    "thread (2): receiver": {"samples": 5, "in": {"take (c.py)": 5}}}


def library(*codes: tuple[int, int, bytes]) -> bytes:
    """A library with a fatbin of these entries (kind, chip, code), between other bytes."""
    entries = b"".join(struct.pack("<HHIQ", kind, 0, 64, len(code)) + bytes(12) + struct.pack("<I", chip) + bytes(32) + code
                       for kind, chip, code in codes)
    header = cubins.MAGIC + struct.pack("<HHQ", 1, 16, len(entries))
    return b"before" + cubins.MAGIC + b"no fatbin" + header + entries + b"after"


def test_code_of_other_chips_becomes_zeros_and_nothing_moves() -> None:
    whole = library((2, 90, b"hopper!!"), (2, 100, b"blackwell"), (1, 90, b"ptx text"), (2, 80, b"ampere"))
    found = cubins.strip(whole, (80, 90))
    assert len(found) == len(whole)
    assert found == whole.replace(b"blackwell", bytes(9)).replace(b"ptx text", bytes(8))
    with pytest.raises(ValueError, match="no code for 75"):
        cubins.strip(whole, (75,))


@pytest.mark.parametrize(("path", "does"), [
    ("torch/nn/linear.py", False), ("torch-2.11.0.dist-info/METADATA", False), ("fastapi/app.py", True),
    ("nvidia/cublas/lib/libcublas.so", False), ("tokenizers/tokenizers.abi3.so", False), ("vllm/triton_utils/a.py", False),
    ("compressed_tensors/triton_helper.py", True), ("xxhash/_xxhash.cpython-312-x86_64-linux-gnu.so", True),
    ("openai/__pycache__/a.cpython-312.pyc", False), ("kopf/_core.pyi", False), ("mistral_common/data/tekken.json", False),
    ("bin/py-spy", False), ("xpyd_sidecar/errors.py", False), ("zmq/tests/test_a.py", False), ("nvtx/__init__.py", True),
])
def test_what_the_machine_has_stays_by_the_names_of_packages_alone(path: str, does: bool) -> None:
    assert site.travels(path) is does


@pytest.mark.parametrize(("path", "does"), [
    ("vllm/triton_utils/importing.py", True), ("vllm/platforms/cuda.py", True),
    ("vllm/_moe_C_stable_libtorch.abi3.so", False),
    ("vllm/cumem_allocator.abi3.so", True), ("vllm-0.32.0.dist-info/entry_points.txt", True), ("vllm/vllm-rs", False),
    ("vllm-0.32.0.dist-info/RECORD", False), ("vllm/third_party/deep_gemm/include/cute/a.hpp", False),
    ("vllm/third_party/deep_gemm/__init__.py", False), ("vllm/_C_stable_libtorch.abi3.so", False),
    ("vllm/model_executor/layers/fused_moe/configs/E=8.json", False),
])
def test_vllms_wheel_travels_as_python_and_small_libraries(path: str, does: bool) -> None:
    assert site.travels_of_vllm(path) is does


def test_an_archive_has_the_wanted_files_and_is_there_only_when_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "in/a").mkdir(parents=True)
    (tmp_path / "in/a/run").write_text("x")
    (tmp_path / "in/a/run").chmod(0o755)
    (tmp_path / "in/left.out").write_text("y")
    archive = archives.Archive(tmp_path / "out/one.tar.xz", 1)
    archive.tree(tmp_path / "in", "top", lambda name: not name.endswith(".out"))
    assert not archive.path.exists()
    assert archive.close() == archive.path.stat().st_size
    with tarfile.open(archive.path) as packed:
        assert [(entry.name, entry.mode) for entry in packed] == [("top/a/run", 0o755)]


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that would install something; each leaves a package in its folder."""
    commands: list[list[str]] = []

    def run(*words: str | Path) -> None:
        commands.append([str(word) for word in words])
        folder = Path(words[words.index("--target") + 1])
        for name in ("one/__init__.py", "one/__pycache__/__init__.cpython-312.pyc"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("")

    monkeypatch.setattr(pack, "run", run)
    return commands


def names(archive: Path) -> set[str]:
    with tarfile.open(archive) as opened:
        return set(opened.getnames())


def test_what_the_checks_import_travels_for_the_cuda_and_the_python_of_the_machine(installs: list[list[str]],
                                                                                  tmp_path: Path) -> None:
    assert pack.main(["checks", str(tmp_path), "--cuda", "12", "--python", "3.11"]) == 0
    [words] = installs
    assert [Path(words[at + 1]) for at, word in enumerate(words) if word == "-r"] == [
        pack.ROOT / f"requirements/{name}.txt" for name in ("gpu", "gpu-cu12")]
    assert words[words.index("--python-version") + 1] == "3.11"
    assert "--require-hashes" in words
    assert names(tmp_path / "checks.tar.xz") == {"checks/one/__init__.py"}


def test_the_product_travels_with_both_drivers_and_what_they_import_of_the_checkout(installs: list[list[str]],
                                                                                  tmp_path: Path) -> None:
    assert pack.main(["product", str(tmp_path)]) == 0
    found = names(tmp_path / "xpyd.tar.xz")
    assert {"product/one/__init__.py", "product/commit.txt", "product/lab/__init__.py", "product/lab/gpu/__main__.py",
            "product/lab/gpu_engines/__main__.py", "product/tests/support/copies.py"} <= found
    assert not [name for name in found if "__pycache__" in name]


@pytest.mark.parametrize("arguments", ["nothing .gpu", "checks .gpu --cuda 11", "site"])
def test_what_cannot_be_packed_is_refused(arguments: str) -> None:
    with pytest.raises(SystemExit) as error:
        pack.main(arguments.split())
    assert error.value.code == 2


def test_lists_of_what_travels_for_the_checks_hold_what_the_connector_imports() -> None:
    pinned = {name: (pack.ROOT / f"requirements/{name}.txt").read_text() for name in ("gpu", "gpu-cu12", "gpu-cu13", "cpu")}
    for name in set(machine.NEEDED) - {"torch", "numpy"}:
        version = re.search(rf"^{name}==\S+", pinned["gpu"], flags=re.MULTILINE)
        assert version is not None, name
        assert version[0] in pinned["cpu"], "the versions that the tests run with"
    assert re.search(r"^nccl4py==0\.6\.0 ", pinned["gpu"], flags=re.MULTILINE)
    assert "nccl4py==0.6.0" in (pack.ROOT / "sidecar/pyproject.toml").read_text()
    assert {cuda for cuda in pack.CUDAS if f"\ncuda-bindings=={cuda}." in pinned[f"gpu-cu{cuda}"]} == set(pack.CUDAS)


def test_parts_and_models_are_named_on_the_command_line() -> None:
    found = command.steps(["equal:demo,llama", "times"])
    assert found == [("equal", ("demo", "llama")), ("times", ("big",))]
    assert command.wanted([*found, ("leave", ("llama", "big"))]) == ["demo", "llama", "big"]
    assert [part for part, _ in command.steps([])] == list(parts.PARTS)
    for wrong, said in (("equals", "no such part"), ("equal:qwen", "no such model: qwen; there are: llama")):
        with pytest.raises(ValueError, match=said):
            command.steps([wrong])


@pytest.mark.parametrize("arguments", ["--write --cpu", "--write times", "nothing", "equal:qwen", "equal:demo --nixl"])
def test_what_makes_no_sense_is_refused_before_anything_starts(arguments: str) -> None:
    with pytest.raises(SystemExit) as error:
        command.main(arguments.split())
    assert error.value.code == 2


def test_every_part_has_models_and_a_line_that_says_what_it_shows() -> None:
    assert parts.USUAL.keys() == parts.PARTS.keys()
    page = (command.ROOT / "docs/development/gpu.md").read_text()
    for name in parts.PARTS:
        assert f"\n    {name} " in (parts.__doc__ or ""), name
        assert f"| `{name}` |" in page, name
    assert {model for models in parts.USUAL.values() for model in models} == MODELS.keys()


def test_engines_on_a_gpu_share_it_by_stated_memory_and_a_cpu_gets_no_flag_of_a_gpu() -> None:
    assert "--kv-cache-memory-bytes" in arguments(MODELS["big"], cpu=False)
    assert not {"--kv-cache-memory-bytes", "--attention-backend"} & set(arguments(MODELS["demo"], cpu=True))


@pytest.mark.parametrize(("found", "is_right"), [
    ({"equal": {"demo": {"failed": 0, "routed_unlike_plain": 0, "plain_unlike_itself": 0}}}, True),
    ({"equal": {"demo": {"failed": 0, "routed_unlike_plain": 3, "plain_unlike_itself": 0}}}, False),
    ({"equal": {"llama": {"failed": 0, "routed_unlike_plain": 26, "plain_unlike_itself": 33}}}, True),
    ({"equal": {"llama": {"failed": 1, "routed_unlike_plain": 0, "plain_unlike_itself": 9}}}, False),
    ({"leave": {"demo": {"held": {"decode": {"xpyd_kv_receives_open": 1.0}}, "after": {"failed": 0}}}}, False),
    ({"kill": {"big": {"held": {}, "failed": ["failed: 500"]}}}, False),
])
def test_a_run_is_right_where_nothing_is_lost_wrong_or_held(found: dict[str, Any], is_right: bool) -> None:
    assert command.right(found) is is_right


def test_all_that_was_started_ends_whatever_it_started(tmp_path: Path) -> None:
    run = Processes({"PATH": "/usr/bin:/bin"})
    grandchild = "import subprocess, time; subprocess.Popen(['sleep', '300'], start_new_session=True); time.sleep(300)"
    process = run.start([sys.executable, "-c", grandchild], tmp_path / "log")
    other = subprocess.Popen(["sleep", "300"])
    try:
        deadline = time.monotonic() + 20
        while run.end() < 1 or process.poll() is None:
            assert time.monotonic() < deadline
        assert other.poll() is None, "a process that the run did not start"
        assert run.end() == 0
    finally:
        other.kill()
        other.wait()


def test_a_part_that_fails_is_named_and_the_time_that_is_over_is_no_fault_of_a_part(tmp_path: Path) -> None:
    given = SimpleNamespace(out=tmp_path / "out", seconds=60.0, cpu=True)
    driver = command.Driver(given, [])  # type: ignore[arg-type]  # of argparse, whose fields it reads

    def fails() -> None:
        raise clients.Failed("500 no")

    def late() -> None:
        raise OutOfTimeError

    driver._guarded("equal demo", fails)
    assert driver.failed == ["equal demo"]
    assert driver.report.found["failed"] == {"equal demo": "Failed: 500 no"}
    with pytest.raises(OutOfTimeError):
        driver._guarded("times big", late)
    before = signal.signal(signal.SIGALRM, driver.over)
    try:
        driver._guarded("where big", lambda: time.sleep(30), 0.2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert driver.failed == ["equal demo", "where big"]
    assert "equal demo FAILED" in (tmp_path / "out/said.txt").read_text()


def test_after_some_failures_the_rest_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fails(url: str, request: dict[str, Any]) -> dict[str, Any]:
        asked.append(url)
        raise clients.Failed("500")

    monkeypatch.setattr(clients, "ask", fails)
    found = clients.texts("http://x", 50, 2, 900)
    assert len(found) == 50
    assert all(text.startswith("failed: ") for text in found)
    assert clients.MOST_FAILED < len(asked) <= clients.MOST_FAILED + 2


def test_what_is_found_is_in_the_file_at_once(tmp_path: Path) -> None:
    report = Report(tmp_path, 10.0)
    report.note("times", **{"256": 1})
    report.note("times", **{"1024": 2})
    assert '"1024": 2' in (tmp_path / "result.json").read_text()
    assert report.found == {"times": {"256": 1, "1024": 2}}
    assert 0 < report.left() <= 10.0
