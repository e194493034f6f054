"""Which public names are refused, and that the list of those from before the rule only becomes shorter."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import load

ROOT = Path(__file__).resolve().parents[2]
names = load(ROOT / "scripts/plain_names.py")

MODULE = '''\
class Told:
    def taken(self, blocks: int) -> None: ...
    def on_lost(self) -> None: ...
    def anew(self) -> bool: ...
    def closed(self) -> bool: ...
    @property
    def drained(self) -> bool: ...
    @property
    def kept(self) -> int: ...
    def _held(self) -> None: ...
    if True:
        async def look(self) -> None: ...
    class Pair:
        def gone(self, *, now: float) -> bool: ...

class _Own:
    def made(self) -> None: ...

def ended() -> bool: ...
def free_blocks() -> int: ...
def put() -> None:
    def taken() -> None: ...
'''


def tree(root: Path, module: str, text: str, allowed: str = "") -> None:
    path = root / "sidecar/src" / module
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    (root / "scripts").mkdir(exist_ok=True)
    (root / names.LIST).write_text(allowed, "utf-8")


def test_the_packages_have_no_new_names_and_the_list_no_stale_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert names.main(["check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(("word", "kind"), [
    ("taken", "participle"), ("asked", "participle"), ("went", "participle"), ("Told", "participle"),
    ("unended", "participle"), ("anew", "adverb or preposition"), ("of", "adverb or preposition"),
    ("whose", "adverb or preposition"), ("farewell", "household word"), ("look", "household word"),
    ("take", ""), ("blocks", ""), ("read", ""), ("put", ""), ("need", ""), ("feed", ""), ("run", ""), ("idle", ""),
    ("on_taken", ""), ("ask_peer", ""), ("PairEnded", ""), ("HTTP", ""), ("p95", "")])
def test_a_word_is_refused_or_not(word: str, kind: str) -> None:
    assert names.kind_of_word(word) == kind


def test_what_is_public_is_looked_at_and_an_adjective_of_its_object_is_well(tmp_path: Path) -> None:
    tree(tmp_path, "xpyd_sidecar/kv/deep/m.py", MODULE)
    tree(tmp_path, "xpyd_sidecar/m.py", "def ahead() -> None: ...\n")
    found = names.scan(tmp_path)
    assert [name for name, _ in found["xpyd_sidecar.kv"]] == [
        "Told", "Told.taken", "Told.anew", "Told.kept", "Told.look", "Told.Pair.gone", "ended"]
    assert found["xpyd_sidecar"] == [("ahead", "sidecar/src/xpyd_sidecar/m.py:1: an adverb or preposition")]


def test_a_new_name_is_refused_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree(tmp_path, "xpyd_sidecar/kv/m.py", "def taken(): ...\n", '"xpyd_sidecar.router" = ["taken"]\n')
    assert names.main(["check"], tmp_path) == 1
    said = capsys.readouterr().out
    assert "taken: sidecar/src/xpyd_sidecar/kv/m.py:1: a participle; a public name is a verb" in said
    assert "xpyd_sidecar.router: taken is in scripts/plain_names.toml and no longer in the package" in said


def test_a_name_that_is_listed_once_may_not_come_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree(tmp_path, "xpyd_sidecar/kv/m.py", "def taken(): ...\n", '"xpyd_sidecar.kv" = ["taken"]\n')
    assert names.main(["check"], tmp_path) == 0
    (tmp_path / "sidecar/src/xpyd_sidecar/kv/n.py").write_text("def taken(): ...\n", "utf-8")
    assert names.main(["check"], tmp_path) == 1
    assert "m.py:1" in capsys.readouterr().out


def test_shrink_takes_off_what_is_renamed_and_adds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    allowed = '"xpyd_sidecar.kv" = ["gone", "taken", "A.of"]\n"xpyd_sidecar.dp" = ["told"]\n'
    tree(tmp_path, "xpyd_sidecar/kv/m.py", "def taken(): ...\ndef made(): ...\nclass A:\n    def of(self): ...\n", allowed)
    assert names.main(["shrink"], tmp_path) == 1
    assert "made:" in capsys.readouterr().out
    assert names.read_list(tmp_path / names.LIST) == {"xpyd_sidecar.kv": ["A.of", "taken"]}
    assert (tmp_path / names.LIST).read_text("utf-8").startswith(names.HEAD)


def test_a_list_that_is_none_and_a_word_that_is_no_command_are_refused(tmp_path: Path) -> None:
    tree(tmp_path, "xpyd_sidecar/kv/m.py", "", '"xpyd_sidecar.kv" = "taken"\n')
    with pytest.raises(ValueError, match=r"xpyd_sidecar\.kv is not a list of names"):
        names.main(["check"], tmp_path)
    assert names.main(["write"], tmp_path) == 2
