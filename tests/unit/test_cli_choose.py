"""Which service and which log a command is about."""

from __future__ import annotations

from pathlib import Path

import pytest

from xpyd_operator.cli.choose import choose
from xpyd_operator.cli.logs import sources, split
from xpyd_operator.errors import NotFound
from xpyd_operator.local import lock
from xpyd_operator.local.paths import ServiceFolder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XPYD_HOME", str(tmp_path))
    return tmp_path


def make(name: str) -> ServiceFolder:
    folder = ServiceFolder(name)
    folder.make()
    folder.desired.write_text("x")
    return folder


def test_none_and_unknown_are_said() -> None:
    with pytest.raises(NotFound, match="`xpyd up -f FILE` starts one"):
        choose(None)
    make("a")
    with pytest.raises(NotFound, match=r"no service b in .*; there are a"):
        choose("b")


def test_the_only_one_needs_no_name() -> None:
    make("a")
    assert choose(None).service == choose("a").service == "a"


def test_of_several_the_one_that_runs_needs_no_name() -> None:
    make("a")
    running = make("b")
    with pytest.raises(NotFound, match=r"several services \(a, b\); name one"):
        choose(None)
    with lock.hold_lock(running.lock):
        assert choose(None).service == "b"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ([], (None, None)),
        (["a"], ("a", None)),
        (["a-e1"], ("a", "a-e1")),
        (["router"], (None, "router")),
        (["a", "a-e1/agent"], ("a", "a-e1/agent")),
    ],
)
def test_words_of_logs(words: list[str], meant: tuple[str | None, str | None]) -> None:
    make("a")
    assert split(words) == meant


def test_too_many_words_of_logs() -> None:
    with pytest.raises(NotFound, match="not 3 words"):
        split(["a", "b", "c"])


def test_logs_of_instances_that_are_gone_are_found_by_name_only() -> None:
    folder = make("a")
    old = folder.path / "previous" / "a-e1"
    new = folder.instance("a-e0")
    for one in (old, new):
        one.mkdir(parents=True)
        (one / "engine.log").write_text("x")
    assert set(sources(folder, None)) == {"a-e0/engine"}
    assert sources(folder, "a-e1/engine") == {"a-e1/engine": old / "engine.log"}
    with pytest.raises(NotFound, match="a has no instance a-e7; there are a-e0, a-e1, router, supervisor"):
        sources(folder, "a-e7")
