"""``xpyd render``: writing, printing and checking what is generated."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from xpyd_operator.api.crds import crds
from xpyd_operator.cli.main import main


def test_crds_are_written_and_then_up_to_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "crds"
    assert main(["render", "crds", "--dir", str(folder), "--check"]) == 1
    assert "not up to date; run `xpyd render crds`" in capsys.readouterr().out
    assert main(["render", "crds", "--dir", str(folder)]) == 0
    assert yaml.safe_load((folder / "disaggservices.yaml").read_text()) == crds()["disaggservices.yaml"]
    assert main(["render", "crds", "--dir", str(folder), "--check"]) == 0
    (folder / "disaggpools.yaml").write_text("# edited")
    capsys.readouterr()
    assert main(["render", "crds", "--dir", str(folder), "--check"]) == 1
    assert capsys.readouterr().out.startswith(f"{folder}/disaggpools.yaml: not up to date")


def test_crds_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "crds", "--dir", "-"]) == 0
    assert list(yaml.safe_load_all(capsys.readouterr().out)) == list(crds().values())


def test_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "reference.md"
    assert main(["render", "reference", "--file", str(file)]) == 0
    assert main(["render", "reference", "--file", str(file), "--check"]) == 0
    capsys.readouterr()
    assert main(["render", "reference", "--file", "-"]) == 0
    assert capsys.readouterr().out == file.read_text()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["render", "crds", "--dir", str(tmp_path / "file")]) == 2
    assert "xpyd: " in capsys.readouterr().err
