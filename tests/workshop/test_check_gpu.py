"""``make check-gpu`` on a CPU: checks hold and can fail, and a broken one takes nothing with it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lab.gpu import __main__ as command
from lab.gpu import (
    busy,
    cache,
    children,
    cost_checks,
    graph_checks,
    host_checks,
    layout_checks,
    link_checks,
    link_ranks,
    machine,
    mapping_checks,
    node_checks,
    order_checks,
    page_nodes,
    runner,
    store_peers,
)
from lab.gpu.cache import BLOCK_BYTES, HEAD_BYTES, HEADS, LAYERS, RUN, Blocks
from lab.gpu.findings import LeftOutError, NotHeldError
from lab.gpu.host_copies import HostCopies, HostSums
from lab.gpu.runner import Check, Outcome, Row

from xpyd_sidecar.memory.device import PackedRows
from xpyd_sidecar.memory.marks import CopyMark
from xpyd_sidecar.memory.node_binding import NodeBinding
from xpyd_sidecar.memory.numa_nodes import BoundNode
from xpyd_sidecar.transport.shm.serve import SharedCopies

pytestmark = pytest.mark.unsanitized  # it measures time and memory, and the lab runs what is compiled as users do
ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "lab/gpu"
CPU = torch.device("cpu")
ABSENT = ("vllm", "aiohttp", "httptools", "uvloop", "prometheus_client", "yaml", "zmq", "xpyd_operator")
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


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- copies ---


def test_copies_out_and_in_hold_with_their_sums() -> None:
    rounds = 2 + order_checks.WARM
    assert order_checks.copies_out(CPU, 2) == {"copies": rounds // 2 * (1 + 3), "wrong": 0, "wrong_sums": 0, "rounds": 2,
                                               "late": 0}
    assert order_checks.copies_in(CPU, 4) == {"copies": 4 + order_checks.WARM, "wrong": 0, "wrong_sums": 0, "rounds": 4,
                                              "late": 0}
    assert order_checks.marks(CPU) == {"late_ms": 0.0}


def test_what_is_expected_is_packed_run_by_run_and_heads_first() -> None:
    blocks = Blocks((3, 5, 4), RUN - 2, 1, 2)
    whole = cache.content(2, 7, CPU).numpy().view(np.uint8).reshape(-1, HEADS, HEAD_BYTES)
    found = cache.packed(blocks, 7)[2 * blocks.layout.size:][:blocks.layout.size]
    order = (3, 1), (5, 1), (3, 2), (5, 2), (4, 1), (4, 2)
    assert found == b"".join(whole[block, head].tobytes() for block, head in order)
    assert np.array_equal(cache.unpacked(blocks, cache.packed(blocks, 7))[2], whole[[3, 5, 4], 1:3])


def test_a_wrong_copy_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cache.Cache

    class Stale(whole):  # type: ignore[misc, valid-type]
        def fill(self, salt: int) -> None:
            super().fill(salt - (salt == 1))

    monkeypatch.setattr(order_checks, "Cache", Stale)
    with pytest.raises(NotHeldError, match="3 copies have other bytes; 2 times the sums are others") as error:
        order_checks.copies_out(CPU, 1)
    assert error.value.figures["wrong"] == 3


@pytest.mark.parametrize(("check", "method"), [(order_checks.copies_out, "gather"), (order_checks.copies_in, "scatter")])
def test_wrong_sums_are_seen(monkeypatch: pytest.MonkeyPatch, check: Callable[..., Any], method: str) -> None:
    right = getattr(HostCopies, method)

    def wrong(*arguments: Any) -> tuple[CopyMark, HostSums]:
        mark, sums = right(*arguments)
        return mark, HostSums(sums.read() ^ np.uint64(1))

    monkeypatch.setattr(HostCopies, method, wrong)
    with pytest.raises(NotHeldError, match=r"^\d+ times the sums are others$"):
        check(CPU, 1)


@pytest.mark.parametrize("shift", ["another block", "one block more"])
def test_a_payload_in_the_wrong_block_is_seen(monkeypatch: pytest.MonkeyPatch, shift: str) -> None:
    scatter = HostCopies.scatter

    def moved(self: HostCopies, packed: PackedRows, at: int, after: Sequence[CopyMark]) -> tuple[CopyMark, HostSums]:
        others = [one._replace(ids=np.where(one.ids < 0, one.ids, (one.ids + 1) % cache.BLOCKS)) for one in packed.rows]
        if shift == "one block more":
            scatter(self, packed, at, after)
            others = [one._replace(ids=np.where(np.arange(len(one.ids)) == 0, 126, -1)) for one in packed.rows]
        return scatter(self, packed._replace(rows=others), at, after)

    monkeypatch.setattr(HostCopies, "scatter", moved)
    with pytest.raises(NotHeldError, match="the cache has other bytes"):
        order_checks.copies_in(CPU, 1)


def test_a_mark_that_is_done_too_early_is_seen() -> None:
    cuda = torch.device("cuda")
    assert order_checks.never_late(cuda, {"rounds": 12, "late": 11}) == "1 marks were done while the stream was busy"
    assert order_checks.never_late(cuda, {"rounds": 12, "late": 12}) is None
    assert order_checks.never_late(CPU, {"rounds": 12, "late": 0}) is None


def test_device_memory_that_grows_with_copies_in_host_memory_is_seen() -> None:
    assert order_checks.kept(CPU, copies=20)["grown_bytes"] == 0
    size = LAYERS * len(order_checks.IDS.ids) * BLOCK_BYTES
    allocated = iter((0, 10 * size))
    with pytest.raises(NotHeldError, match="20 copies in host memory hold") as error:
        order_checks.kept(CPU, lambda: next(allocated), 20)
    assert error.value.figures == {"copies": 20, "kept_bytes": 20 * size, "grown_bytes": 10 * size}


def test_a_mark_that_never_comes_ends_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never:
        def done(self) -> bool:
            return False

        def wait(self, seconds: float) -> bool:
            return False

    monkeypatch.setattr(busy, "WAIT_S", 0.05)
    with pytest.raises(NotHeldError, match="is not done after 0 s"):
        busy.wait_done(Never())


def test_every_layout_goes_out_and_comes_back_whole_and_some_heads_of_it() -> None:
    heads = sum(layout.heads > 2 for layout in layout_checks.LAYOUTS.values())
    assert layout_checks.layouts(CPU) == {"layouts": 8, "trips": 8 + heads, "wrong": 0}


def test_a_layout_whose_heads_are_mixed_up_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    scatter = HostCopies.scatter

    def mixed(self: HostCopies, packed: PackedRows, at: int, after: Sequence[CopyMark]) -> tuple[CopyMark, HostSums]:
        rows = [one._replace(layout=one.layout._replace(run=1)) for one in packed.rows]
        return scatter(self, packed._replace(rows=rows), at, after)

    monkeypatch.setattr(HostCopies, "scatter", mixed)
    found = layout_checks.there_and_back(CPU, layout_checks.LAYOUTS["tokens first"], 1, 4)
    assert found == ["other bytes have come"]
    assert layout_checks.there_and_back(CPU, layout_checks.LAYOUTS["odd"], 0, 1) == [], "a block is one piece"


def test_launches_that_grow_with_blocks_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cost_checks.costs(CPU)
    assert found["128x2"].keys() == {"mib", "gather", "bring", "scatter"}
    assert found["64"]["gather"].keys() == {"ms", "host_us", "gb_s"}
    assert found["launches"] <= cost_checks.LAUNCHES
    gather = HostCopies.gather

    def by_block(self: HostCopies, packed: PackedRows, spans: Sequence[Any]) -> tuple[CopyMark, HostSums]:
        self.launches += sum(len(one.ids) for one in packed.rows)
        return gather(self, packed, spans)

    monkeypatch.setattr(HostCopies, "gather", by_block)
    with pytest.raises(NotHeldError, match="gather of 64: 5 launches beside copies to and from the host, 4 are allowed"):
        cost_checks.costs(CPU)


def test_rows_beyond_the_memory_that_they_pass_through_are_refused() -> None:
    copies = HostCopies()
    copies.prepare(100, 100)
    with pytest.raises(AssertionError, match="101 bytes do not pass through 100"):
        copies.gather(PackedRows([], [], 101), [])


def test_what_a_cpu_cannot_show_is_left_out() -> None:
    for check in (graph_checks.capture_beside, graph_checks.capture_whole):
        with pytest.raises(LeftOutError):
            check(CPU)


def test_what_ends_a_thread_beside_a_capture_is_told() -> None:
    calls = []

    def fails() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("CUDA error: not permitted\nCUDA kernel errors might be …")

    with graph_checks.again_and_again([fails, lambda: time.sleep(0.01)]) as errors:
        deadline = time.monotonic() + 20
        while not errors:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert (len(calls), errors) == (3, ["RuntimeError: CUDA error: not permitted"])


# --- host memory ---


def test_another_process_sees_the_memory_of_copies_and_it_goes_back_when_it_is_given_up() -> None:
    found = host_checks.shared_memory(CPU)
    assert {name: found[name] for name in ("first_read", "again_read", "given_up")} == {
        "first_read": "right", "again_read": "right", "given_up": 2}


def test_what_another_process_sees_otherwise_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "read_by_peer", lambda *_: "other bytes")
    kept: list[Any] = []
    filled = host_checks._filled
    monkeypatch.setattr(host_checks, "_filled", lambda host, device: (kept.append(host), filled(host, device))[1])
    with pytest.raises(NotHeldError, match=r"first_read: other bytes; again_read: other bytes; .* bytes are left of what"):
        host_checks.shared_memory(CPU)


def test_a_peer_says_what_is_wrong_with_a_store(tmp_path: Path) -> None:
    copies = SharedCopies(1 << 20)
    assert store_peers.read_by_peer(copies, 0) == "right"
    assert store_peers.read_by_peer(copies, 1) == "other bytes"
    (tmp_path / "open").write_bytes(bytes(4096))
    with (tmp_path / "open").open("rb") as file:
        assert store_peers.writable(file.fileno(), 4096)
    assert not store_peers.writable(copies.fd, copies.size)


def test_locked_memory_that_is_rounded_up_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_checks.locked_memory(CPU)["asked_mib"] == 130
    whole = host_checks.host_memory

    def rounded(size: int, *, pinned: bool) -> Any:
        return whole(1 << (size - 1).bit_length(), pinned=pinned)

    monkeypatch.setattr(host_checks, "host_memory", rounded)
    with pytest.raises(NotHeldError, match=r"268435456 bytes, not 136314880; 136314880 bytes take \d+$"):
        host_checks.locked_memory(CPU)


def test_memory_and_threads_of_a_rank_are_told_by_node() -> None:
    found = node_checks.nodes(CPU)
    assert {0} >= set(found["store_mib"]) or found["nodes"] > 1
    assert sum(found["store_mib"].values()) >= node_checks.SIZE >> 21
    assert sum(found["ring_mib"].values()) >= node_checks.SIZE >> 20
    assert {"xpyd-receiver", "xpyd-sender"} <= set(found["threads"])


def test_memory_or_threads_elsewhere_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is said to be bound, and is not."""
    near = frozenset({max(os.sched_getaffinity(0)) + 1})
    unbound = NodeBinding(None)
    unbound.node = BoundNode(77, True, frozenset())
    monkeypatch.setattr(unbound, "memory", lambda _: None)
    monkeypatch.setattr(unbound, "thread", lambda _: None)
    monkeypatch.setattr(link_ranks, "node_binding", lambda *_: unbound)
    with pytest.raises(NotHeldError, match=r"store: of 33554432 bytes 0 are at node 77; ring: of .* are at node 77$"):
        node_checks.nodes(CPU)
    unbound.node = BoundNode(77, False, near)
    monkeypatch.setattr(unbound, "pages", contextlib.nullcontext)
    with pytest.raises(NotHeldError, match=rf"xpyd-receiver may run on .*, not only on {max(near)}; xpyd-sender may"):
        node_checks.nodes(CPU)


