"""``python -m lab``: every row of the catalog can run, what is missing is said, and extras are installed once."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from lab import __main__ as command
from lab import extras, tables
from lab.bench.charts import log_lines
from lab.catalog import CAMPAIGNS, COMMANDS, ROOT, Command
from scripts import load


def test_names_are_unlike_and_what_runs_exists() -> None:
    rows = (*COMMANDS.values(),)
    assert len(rows) > 50
    for row in rows:
        program = row.argv[0] if row.argv[0] != "-m" else f"{row.argv[1].replace('.', '/')}"
        files = [part for part in row.argv if part.endswith(".py")] or [
            program, f"{program}.py", f"lab/cluster/{program}/__main__.py"]
        assert any((ROOT / file).exists() for file in files[-3:]), row.name
        assert [file for file in row.argv if file.endswith(".py") and not (ROOT / file).exists()] == [], row.name
        assert set(row.extras) <= extras.EXTRAS.keys(), row.name


def test_every_file_of_campaigns_for_pytest_is_run_by_one() -> None:
    run = {part for row in CAMPAIGNS for part in row.argv}
    there = [path for path in (*ROOT.glob("lab/campaigns/test_*.py"), *ROOT.glob("lab/campaigns/cluster/*.py"))
             if path.name != "conftest.py"]
    assert len(there) > 20
    assert [str(path.relative_to(ROOT)) for path in there if str(path.relative_to(ROOT)) not in run] == []


def test_the_list_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(COMMANDS)
    assert max(map(len, lines)) <= command.WIDTH
    assert "](" not in "".join(lines)


@pytest.mark.parametrize(("given", "said"), [
    (["bench-ruoter"], "no such command: bench-ruoter; did you mean bench-router"),
    (["gang"], "no such command: gang; did you mean campaign-gang?"),
    (["--fresh"], "usage: python -m lab NAME"), ([], "usage: python -m lab NAME"),
])
def test_no_name_or_a_wrong_one_prints_the_list_and_close_matches(given: list[str], said: str,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(given) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "bench-observer" in error


def test_arguments_that_are_given_count_alone_and_fresh_goes_behind_them() -> None:
    row = Command("x", 1, "", ("a.py", "--built", "{bench}/built"), (("--scripted",), ("--real",)), anew="--fresh")
    begin = [sys.executable, "a.py", "--built", "/b/built"]
    assert command.runs(row, [], {"bench": "/b"}, fresh=False) == [[*begin, "--scripted"], [*begin, "--real"]]
    assert command.runs(row, ["-k", "1"], {"bench": "/b"}, fresh=True) == [[*begin, "-k", "1", "--fresh"]]
    alone = row._replace(prefix=("unshare", "--net"), anew="so_far.json")
    [prefixed] = command.runs(alone, ["1"], {"bench": "/b"}, fresh=True)
    assert prefixed == ["unshare", "--net", *begin, "1"]


def test_what_is_set_stays_and_the_path_of_a_command_goes_before_what_it_is() -> None:
    row = Command("x", 1, "", ("a.py",), env={"KILLS": "15", "SITE": "{nixl}/site", "PYTHONPATH": "/support"})
    found = command.settings(row, {"nixl": "/n"}, {"KILLS": "4", "PYTHONPATH": "/mine"})
    assert found == {"KILLS": "4", "SITE": "/n/site", "PYTHONPATH": "/support:/mine"}
    assert command.settings(row._replace(env={}), {}, {"A": "1"}) == {"A": "1"}


def row_that(code: str, **more: Any) -> Command:
    return Command("x", 1, "", ("-c", code), **{"env": {}} | more)


def test_the_first_run_that_fails_ends_them_and_runs_together_are_all_waited_for(tmp_path: Path) -> None:
    code = f"import sys; open({str(tmp_path / 'order')!r}, 'a').write(sys.argv[1]); sys.exit(int(sys.argv[1]))"
    usual = (("0",), ("3",), ("1",))
    assert command.run(row_that(code, usual=usual), []) == 3
    assert (tmp_path / "order").read_text() == "03"
    assert command.run(row_that(code, usual=usual, together=True), []) == 3
    assert sorted((tmp_path / "order").read_text()[2:]) == ["0", "1", "3"]


def test_what_was_done_so_far_is_forgotten_when_it_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ROOT", tmp_path)
    (tmp_path / "so_far.json").write_text("{}")
    assert command.run(row_that("pass", anew="so_far.json"), []) == 0
    assert (tmp_path / "so_far.json").exists()
    assert command.run(row_that("pass", anew="so_far.json"), [], fresh=True) == 0
    assert not (tmp_path / "so_far.json").exists()


def test_without_root_or_an_extra_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def absent(name: str) -> Path:
        raise extras.ExtraError(f"missing on this machine: apt-get install {name}")

    monkeypatch.setattr(extras, "install", absent)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert command.run(row_that("pass", root=True), []) == 1
    assert command.run(row_that("pass", extras=("bench",)), []) == 1
    assert capsys.readouterr().err.splitlines() == ["x needs root", "x: missing on this machine: apt-get install bench"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/one.txt").write_text("one==1\n")
    monkeypatch.setattr(extras, "ROOT", tmp_path)
    monkeypatch.setattr(extras, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def test_an_extra_is_filled_once_and_anew_when_its_pins_change(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(folder: Path, pins: str) -> None:
        filled.append(pins)
        if len(filled) == 1:
            (folder / "half").touch()
            raise extras.ExtraError("no network")
        (folder / f"{len(filled)}").touch()

    filled: list[str] = []
    monkeypatch.setattr(extras, "EXTRAS", {"x": extras.Extra("", fill, ("one",))})
    with pytest.raises(extras.ExtraError, match="no network"):
        extras.install("x")
    assert extras.install("x") == extras.install("x") == cache / "x"
    assert {path.name for path in (cache / "x").iterdir()} == {"2", "filled"}
    (cache.parent / "requirements/one.txt").write_text("one==2\n")
    extras.install("x")
    assert {path.name for path in (cache / "x").iterdir()} == {"3", "filled"}
    assert filled == ["one"] * 3


def test_what_the_distribution_has_is_named_where_it_is_not_installed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = extras.Extra("", lambda _folder: None, commands=(("no-such-program", "b-pack", "a-pack"), ("sh", "dash")))
    monkeypatch.setattr(extras, "EXTRAS", {"x": lacking})
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(extras.ExtraError, match=r"missing on this machine: apt-get install a-pack b-pack$"):
        extras.install("x")
    assert not cache.exists()


def test_pins_of_extras_exist() -> None:
    for name, extra in extras.EXTRAS.items():
        assert [pins for pins in extra.pins if not (ROOT / f"requirements/{pins}.txt").exists()] == [], name
        assert [source for source in extra.programs if not (ROOT / source).exists()] == [], name


def test_a_page_that_is_not_current_is_named_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for page, name in zip(tables.PAGES, ("campaigns", "benches"), strict=True):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text(f"before\n<!-- {name}: python -m lab --docs -->\nold\n<!-- end -->\nafter\n")
    assert tables.main(check=True, root=tmp_path) == 1
    assert "bench/README.md is not what lab/catalog.py says" in capsys.readouterr().err
    assert tables.main(check=False, root=tmp_path) == 0
    assert tables.main(check=True, root=tmp_path) == 0
    text = (tmp_path / tables.PAGES[0]).read_text()
    assert text.startswith("before\n<!--")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "\nold\n" not in text
    assert text.count("`python -m lab campaign-") == sum(row.name.startswith("campaign-") for row in CAMPAIGNS)


@pytest.mark.parametrize(("given", "written"), [([], False), (["TRACE"], True)])
def test_a_look_at_policies_without_a_trace_writes_nothing(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], written: bool) -> None:
    bench = load(ROOT / "lab/bench/policies/__main__.py")
    for name, made in {"RESULTS": tmp_path / "policies.json", "rows_of": lambda _: [], "made_up": list,
                       "replay": lambda *_, **__: {}, "costs": dict}.items():
        monkeypatch.setattr(bench, name, made)
    bench.main(given)
    assert (tmp_path / "policies.json").exists() == written


FAILS = "echo refused >&2; exit 4"
CRD, SERVICE = "echo crd/disaggservices.xpyd.dev", "echo dsvc/refused"


@pytest.mark.parametrize(("crd", "services", "given", "code"), [
    (CRD, SERVICE, (), 1), (CRD, SERVICE, ("--all",), 0), (CRD, ":", (), 0),
    (":", "echo 'no such resource' >&2; exit 1", (), 0), (FAILS, SERVICE, (), 4), (CRD, FAILS, (), 4),
    (FAILS, FAILS, ("--all",), 0)])
def test_the_operator_is_not_removed_while_there_are_services_or_may_be(
        tmp_path: Path, crd: str, services: str, given: tuple[str, ...], code: int) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\ncase "$1 $2" in\n"get customresourcedefinitions") {crd};;\nget\\ *) {services};;\n'
                       f'*) echo "$@" > {tmp_path}/deleted;;\nesac\n')
    kubectl.chmod(0o755)
    env = os.environ | {"KUBECTL": str(kubectl), "OVERLAY": "o"}
    done = subprocess.run([ROOT / "scripts/uninstall.sh", *given], env=env, capture_output=True, text=True, check=False,
                          timeout=60)
    assert done.returncode == code
    assert (tmp_path / "deleted").exists() == (code == 0)
    if code:
        assert "refused" in done.stderr
    else:
        assert (tmp_path / "deleted").read_text() == "delete --ignore-not-found -k o\n"


def test_a_line_over_logarithmic_axes_is_straight_for_a_power_and_has_one_colour_in_all_charts() -> None:
    line = [(1.0, 1.0), (10.0, 100.0), (100.0, 10_000.0)]
    other = [(1.0, 0.0), (100.0, 5.0)]
    text = log_lines([("MB/s & one", {"b": line}), ("two", {"a": other, "b": line})], {1.0: "1", 100.0: "c"})
    root = ET.fromstring(text)
    drawn = [(each.get("points", ""), each.get("stroke")) for each in root.iter("{http://www.w3.org/2000/svg}polyline")]
    points = [[float(part) for part in point.split(",")] for point in drawn[0][0].split()]
    between = [(a + b) / 2 for a, b in zip(points[0], points[2], strict=True)]
    assert points[1] == pytest.approx(between, abs=0.1)
    assert drawn[0][1] == drawn[1][1] != drawn[2][1]
    assert "MB/s &amp; one" in text
