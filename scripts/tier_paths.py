"""Which tiers a change may touch, by its paths against the commit that it goes out from.

Tiers that cost much and test a part of the repository (``touched`` in ``tier_table``) are left out of ``make test`` where
nothing of theirs changes. All of them run where that cannot be told for sure: without git, in a shallow clone, where no
base is known, where the base has all that is here (on a main branch a fresh clone does not say what is new), and where a
path changes that no row below knows.
"""

from __future__ import annotations

import os
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

BASE = "XPYD_BASE"
"""Names the base: a commit, a branch or a tag."""
CANDIDATES = ("origin/HEAD", "origin/main", "main", "@{upstream}")
"""Main branches first: the upstream of a branch that was pushed is that branch itself."""
LIMIT_S = 60.0
SIDECAR = "sidecar/src/xpyd_sidecar"
KV = ("nixl", "versions")
ROWS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # The first row that matches counts. * stands for slashes, too.
    ("*.md", ()), ("LICENSE", ()), (".editorconfig", ()), (".pre-commit-config.yaml", ()), (".importlinter", ()),
    ("docs/*", ()), ("examples/*", ()), ("charts/*", ()), ("crds/*", ()), ("manifests/*", ()), ("images/*", ()),
    ("release/*", ()), ("distribution/*", ()),
    ("bench/results/*", ()), ("lab/[bcgm]*", ()), ("lab/scripted_device/*", ()), ("lab/tools/*", ()),
    ("operator/src/xpyd_operator/api/*", ("versions",)), ("operator/src/*", ()),
    (f"{SIDECAR}/agent/*", ()), (f"{SIDECAR}/member/*", ()),
    *((f"{SIDECAR}/{path}", ("sanitize", *KV)) for path in ("transport/*", "kv/*", "session/greeting.py")),
    *((f"{SIDECAR}/{package}/*", KV) for package in ("broadcast", "dp", "engine", "memory", "session", "threads")),
    *((f"{SIDECAR}/router/{package}/*", ("sanitize", "browser")) for package in ("http", "relay")),
    *((f"{SIDECAR}/router/{package}/*", ("sanitize",)) for package in ("stream", "upstream")),
    *((f"{SIDECAR}/router/{package}/*", ("browser",)) for package in ("endpoints", "fleet", "observing")),
    (f"{SIDECAR}/router/api/*", ("sanitize", "versions")), (f"{SIDECAR}/router/serving/profiles.py", ("sanitize",)),
    (f"{SIDECAR}/router/balance/*", ()), (f"{SIDECAR}/router/serving/*", ()),
    ("tests/nixl/*", ("nixl",)), ("tests/browser/*", ("browser",)), ("tests/component/*", ("versions",)),
    *((f"tests/[us]*/test_{part}_*", ("sanitize",)) for part in ("http", "relay", "stream", "transport", "upstream")),
    ("tests/unit/test_*", ()), ("tests/sockets/test_*", ()), ("tests/kube/*", ()), ("tests/workshop/*", ()),
    ("tests/golden/*", ()), ("e2e/*", ()),
)


class Change(NamedTuple):
    """What differs from the base. ``doubt``: why that cannot be told; then everything counts as changed."""

    base: str = ""
    paths: tuple[str, ...] = ()
    doubt: str = ""


class _GitError(Exception):
    """Git does not know."""


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _GitError(str(error)) from error
    if done.returncode:
        raise _GitError(done.stderr.strip())
    return done.stdout.strip()


def change(root: Path, named: str | None = None) -> Change:
    """What the work tree, untracked files included, has that the base has not. ``named``: the base, else XPYD_BASE, else
    the first branch of a remote, or main, that this one has left.
    """
    named = named or os.environ.get(BASE)
    try:
        if _git(root, "rev-parse", "--is-shallow-repository") != "false":
            return Change(doubt="this clone is shallow")
        base = _merge_base(root, (named,) if named else CANDIDATES)
        if not base:
            return Change(doubt=f"no base: {named} is unknown" if named else "no base is known")
        tracked = _git(root, "diff", "--name-only", "--no-renames", "-z", base)
        paths = tracked + "\0" + _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    except _GitError as error:
        return Change(doubt=f"git: {error}")
    changed = tuple(sorted({path for path in paths.split("\0") if path}))
    return Change(base, changed, "" if changed else "the base has all that is here")


def _merge_base(root: Path, candidates: tuple[str, ...]) -> str:
    """Where this branch left the first candidate that it has left at all, else the first one's; empty where none is."""
    head, known = _git(root, "rev-parse", "HEAD"), []
    for name in candidates:
        try:
            known.append(_git(root, "merge-base", "HEAD", name))
        except _GitError:
            continue
    return next((base for base in known if base != head), known[0] if known else "")


def touched_tiers(found: Change, tiers: tuple[str, ...]) -> dict[str, str]:
    """The tiers of these that a change may touch, each with why."""
    if found.doubt:
        return dict.fromkeys(tiers, found.doubt)
    why: dict[str, str] = {}
    for path in found.paths:
        of_path = next((names for pattern, names in ROWS if fnmatchcase(path, pattern)), None)
        for name in tiers if of_path is None else of_path:
            why.setdefault(name, f"{path} changed" if of_path is not None else f"{path} changed, which no row knows")
    return {name: why[name] for name in tiers if name in why}
