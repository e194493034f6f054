"""What ``make test`` says of its tiers: tests, costs (of orphans too), starts of servers, and the worst exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import load

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
report = load(SCRIPTS / "tier_report.py")
times = load(SCRIPTS.parent / "lab/tools/compare_times.py")

ORPHAN = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:      # nobody of this file waits for it
        while time.process_time() < 0.7:
            pass
        os._exit(0)
    os._exit(0)
os.wait()
"""
SERVER = """
import pathlib, socket, time
here = pathlib.Path(__file__).parent
while time.process_time() < 0.3:
    pass
looks = (here / "looks").stat().st_size
while (here / "looks").stat().st_size < looks + 2:  # what it has used is seen
    time.sleep(0.05)
with socket.create_server(("127.0.0.1", 0)):
    while not (here / "heard").exists():
        time.sleep(0.05)
"""
WATCH = """
import pathlib, sys
import tier_watch as watch
here, look, listens = pathlib.Path(sys.argv[1]).parent, watch.look, watch.listens

def looked():
    with (here / "looks").open("a") as file:
        file.write(".")
    return look()

def heard(pid):
    found = listens(pid)
    if found:
        (here / "heard").touch()
    return found

watch.look, watch.listens, watch.LEFT_S = looked, heard, float(sys.argv[2])
sys.exit(watch.main(sys.argv[1], *sys.argv[3:4], sys.argv[4:]))
"""
STAYS = """
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
"""


def watched(tmp_path: Path, code: str, *words: str, left_s: float = 10.0) -> tuple[int, dict[str, Any], str]:
    """Exit code, figures and log of a Python program under the watch."""
    (tmp_path / "program.py").write_text(code)
    figures, log = tmp_path / "figures.json", tmp_path / "log"
    (tmp_path / "looks").touch()
    command = [sys.executable, tmp_path / "program.py", *words]
    done = subprocess.run([sys.executable, "-c", WATCH, figures, str(left_s), log, *command],
                          env={**os.environ, "PYTHONPATH": str(SCRIPTS)}, check=False, timeout=60)
    return done.returncode, json.loads(figures.read_text()), log.read_text()


def test_the_processor_time_of_an_orphan_counts(tmp_path: Path) -> None:
    code, figures, _ = watched(tmp_path, ORPHAN, left_s=50.0)  # a busy machine gives it little
    assert code == 0
    assert 0.7 <= figures["processor_s"] < 5
    assert (figures["engines"], figures["left"]) == ([], [])


def test_a_server_is_timed_until_it_listens(tmp_path: Path) -> None:
    code, figures, _ = watched(tmp_path, SERVER, "vllm.entrypoints.launchers.api_server.entry")
    [engine] = figures["engines"]
    assert (code, engine["ready"]) == (0, True)
    assert 0.25 <= engine["processor_s"] <= engine["wall_s"] + 0.1
    assert engine["wall_s"] < figures["wall_s"] + 0.5


def test_what_is_left_is_named_and_killed(tmp_path: Path) -> None:
    code, figures, _ = watched(tmp_path, STAYS, left_s=0.2)
    assert code == 0
    [left] = figures["left"]
    assert "program.py" in left
    assert figures["wall_s"] < 50


