"""Which public names are refused, and that there are none."""

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


def tree(root: Path, module: str, text: str) -> None:
    path = root / "sidecar/src" / module
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def test_the_packages_have_no_such_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert names.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize(("word", "kind"), [
    ("taken", "participle"), ("asked", "participle"), ("went", "participle"), ("Told", "participle"),
    ("unended", "participle"), ("anew", "adverb or preposition"), ("of", "adverb or preposition"),
    ("whose", "adverb or preposition"), ("farewell", "household word"), ("look", "household word"),
    ("take", ""), ("blocks", ""), ("read", ""), ("put", ""), ("need", ""), ("feed", ""), ("run", ""), ("idle", ""),
    ("on_taken", ""), ("ask_peer", ""), ("PairEnded", ""), ("HTTP", ""), ("p95", "")])
def test_a_word_is_refused_or_not(word: str, kind: str) -> None:
    assert names.kind_of_word(word) == kind


def test_what_is_public_is_looked_at_and_an_adjective_of_its_object_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree(tmp_path, "xpyd_sidecar/kv/deep/m.py", MODULE)
    tree(tmp_path, "xpyd_sidecar/m.py", "def ahead() -> None: ...\n")
    assert names.main(tmp_path) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == [
        "Told", "Told.taken", "Told.anew", "Told.kept", "Told.look", "Told.Pair.gone", "ended", "ahead"]
    assert said[-1].startswith("ahead: sidecar/src/xpyd_sidecar/m.py:1: an adverb or preposition; a public name is a verb")
