"""``python -m lab campaigns``: what is next, what the figures say, and a little run with a command of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lab.campaigns import campaign_plan as plan
from lab.campaigns import campaign_rows
from lab.campaigns.campaign_rows import ROWS, Goal, Row
from lab.campaigns.campaign_runs import Runner, code_of

ROOT = Path(__file__).resolve().parents[2]
GOALS = (Goal("wrong", "=", 0), Goal("share", ">=", 0.99))
LAB = """\
FRESH=; if [ "$1" = --fresh ]; then FRESH=1; shift; fi
case "$1" in
good) echo '{"wrong": 0, "share": 1.0}' > good.json; echo "good FRESH=$FRESH MINUTES=$MINUTES" >> order;;
bad) echo bad >> order; echo what went wrong; exit 3;;
short) echo '{"wrong": 0, "share": 0.5}' > short.json; echo short >> order;;
slow) echo "slow FRESH=$FRESH" >> order; test -e through || { sleep 300 & echo $! > slow.pid; wait; };;
*) echo "$1" >> order;;
esac
"""


def rows(*names: str) -> tuple[Row, ...]:
    return tuple(Row(name, 1, 1, f"{name}.json" if name in {"good", "short", "silent"} else "",
                     GOALS if name in {"good", "short", "silent"} else (), root=name == "away") for name in names)


def test_goals_name_figures_that_the_recorded_files_have() -> None:
    for row in ROWS:
        if row.result and (ROOT / row.result).exists():
            found = plan.judge(row.goals, json.loads((ROOT / row.result).read_text()))
            assert [each for each in found if each.found == plan.MISSING] == [], row.name


def test_rows_are_unlike_and_have_deadlines_beyond_their_time() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.deadline > row.minutes and (row.result or not row.goals) for row in ROWS)
    assert set(campaign_rows.GOALS) <= {row.name for row in ROWS}


def test_what_has_ended_does_not_run_again_and_what_was_begun_comes_first() -> None:
    some = rows("good", "bad", "slow", "away")
    state: plan.State = {"good": {"code": "c", "done": True}, "slow": {"code": "c", "done": False}}
    assert [row.name for row in plan.to_run(some, state, root=False)] == ["slow", "bad"]
    assert [row.name for row in plan.to_run(some, state, root=True)] == ["slow", "bad", "away"]
    assert [row.name for row in plan.to_run(some, plan.forget(state, some[:1]), root=False)] == ["slow", "good", "bad"]


def test_on_other_code_nothing_counts() -> None:
    assert plan.of_code({"good": {"code": "a", "done": True}, "bad": {"code": "b"}}, "b") == {"bad": {"code": "b"}}


def test_campaigns_are_chosen_by_name_or_target() -> None:
    assert plan.chosen(ROWS, "") == ROWS
    assert [row.name for row in plan.chosen(ROWS, "queue, campaign-buddy")] == ["buddy", "queue"]
    with pytest.raises(ValueError, match="no such campaign: nothing; there are: buddy"):
        plan.chosen(ROWS, "queue nothing")


@pytest.mark.parametrize(("goal", "value", "found", "met"), [
    (Goal("a", "=", 0), {"a": 0}, "0", True),
    (Goal("a", "=", 0), {"a": 12_345}, "12,345", False),
    (Goal("a", "=", 0), {}, "not there", False),
    (Goal("a", "=", 0), {"a": None}, "None", False),
    (Goal("a/b", "<=", 5), {"a": {"b": 5.0}}, "5.0", True),
    (Goal("*/b", "<=", 5), {"x": {"b": 1}, "y": {"b": 7}, "z": {"b": 9}, "c": 3}, "9 (2 of 3 miss it)", False),
    (Goal("*/b", "<=", 5), {"x": {"b": 1}, "y": {"b": 4}}, "4 (the worst of 2)", True),
    (Goal("*/b", ">=", 5), [{"b": 6}, {"b": 8}], "6 (the worst of 2)", True),
    (Goal("*/b", ">=", 5), [{"b": 6}, {"b": 2}, {"b": 3}], "2 (2 of 3 miss it)", False),
    (Goal("model: */v", "=", "ok"), {"model: a, b": {"v": "ok"}, "model: c": {"v": "ok"}}, "ok (all 2)", True),
    (Goal("model: */v", "=", "ok"), {"model: a": {"v": "ok"}, "model: c": {"v": "hang"}}, "hang (1 of 2 miss it)", False),
    (Goal("a", "<=", 5), {"a": "text"}, "text", False),
    (Goal("*/b", "shown"), {"x": {"b": 1}, "y": {"b": 4}}, "1, 4", True),
    (Goal("b", "shown"), {}, "not there", False),
])
def test_a_figure_meets_its_goal_or_not(goal: Goal, value: Any, found: str, met: bool) -> None:
    [figure] = plan.judge([goal], value)
    assert (figure.path, figure.found, figure.met) == (goal.path, found, met)


def test_the_table_shows_each_outcome_and_each_figure_beside_its_goal() -> None:
    state: plan.State = {
        "good": {"done": True, "exit": 0, "ended": "", "seconds": 3725.0, "figures": [list(each) for each in plan.judge(
            GOALS, {"wrong": 0, "share": 0.5})]},
        "bad": {"done": True, "exit": 2, "ended": "", "seconds": 61.4},
        "slow": {"done": False, "seconds": 5.0},
        "late": {"done": True, "exit": -2, "ended": "ended at its deadline of 1 min 00 s", "seconds": 60.0},
    }
    text = plan.table(rows("good", "bad", "slow", "late", "away", "other"), state, root=False)
    assert [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()] == [
        ["campaign", "outcome", "time", "figure", "found", "goal"],
        ["good", "1 goal missed", "1 h 02 min", "wrong", "0", "= 0"],
        ["share", "0.5", ">= 0.99", "MISSED"],
        ["bad", "failed (exit code 2)", "1 min 01 s"],
        ["slow", "not run to its end", "5 s"],
        ["late", "ended at its deadline of 1 min 00 s", "1 min 00 s"],
        ["away", "left out (root only)"],
        ["other", "not run"],
    ]


def test_all_is_good_only_if_all_that_may_run_is() -> None:
    ok: plan.Run = {"done": True, "exit": 0}
    assert plan.good(rows("bad", "away"), {"bad": ok}, root=False)
    assert not plan.good(rows("bad", "away"), {"bad": ok}, root=True)
    assert not plan.good(rows("bad"), {"bad": {"done": True, "exit": 1}}, root=True)


def runner(folder: Path, code: str = "c1", said: list[str] | None = None, **more: Any) -> Runner:
    (folder / "lab.sh").write_text(LAB)
    lines = said if said is not None else []
    return Runner(folder, folder / "kept", code, lab=("bash", "lab.sh"), say=lines.append, patience_s=(0.5, 10.0, 10.0),
                  **more)


def order(folder: Path) -> list[str]:
    return (folder / "order").read_text().splitlines()


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINUTES", raising=False)


def test_a_run_keeps_on_after_a_failure_and_does_nothing_twice(tmp_path: Path) -> None:
    (tmp_path / "silent.json").write_text('{"wrong": 0, "share": 1.0}')
    some, said = rows("good", "bad", "short", "silent", "away"), list[str]()
    first = runner(tmp_path, said=said, is_root=False)
    first.run(some)
    assert order(tmp_path) == ["good FRESH=1 MINUTES=", "bad", "short", "silent"]
    outcomes = [plan.outcome(row, first.state.get(row.name), root=False) for row in some]
    assert outcomes == ["ok", "failed (exit code 3)", "1 goal missed", "2 goals missed", "left out (root only)"]
    assert {each.found for each in plan.figures(first.state["silent"])} == {plan.NOT_WRITTEN}
    assert "what went wrong" in (tmp_path / "kept/bad.log").read_text()
    assert any("what went wrong" in line for line in said)
    again = runner(tmp_path, is_root=False)
    again.run(some)
    assert (len(order(tmp_path)), again.state) == (4, first.state)
    runner(tmp_path, is_root=False).run(some[:2], fresh=True)
    assert order(tmp_path)[4:] == ["good FRESH=1 MINUTES=", "bad"]
    runner(tmp_path, code="c2", is_root=True).run(some[-1:])
    assert order(tmp_path)[6:] == ["away"]


def test_settings_of_the_environment_reach_a_campaign_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINUTES", "5")
    one = runner(tmp_path)
    one.state["good"] = {"code": "c1", "before": 0, "seconds": 1.0, "done": False}
    one._save()
    one.run(rows("good"))
    assert order(tmp_path) == ["good FRESH= MINUTES=5"]


def test_a_campaign_is_ended_at_its_deadline_with_all_that_it_started(tmp_path: Path) -> None:
    some = rows("slow", "bad")
    one = runner(tmp_path, minute_s=5.0)
    one.run(some)
    assert plan.outcome(some[0], one.state["slow"], root=True) == "ended at its deadline of 5 s"
    assert gone(int((tmp_path / "slow.pid").read_text()))
    assert order(tmp_path) == ["slow FRESH=1", "bad"]


def gone(pid: int) -> bool:
    """Whether it has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return True