@pytest.mark.parametrize(("program", "code"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_exit_code_is_the_commands(tmp_path: Path, program: str, code: int) -> None:
    assert watched(tmp_path, f"print('said', flush=True)\n{program}")[::2] == (code, "said\n")


@pytest.mark.parametrize(("output", "found"), [
    ("...\n6155 passed, 45 skipped in 228.01s (0:03:48)\n", {"passed": 6155, "skipped": 45}),
    ("==== 1 failed, 2 passed, 1 error in 3.20s ====\n", {"failed": 1, "passed": 2, "errors": 1}),
    ("1 passed in 1.00s\nlater\n2 passed, 3 xfailed in 2.00s\n", {"passed": 2, "xfailed": 3}),
    ("All checks passed!\n", {}),
])
def test_tests_are_counted_by_the_last_closing_line(output: str, found: dict[str, int]) -> None:
    assert report.counted(output) == found


def test_a_whole_report(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    junit.write_text('<testsuites><testsuite><testcase classname="tests.a" name="slow" time="9.5"/>'
                     '<testcase classname="tests.a" name="quick" time="0.1"/></testsuite></testsuites>')
    engine = {"wall_s": 5.0, "processor_s": 2.5}
    figures = {"wall_s": 12.0, "processor_s": 8.0, "engines": [engine, engine], "left": ["sleep 600"]}
    ended = [report.times_of("test-a", 1, figures, "1 failed, 1 passed in 9.60s\n", junit),
             report.times_of("lint", 0, {}, "", tmp_path / "none.xml")]
    lines = report.table(ended, 12.5)
    assert lines[1].split() == ["test-a", "FAILED", "2", "12", "8", "2", "10", "5"]
    assert lines[2] == "    left behind and killed: sleep 600"
    assert lines[3].split() == ["lint", "ok", "0", "0", "0", "0", "0", "0"]
    assert lines[4].split() == ["all", "FAILED", "2", "12", "8", "2", "10", "5"]
    assert [line.split()[1:] for line in lines[7:9]] == [["test-a", "tests/a.py::slow"], ["test-a", "tests/a.py::quick"]]
    assert report.closing(ended, 12.5) == "1 passed, 1 failed in 12.50s"
    assert report.worst(ended) == 1
    assert report.closing([], 0.0) == "no tests ran in 0.00s"


def test_tests_that_failed_are_named_with_their_reasons_at_the_end(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    failure = '<testcase classname="tests.a" name="{}" time="1"><{} message="assert 1&#10;  is 2">lines</{}></testcase>'
    junit.write_text('<testsuites><testsuite><testcase classname="tests.a" name="good" time="1"/>'
                     '<testcase classname="tests.a" name="away" time="1"><skipped message="no root"/></testcase>'
                     + failure.format("one", "failure", "failure") + failure.format("two", "error", "error")
                     + "".join(failure.format(f"more-{n}", "failure", "failure") for n in range(report.FAILED_MAX))
                     + "</testsuite></testsuites>")
    lines = report.table([report.times_of("test-a", 1, {}, "", junit)], 1.0)
    at = lines.index("the tests that failed, as pytest names them")
    assert lines[at + 1:at + 3] == ["FAILED tests/a.py::one - assert 1 is 2", "FAILED tests/a.py::two - assert 1 is 2"]
    assert (len(lines[at + 1:]), lines[-2]) == (report.FAILED_MAX + 2, "and 2 more")
    assert not [line for line in lines[at:] if "good" in line or "away" in line]


def of_run(commit: str, processors: int = 2, **seconds: float) -> dict[str, Any]:
    return {"commit": commit, "processors": processors, "wall_s": 100.0, "tiers": [
        {"tier": tier.replace("_", "-"), "code": 0, "wall_s": s, "processor_s": s, "engines": 1, "starts_processor_s": 1.0}
        for tier, s in seconds.items()]}


def test_two_commits_are_compared_by_medians_without_builds_and_tiers_of_one_side() -> None:
    before = [of_run("a", lint=10.0, test_unit=90.0, build_light=500.0), of_run("a", lint=20.0, test_unit=110.0)]
    now = [of_run("b", lint=15.0, test_unit=50.0, test_sanitize=70.0)]
    found = times.compared(before, now)
    assert found["processor_s"] == {"all": {"before": 115.0, "now": 65.0, "ratio": 0.565},
                                    "lint": {"before": 15.0, "now": 15.0, "ratio": 1.0},
                                    "test-unit": {"before": 100.0, "now": 50.0, "ratio": 0.5}}
    assert found["left_out"] == ["test-sanitize"]


def test_what_a_tier_cost_that_failed_does_not_count() -> None:
    failed = of_run("b", lint=15.0, test_unit=1.0)
    failed["tiers"][1]["code"] = 2
    found = times.compared([of_run("a", lint=10.0, test_unit=100.0)], [of_run("b", lint=15.0, test_unit=50.0), failed])
    assert found["processor_s"]["test-unit"] == {"before": 100.0, "now": 50.0, "ratio": 0.5}


@pytest.mark.parametrize("now", [[], [of_run("b"), of_run("c")], [of_run("b", processors=4)]])
def test_runs_that_cannot_be_compared_are_refused(now: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match=r"one commit|processors"):
        times.compared([of_run("a")], now)