def test_memory_without_pages_and_a_rank_without_threads_are_seen() -> None:
    bound = BoundNode(1, True, frozenset({0}))
    assert [*node_checks.misplaced("ring", {}, 100, None)] == ["ring: of 100 bytes 0 are anywhere"]
    assert [*node_checks.misplaced("ring", {0: 2, 1: 98}, 100, bound)] == ["ring: of 100 bytes 98 are at node 1"]
    assert [*node_checks.misplaced("ring", {0: 1, 1: 99}, 100, bound)] == []
    assert [*node_checks.astray({}, bound)] == ["no thread of the rank runs"]
    assert [*node_checks.astray({"one": {0}, "other": {0, 1, 2, 5}}, bound)] == [
        "other may run on 0-2,5, not only on 0"]


def test_pages_are_counted_in_all_mappings_that_some_memory_lies_in(tmp_path: Path) -> None:
    lines = [line.split() for line in (
        "1000 default file=/bin/a mapped=2 N0=2 kernelpagesize_kB=4", "3000 prefer:1 anon=3 N0=1 N1=2 kernelpagesize_kB=4",
        "7000 prefer:1 anon=1 N1=1 kernelpagesize_kB=2048", "800000 default")]
    assert page_nodes.parse_maps(lines, 0x3800, 0x8000) == (frozenset({"prefer:1"}), {0: 4096, 1: 8192 + (2 << 20)})
    assert page_nodes.parse_maps(lines, 0x900000, 0x901000) == (frozenset({"default"}), {})
    assert page_nodes.parse_maps([], 0, 1) == (frozenset(), {})
    with pytest.raises(LeftOutError, match="no_maps: No such file"):
        page_nodes.page_nodes(memoryview(b"some"), tmp_path / "no_maps")