DRIVER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell runs in the background
from pathlib import Path
sys.path[:0] = {paths!r}
from lab.campaigns.campaign_rows import Row
from lab.campaigns.campaign_runs import Runner
one = Runner(Path("."), Path("kept"), "c1", lab=("bash", "lab.sh"), say=lambda line: print(line, flush=True),
             patience_s=(0.5, 10.0, 10.0))
try:
    one.run([Row("slow", 1, 1), Row("bad", 1, 1)])
except KeyboardInterrupt:
    print("ended")
"""


def test_ctrl_c_ends_the_campaign_keeps_the_state_and_the_next_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "lab.sh").write_text(LAB)
    command = [sys.executable, "-c", DRIVER.format(paths=[str(ROOT)])]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            end = time.monotonic() + 30
            while not ((tmp_path / "slow.pid").exists() and (tmp_path / "slow.pid").read_text().strip()):
                assert time.monotonic() < end
                time.sleep(0.02)
            another = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
            assert "another run is on" in another.stderr
            os.kill(process.pid, signal.SIGINT)
            said, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    assert said.splitlines()[-1] == "ended"
    assert gone(int((tmp_path / "slow.pid").read_text()))
    assert order(tmp_path) == ["slow FRESH=1"]
    state = json.loads((tmp_path / "kept/state.json").read_text())
    assert list(state) == ["slow"]
    assert state["slow"]["done"] is False
    (tmp_path / "through").touch()
    one = runner(tmp_path)
    one.run(rows("slow", "bad"))
    assert order(tmp_path) == ["slow FRESH=1", "slow FRESH=", "bad"]
    assert one.state["slow"]["done"]
    assert one.state["slow"]["seconds"] >= state["slow"]["seconds"]


def test_code_is_named_by_what_campaigns_run_not_by_what_they_write(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True,
                       capture_output=True, timeout=60)

    git("init", "-q")
    (tmp_path / "bench/results").mkdir(parents=True)
    for name in ("a.py", "bench/results/x.json", "README.md"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    first = code_of(tmp_path)
    (tmp_path / "bench/results/x.json").write_text("2")
    (tmp_path / "README.md").write_text("2")
    assert code_of(tmp_path) == first
    git("commit", "-q", "-a", "-m", "figures")
    assert code_of(tmp_path) == first
    (tmp_path / "a.py").write_text("2")
    changed = code_of(tmp_path)
    (tmp_path / "b.py").write_text("new")
    assert len({first, changed, code_of(tmp_path)}) == 3
    assert changed.startswith(f"{first}+")
