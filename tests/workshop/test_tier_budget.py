"""The budget of ``make test``: a run that has grown is told, one that was kept waiting or ran slowly is not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import tier_budget as budget  # noqa: E402
import tier_minutes as minutes  # noqa: E402
import tiers  # noqa: E402
from tier_report import Times  # noqa: E402

USUAL = {"unit": (240.0, 400.0), "component": (500.0, 600.0), "kube": (1000.0, 300.0), "nixl": (180.0, 200.0)}


def run(wall_s: float = 1500.0, *, elsewhere: float = 0.0, processors: int = 2, speed: str = "test", builds_s: float = 5.0,
        **tiers: tuple[float, float]) -> dict[str, Any]:
    """Wall and processor seconds by tier; the others are as usual."""
    of_tiers = USUAL | tiers | {"build-light": (builds_s, 1.0)}
    return {"speed": speed, "commit": "a", "processors": processors, "python": "3.11", "wall_s": wall_s, "processor_s": 0.0,
            "elsewhere": elsewhere, "tiers": [
                {"tier": tier, "code": 0, "wall_s": wall, "processor_s": processor, "tests": {}, "engines": 0, "left": []}
                for tier, (wall, processor) in of_tiers.items()]}


def over(one: dict[str, Any], records: list[dict[str, Any]] | None = None) -> list[str]:
    """What exceeds the budget; it holds exactly where nothing does."""
    said, held = budget.verdict(one, [run()] if records is None else records)
    found = [line for line in said if line.startswith("OVER BUDGET")]
    assert held == (not found)
    return found


def test_a_usual_run_holds_it() -> None:
    assert over(run()) == []


@pytest.mark.parametrize(("wall_s", "builds_s", "held"), [
    (1790.0, 5.0, True), (1810.0, 5.0, False), (2690.0, 700.0, True), (2710.0, 700.0, False)])
def test_the_whole_may_take_30_minutes_and_45_with_a_build(wall_s: float, builds_s: float, held: bool) -> None:
    assert over(run(wall_s, builds_s=builds_s)) == ([] if held else ["OVER BUDGET: the whole takes too long"])


def test_a_whole_that_was_kept_waiting_is_told_and_exceeds_nothing() -> None:
    one = run(3000.0, elsewhere=0.4)
    assert over(one) == []
    assert "too long, which says nothing: others had the processors" in budget.verdict(one, [run()])[0]


@pytest.mark.parametrize("tier", USUAL)
def test_ten_minutes_of_work_more_in_any_tier_are_told_however_busy_the_machine_is(tier: str) -> None:
    wall, processor = USUAL[tier]
    found = over(run(1700.0, elsewhere=0.5, **{tier: (wall + 600.0, processor + 600.0)}))
    assert [line.split()[2] for line in found] == [tier]


@pytest.mark.parametrize("tier", ["unit", "component", "nixl"])
def test_ten_minutes_of_sleep_more_in_a_tier_are_told(tier: str) -> None:
    wall, processor = USUAL[tier]
    found = over(run(1700.0, **{tier: (wall + 600.0, processor)}))
    assert [line.split()[2:6] for line in found] == [[tier, "took", f"{wall + 600.0:.0f}", "seconds,"]]


def test_a_slower_machine_exceeds_nothing_and_what_grows_on_it_is_told() -> None:
    slower = {tier: (1.6 * wall, 1.6 * processor) for tier, (wall, processor) in USUAL.items()}
    assert over(run(1790.0, **slower)) == []
    assert over(run(budget.MOST_PACE * 1790.0, **slower)) == []
    assert over(run(budget.MOST_PACE * 1810.0, **slower)) == ["OVER BUDGET: the whole takes too long"], "however slow it is"
    grown = slower | {"nixl": (slower["nixl"][0], slower["nixl"][1] + 600.0)}
    assert [line.split()[2] for line in over(run(1790.0, **grown))] == ["nixl"]


def test_what_no_change_touched_is_not_missed() -> None:
    one = run()
    one["tiers"] = [each for each in one["tiers"] if each["tier"] != "nixl"]
    assert over(one) == []


def test_a_tier_without_a_record_exceeds_its_budget() -> None:
    assert over(run(new=(1.0, 1.0))) == [
        "OVER BUDGET: new took 1 processor seconds, which no recorded run has",
        "OVER BUDGET: new took 1 seconds, which no recorded run has"]


def test_a_tier_that_test_all_alone_has_recorded_is_held_against_that() -> None:
    untouched = run()
    untouched["tiers"] = [each for each in untouched["tiers"] if each["tier"] != "nixl"]
    records = [untouched, untouched, untouched, run(speed="test-all")]
    assert over(run(), records) == []
    assert [line.split()[2] for line in over(run(nixl=(180.0, 800.0)), records)] == ["nixl"]


def test_other_numbers_of_processors_and_no_record_hold_no_tier() -> None:
    for one in (run(processors=8, nixl=(900.0, 900.0)), run(1900.0, processors=1)):
        said, held = budget.verdict(one, [run()])
        assert held
        assert said[-1].startswith("no run on")


def test_what_others_had_of_the_processors() -> None:
    before, after = budget.Machine(100.0, 400.0), budget.Machine(180.0, 600.0)
    assert budget.elsewhere(before, after, 60.0) == 0.1
    assert budget.elsewhere(before, after, 90.0) == 0.0
    used, of_all = budget.machine()
    assert 0 < used < of_all


def test_the_last_three_runs_of_each_speed_are_kept_and_the_table_has_their_medians(tmp_path: Path) -> None:
    record = tmp_path / "tiers.json"
    for wall_s in (100.0, 1200.0, 1260.0, 1500.0):
        minutes.add(run(wall_s, unit=(wall_s / 10, 1.0)), record)
    minutes.add(run(2400.0, speed="test-all", unit=(60.0, 1.0)), record)
    kept = minutes.runs(None, record)
    assert [one["wall_s"] for one in kept] == [1200.0, 1260.0, 1500.0, 2400.0]
    assert "left" not in json.loads(record.read_text())[0]["tiers"][0]
    lines = minutes.table(kept)
    assert "| unit | pure parts | yes | 2 |" in lines
    assert any(line.startswith("| nixl |") and line.endswith("| where touched | 3 |") for line in lines)
    assert any(line.startswith("| engines-rest |") and line.endswith("| no | ? |") for line in lines)
    assert lines[-1] == "Recorded on 2 processors: `make test` 21 minutes, `make test-all` 40 minutes."
    assert any(line.split() == ["unit", "2", "pure", "parts"] for line in minutes.help_lines(kept))


@pytest.mark.parametrize(("user", "said", "kept"), [
    (0, "recorded in {}", 1), (1000, "not recorded: kube, cluster did not run, for want of root", 0)])
def test_a_run_without_what_needs_root_is_not_recorded(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, said: str, kept: int) -> None:
    monkeypatch.setattr(tiers.os, "geteuid", lambda: user)
    record = tmp_path / "tiers.json"
    assert tiers.record_run(run(), tiers.of_speed(False), record) == said.format(record)
    assert len(minutes.runs(None, record)) == kept


@pytest.mark.parametrize("speed", ["test", "test-all"])
def test_a_whole_run_is_held_against_the_records_of_both_speeds_and_needs_no_git(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], speed: str) -> None:
    record = tmp_path / "tiers.json"
    minutes.add(run(speed="test-all", processors=budget.processors()), record)
    ended = [Times("nixl", wall_s=1.0, processor_s=1.0)]
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CI_TIMES", "RECORD"):  # of the run that this test is part of
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tiers, "OUTPUTS", tmp_path / "tiers")
    monkeypatch.setattr(tiers, "in_lanes", lambda chosen: ended)
    monkeypatch.setattr(minutes, "runs", lambda speed=None: minutes_of(record, speed))
    assert tiers.whole(speed) == 0
    assert "OVER BUDGET" not in capsys.readouterr().out


def minutes_of(record: Path, speed: str | None) -> list[dict[str, Any]]:
    """As ``tier_minutes.runs``, of another file."""
    return [one for one in json.loads(record.read_text()) if speed in {None, one["speed"]}]


def test_records_over_the_budget_are_told() -> None:
    assert minutes.over([run(1500.0), run(1900.0)]) == []
    assert minutes.over([run(1900.0), run(1900.0), run(1500.0), run(5000.0, speed="test-all")]) == [
        "make test takes 31.7 minutes in the median of 3 recorded runs, and may take 30"]
    assert minutes.over([run(2800.0, builds_s=700.0)]) == [
        "make test takes 46.7 minutes in the median of 1 recorded runs, and may take 45"]


def test_the_table_is_written_between_its_marks_alone() -> None:
    readme = f"before\n{minutes.BEGIN}\nold\n{minutes.END}\nafter\n"
    written = minutes.with_table(readme, [])
    assert written.startswith(f"before\n{minutes.BEGIN}\n\n| tier |")
    assert written.endswith(f"No whole run is recorded yet.\n\n{minutes.END}\nafter\n")
    assert minutes.with_table(written, []) == written
    with pytest.raises(ValueError, match=r"README.md has no"):
        minutes.with_table("no marks", [])
