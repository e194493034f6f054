"""Which tiers a change may touch: by its paths, and all of them where that cannot be told."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import sanitized  # noqa: E402
import tier_paths as paths  # noqa: E402

SOME = ("sanitize", "versions", "nixl", "browser")


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@example.com", *words], cwd=folder, check=True,
                          capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path, name: str) -> str:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(name)
    git(folder, "add", name)
    git(folder, "commit", "-q", "-m", name)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a repository with one commit."""
    monkeypatch.delenv("XPYD_BASE", raising=False)
    far = tmp_path / "far"
    far.mkdir()
    git(far, "init", "-q", "-b", "main")
    commit(far, "README.md")
    git(tmp_path, "clone", "-q", str(far), "near")
    return tmp_path / "near"


def test_a_branch_is_held_against_where_it_left_main(clone: Path) -> None:
    base = git(clone, "rev-parse", "HEAD")
    git(clone, "checkout", "-q", "-b", "work")
    commit(clone, "docs/a.md")
    (clone / "new.py").write_text("untracked")
    assert paths.change(clone) == (base, ("docs/a.md", "new.py"), "")


def test_a_branch_that_was_pushed_is_still_held_against_main(clone: Path) -> None:
    base = git(clone, "rev-parse", "HEAD")
    git(clone, "checkout", "-q", "-b", "work")
    commit(clone, "a.c")
    git(clone, "push", "-q", "--set-upstream", "origin", "work")
    commit(clone, "docs/a.md")
    assert paths.change(clone) == (base, ("a.c", "docs/a.md"), "")


def test_a_branch_without_a_main_is_held_against_its_upstream(clone: Path) -> None:
    git(clone, "remote", "rename", "origin", "far")
    base = git(clone, "rev-parse", "HEAD")
    git(clone, "checkout", "-q", "-b", "work", "--track", "far/main")
    git(clone, "branch", "-q", "-D", "main")
    commit(clone, "a.c")
    assert paths.change(clone) == (base, ("a.c",), "")


def test_main_with_commits_that_the_remote_lacks_is_held_against_the_remote(clone: Path) -> None:
    base = git(clone, "rev-parse", "HEAD")
    commit(clone, "a.c")
    assert paths.change(clone) == (base, ("a.c",), "")


def test_a_rename_changes_both_paths(clone: Path) -> None:
    git(clone, "mv", "README.md", "B.md")
    assert paths.change(clone).paths == ("B.md", "README.md")


def test_a_named_base_counts_before_the_remote(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(clone, "a.c")
    between = commit(clone, "b.c")
    commit(clone, "c.c")
    assert paths.change(clone, between) == (between, ("c.c",), "")
    monkeypatch.setenv("XPYD_BASE", between)
    assert paths.change(clone) == (between, ("c.c",), "")


def test_a_fresh_clone_of_main_does_not_say_what_is_new(clone: Path) -> None:
    assert paths.change(clone).doubt == "the base has all that is here"


def test_an_unknown_base_no_repository_and_a_shallow_clone_are_doubt(clone: Path, tmp_path: Path) -> None:
    assert paths.change(clone, "nowhere").doubt == "no base: nowhere is unknown"
    alone = tmp_path / "alone"
    alone.mkdir()
    assert paths.change(alone).doubt.startswith("git: ")
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{tmp_path}/far", "shallow")
    assert paths.change(tmp_path / "shallow").doubt == "this clone is shallow"
    git(clone, "checkout", "-q", "-b", "trunk")
    git(clone, "branch", "-q", "-D", "main")
    git(clone, "remote", "remove", "origin")
    assert paths.change(clone).doubt == "no base is known"


@pytest.mark.parametrize(("path", "tiers"), [
    ("docs/guide.md", ()),
    ("docs/pictures/dashboard.png", ()),
    ("operator/src/xpyd_operator/plan/step.py", ()),
    ("operator/src/xpyd_operator/api/vllm.py", ("versions",)),
    ("sidecar/src/xpyd_sidecar/transport/_moves.c", ("sanitize", "versions", "nixl")),
    ("sidecar/src/xpyd_sidecar/engine/compat/__init__.py", ("versions", "nixl")),
    ("sidecar/src/xpyd_sidecar/router/relay/_answer.c", ("sanitize", "browser")),
    ("sidecar/src/xpyd_sidecar/router/endpoints/dashboard.html", ("browser",)),
    ("tests/sockets/test_relay_fast.py", ("sanitize",)),
    ("tests/unit/test_plan_step.py", ()),
    ("tests/nixl/test_ucx.py", ("nixl",)),
])
def test_a_path_touches_the_tiers_that_test_it(path: str, tiers: tuple[str, ...]) -> None:
    assert tuple(paths.touched_tiers(paths.Change("base", (path,)), SOME)) == tiers


@pytest.mark.parametrize("path", ["requirements/cpu.txt", "Makefile", "pyproject.toml", "tests/support/wire.py", "new/a.py",
                                  "sidecar/hatch_build.py", "sidecar/src/xpyd_sidecar/contract/legs.py", ".ci/run"])
def test_what_no_row_knows_and_what_all_stand_on_touches_all(path: str) -> None:
    why = paths.touched_tiers(paths.Change("base", ("docs/a.md", path)), SOME)
    assert why == dict.fromkeys(SOME, f"{path} changed, which no row knows")


def test_what_is_fuzzed_touches_the_sanitizers() -> None:
    found = {str(one.relative_to(ROOT)) for target in (ROOT / "tests/support/fuzz").glob("*.py")
             for one in sanitized._imports(target) if one.name != "__init__.py"}
    fuzzed = sorted(one for one in found if one.startswith("sidecar/"))
    assert len(fuzzed) > 8
    touched = {one: paths.touched_tiers(paths.Change("base", (one,)), SOME) for one in fuzzed}
    assert [one for one, tiers in touched.items() if "sanitize" not in tiers] == []


def test_doubt_touches_all() -> None:
    doubt = "this clone is shallow"
    assert paths.touched_tiers(paths.Change(doubt=doubt), SOME) == dict.fromkeys(SOME, doubt)


def test_every_row_is_about_something_that_is_here() -> None:
    tracked = git(ROOT, "ls-files").splitlines()
    assert [pattern for pattern, _ in paths.ROWS if not any(fnmatchcase(path, pattern) for path in tracked)] == []