def test_a_mapped_store_is_read_before_and_after_it_is_registered_and_let_go_of() -> None:
    found = mapping_checks.mapped(CPU)
    assert (found["registered_mib"], found["refused"]) == (80, 0)
    assert found["closed_s"] <= mapping_checks.CLOSE_S


def test_a_mapping_that_is_refused_or_has_other_bytes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCopies, "register", lambda *_: 801)
    monkeypatch.setattr(mapping_checks, "words", lambda begin, size: store_peers.words(begin + 8, size))
    with pytest.raises(NotHeldError, match=r"other bytes have come before CUDA knows of it; .*registered; other bytes "
                                           r"have come when its owner was killed; 0 of .* are registered, .* error 801"):
        mapping_checks.mapped(CPU)


# --- links ---


@pytest.mark.parametrize("transport", ["nccl", "shm"])
def test_the_links_check_moves_kv_between_processes_and_survives_a_death(transport: Any) -> None:
    found = link_checks.link(CPU, 16 << 10, transport, 1)
    assert found["ways"] == ["tcp" if transport == "nccl" else "shm"]
    assert found["killed"] in {"ok", "peer_lost"}
    assert found["groups"] == 0
    assert len(found["gb_s"]) == 1


def test_a_child_that_ends_or_cannot_go_on_ends_its_check() -> None:
    with children.Child("store_peers") as child, pytest.raises(NotHeldError, match="has ended by itself"):
        child.hear()
    with children.Child("store_peers", "reader") as child:
        child._child.stdout = io.StringIO('{"why": "there is no NCCL"}\n')
        with pytest.raises(NotHeldError, match="there is no NCCL"):
            child.hear()


