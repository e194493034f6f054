"""The dispatcher: subcommands, exit codes, and what a start costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from xpyd_operator import __version__
from xpyd_operator.cli import check, main
from xpyd_operator.errors import Fault, LocalError, SpecError

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "local" / "1p1d.yaml")


def xpyd(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "xpyd_operator.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"xpyd {__version__} (")


@pytest.mark.parametrize(
    "arguments", [[], ["chekc"], ["check"], ["check", "-f"], ["render", "pods"], ["check", "-f", "x", "--for", "mars"]]
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(arguments)
    assert caught.value.code == 2
    assert "usage: xpyd" in capsys.readouterr().err


def test_help_lists_every_subcommand_and_each_has_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--help"])
    listed = capsys.readouterr().out
    for name, text in main.COMMANDS.items():
        assert name in listed
        assert text in " ".join(listed.split())
        with pytest.raises(SystemExit) as caught:
            main.main([name, "--help"])
        assert caught.value.code == 0
        assert f"usage: xpyd {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (SpecError((Fault("a", "b"), Fault("c", "d"))), ["xpyd: a: b", "xpyd: c: d"]),
        (LocalError("port 10001 is taken"), ["xpyd: port 10001 is taken"]),
    ],
)
def test_errors_become_a_message_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, lines: list[str]
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(check, "run", fail)
    assert main.main(["check", "-f", "x"]) == 2
    assert capsys.readouterr().err.splitlines() == lines


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "run", interrupted)
    assert main.main(["check", "-f", "x"]) == 130


def test_as_a_process_exit_codes_and_streams() -> None:
    good = xpyd("check", "-f", EXAMPLE)
    assert (good.returncode, good.stderr) == (0, "")
    missing = xpyd("check", "-f", "no-such-file")
    assert (missing.returncode, missing.stdout, missing.stderr) == (2, "", "xpyd: no-such-file: no such file\n")


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m xpyd_operator.cli.main render crds --dir - | head -1"
    shell = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("# Made by")


def test_check_imports_neither_a_cluster_client_nor_a_server() -> None:
    code = (
        "import sys; from xpyd_operator.cli.main import main; main(['check', '-f', sys.argv[1]]); "
        "print([name for name in ('kubernetes', 'kopf', 'aiohttp', 'zmq', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, EXAMPLE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
