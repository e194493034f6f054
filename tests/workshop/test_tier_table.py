"""The rows of tiers: each test is in one of them, a failure of lint or laws ends a run, builds come first."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import tier_table as table  # noqa: E402
import tiers  # noqa: E402

Times = tiers.Times


def words(name: str) -> list[str]:
    """Of all commands of a row."""
    return [word for command in table.ROWS[name].commands for word in command]


def test_every_file_that_a_row_names_is_there() -> None:
    named = [word.removeprefix("--ignore=") for name in table.ROWS for word in words(name)]
    files = [word for word in named if re.match(r"(tests|e2e|scripts)\b", word)]
    assert len(files) > 60
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_every_folder_of_tests_is_in_both_speeds_or_in_test_all() -> None:
    named = " ".join(word for one in table.of_speed(True) for word in words(one.name))
    folders = {path.parent for pattern in ("tests/*/test_*.py", "e2e/test_*.py") for path in ROOT.glob(pattern)}
    assert [str(path) for path in folders if str(path.relative_to(ROOT)) not in named] == []


def test_marks_part_the_tiers_that_share_a_folder() -> None:
    parts = ["not engines and not test_all", "engines and smoke", "test_all and not engines", "engines and not smoke"]
    for folder, marks in (("tests/component", parts),
                          ("tests/kube", ["not test_all", "test_all"]), ("e2e", ["smoke", "not smoke"])):
        commands = [command for one in table.TIERS for command in one.commands if folder in command]
        found = [command[command.index("-m", 3) + 1] for command in commands]
        assert found == marks


def test_needs_come_first_and_once() -> None:
    names = [one.name for one in table.with_needs((table.ROWS["cluster"], table.ROWS["cluster-rest"]))]
    assert names == ["build-full", "build-images", "cluster", "cluster-rest"]


class Recorder:
    """Stands in for the watch: says what ran, beside what, and how it ended."""

    def __init__(self, failed: str = "") -> None:
        self.failed, self.ran, self.now = failed, [], set()
        self.beside: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def __call__(self, tier: Any) -> Any:
        with self._lock:
            self.ran.append(tier.name)
            self.now.add(tier.name)
            self.beside[tier.name] = set(self.now)
        with self._lock:
            self.now.remove(tier.name)
        return Times(tier.name, code=1 if tier.name == self.failed else 0)


@pytest.mark.parametrize("failed", ["lint", "laws"])
def test_a_failure_of_lint_or_of_the_laws_ends_the_run(failed: str) -> None:
    seen = Recorder(failed)
    ended = tiers.in_lanes(table.of_speed(True), seen)
    assert sorted(seen.ran) == ["laws", "lint"]
    assert [one.code for one in ended if one.tier == failed] == [1]


@pytest.mark.parametrize("lanes", ["1", "2"])
@pytest.mark.parametrize("everything", [False, True])
def test_all_run_once_each_after_what_it_needs(monkeypatch: pytest.MonkeyPatch, lanes: str, everything: bool) -> None:
    monkeypatch.setenv("LANES", lanes)
    seen, wanted = Recorder("component"), table.of_speed(everything)
    ended = tiers.in_lanes(wanted, seen)
    assert sorted(one.tier for one in ended) == sorted(seen.ran) == sorted(one.name for one in table.with_needs(wanted))
    for one in wanted:
        assert all(seen.ran.index(need) < seen.ran.index(one.name) for need in one.needs)
    assert {*seen.ran[:2]} == {"lint", "laws"}


def test_two_of_a_kubernetes_never_run_beside_each_other() -> None:
    seen = Recorder()
    tiers.in_lanes(table.of_speed(True), seen)
    cluster = {one.name for one in table.ROWS.values() if one.lane is table.Lane.CLUSTER}
    assert all(len(beside & cluster) <= 1 for beside in seen.beside.values())


def test_what_no_change_touches_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
                                                      ) -> None:
    changed = tiers.tier_paths.Change("0123456789abcdef", ("tests/nixl/test_ucx.py",))
    monkeypatch.setattr(tiers.tier_paths, "change", lambda root: changed)
    names = [one.name for one in tiers.select_tiers(everything=False)]
    assert "nixl" in names
    assert not {"browser", "sanitize", "versions", "workshop"} & {*names}
    said = capsys.readouterr().out.splitlines()
    assert "nixl: runs, since tests/nixl/test_ucx.py changed" in said
    assert "browser: left out, nothing of it changed since 0123456789ab" in said
    assert {one.name for one in table.TIERS} == {one.name for one in tiers.select_tiers(everything=True)}


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiers.main(["units"]) == 2
    assert "tiers: lint, laws, unit" in capsys.readouterr().err


@pytest.mark.parametrize(("end", "code"), [
    ("sys.exit(5)", 5), ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", 130)])
def test_a_tier_whose_command_ended_by_a_signal_has_failed(end: str, code: int) -> None:
    program = f"import os, signal, sys, time; signal.signal(signal.SIGINT, signal.SIG_DFL); {end}"
    assert tiers.alone(table.ROWS["lint"]._replace(commands=((sys.executable, "-c", program),)), []) == code