def test_a_child_is_killed_at_the_end() -> None:
    with children.Child("store_peers", "reader") as child:
        assert child.hear()["box"].startswith("@")
        assert child._child.poll() is None
    assert child._child.poll() == -9


def test_checks_need_nothing_of_what_the_machine_lacks() -> None:
    """Of what is installed: torch, and what travels. vLLM, and what routers and agents need, is not there."""
    modules = ", ".join(sorted(f"lab.gpu.{path.stem}" for path in GPU.glob("*.py") if path.stem != "__init__"))
    text = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {ABSENT!r}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'sidecar/src')!r}]\n"
        f"import {modules}\n"
        "print('all there')\n")
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "all there\n", done.stderr[-2000:]


# --- the command ---


def fake(tmp_path: Path, *checks: Check) -> tuple[list[Row], list[str]]:
    script, said = tmp_path / "fake.py", list[str]()
    script.write_text(FAKE)
    return runner.run_all(checks, "cuda", os.environ, said.append, (sys.executable, str(script))), said


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
    assert runner.failures(rows) == ["bad", "nothing", "crash", "hang"]
    end = time.monotonic() + 60
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
    shown = runner.judge(check, {"figures": {"grown": 7}, "why": "too much"}, 1.0)
    assert (shown.outcome, shown.why) == (Outcome.KNOWN, "copies are kept: too much")
    assert runner.judge(check, {"figures": {"grown": 0}}, 1.0).outcome is Outcome.MENDED
    assert runner.judge(check, {"figures": {"grown": 0}, "no_device": True}, 1.0).outcome is Outcome.OK
    assert runner.judge(check, {"why": "ended by SIGSEGV"}, 1.0).outcome is Outcome.BAD
    assert runner.failures([shown]) == []


def test_the_file_has_the_machine_and_each_check() -> None:
    rows = [Row("marks", Outcome.OK, 1.26, {"late_ms": 0.2}), Row("kept", Outcome.KNOWN, 2.0, {}, "why")]
    assert json.loads(json.dumps(runner.record(rows, {"gpu": "one"}))) == {
        "machine": {"gpu": "one"}, "checks": {
            "marks": {"outcome": "ok", "seconds": 1.3, "figures": {"late_ms": 0.2}},
            "kept": {"outcome": "known", "seconds": 2.0, "figures": {}, "why": "why"}}}


def test_checks_are_chosen_by_name_and_each_is_explained() -> None:
    assert [check.name for check in command.select("kept, marks")] == ["marks", "kept"]
    with pytest.raises(ValueError, match="no such check: nothing; there are: copies-out"):
        command.select("nothing")
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


def test_some_checks_of_a_cpu_are_recorded_in_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[str, ...], str, Path | None]] = []
    monkeypatch.setattr(command, "check_all", lambda checks, device, write: asked.append(
        (tuple(check.name for check in checks), device, write)))
    command.main(["--only", "marks,costs", "--device", "cpu", "--write", str(tmp_path / "found.json")])
    command.main([])
    assert asked == [(("marks", "costs"), "cpu", tmp_path / "found.json"),
                     (tuple(check.name for check in command.CHECKS), "cuda", None)]


def test_rows_and_the_machine_are_in_the_file_and_a_fault_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                            capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = {"machine": Outcome.OK, "marks": Outcome.OK, "costs": Outcome.BAD}

    def run(check: Check, device: str, environ: Any, *_: Any) -> Row:
        return Row(check.name, outcomes[check.name], 1.0, {"on": device})

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(runner, "run", run)
    file = tmp_path / "results/found.json"
    assert command.check_all(command.select("marks"), "cuda", file) == 0
    assert json.loads(file.read_text())["machine"] == {"on": "cuda"}
    assert command.check_all(command.select("marks costs"), "cuda", file) == 1
    assert list(json.loads(file.read_text())["checks"]) == ["marks", "costs"]
    assert "1 of 2 checks did not hold: costs" in capsys.readouterr().out
    file.unlink()
    outcomes["machine"] = Outcome.BAD
    assert command.check_all(command.select("marks"), "cuda", file) == 1
    assert not file.exists(), "nothing was checked"


def test_a_checks_process_leaves_figures_faults_and_what_cannot_be_shown(tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    def obeyed(check: Callable[..., Any]) -> Any:
        monkeypatch.setattr(order_checks, "marks", check)
        order = {"run": "order_checks:marks", "device": "cpu", "arguments": [7], "result": str(tmp_path / "result")}
        assert command.main(["--order", json.dumps(order)]) == 0
        return json.loads((tmp_path / "result").read_text())

    def fault(*_: Any) -> None:
        raise NotHeldError("late", {"late_ms": 60})

    def absent(*_: Any) -> None:
        raise LeftOutError("no GPU")

    assert obeyed(lambda device, more: {"on": str(device), "more": more}) == {
        "no_device": True, "figures": {"on": "cpu", "more": 7}}
    assert obeyed(fault) == {"no_device": True, "figures": {"late_ms": 60}, "why": "late"}
    assert obeyed(absent) == {"no_device": True, "left_out": "no GPU"}


def test_checks_find_the_connector_and_the_stand_in_of_a_cpu_before_what_the_machine_has() -> None:
    found = {device: command.environment(device, {"PYTHONPATH": "/there", "A": "b"}) for device in ("cuda", "cpu")}
    sources = [str(ROOT), str(ROOT / "sidecar/src")]
    assert found["cuda"] == {"PYTHONPATH": os.pathsep.join([*sources, "/there"]), "A": "b"}
    assert found["cpu"]["PYTHONPATH"].split(os.pathsep) == [*sources, str(ROOT / "tests/support"), "/there"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_command_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "lab.gpu"], capture_output=True, text=True, timeout=100, check=False,
                          cwd=ROOT, env=os.environ | {"PYTHONPATH": ""})
    assert (done.returncode, done.stderr) == (1, "")
    assert re.fullmatch(r"check-gpu: there is no GPU that torch \S+ can use; nothing was checked\n", done.stdout)


def test_the_machine_is_told_also_where_nothing_can_be_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = machine.machine("cpu")
    assert (facts["gpus"], facts["python"], facts["commit"]) == (0, platform.python_version(), "of the checkout")
    assert {"torch", "numpy"} <= facts["versions"].keys()
    assert "no-such-package" not in facts["versions"]
    monkeypatch.setattr(machine, "NEEDED", ("json", "no_such_module"))
    with pytest.raises(NotHeldError, match=r"here has no no_such_module .*gpu_engines.pack checks") as error:
        machine.machine("cpu")
    assert error.value.figures["kernel"] == platform.release()
    (tmp_path / "commit.txt").write_text("abc, 2 files changed\n")
    assert machine.system(tmp_path)["commit"] == "abc, 2 files changed"
