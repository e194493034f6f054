"""Whether the extensions are built and taken: without them the package works, and their tests are left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from scripts import load

from xpyd_sidecar.router.relay import fast
from xpyd_sidecar.transport import gates, moves

ROOT = Path(__file__).resolve().parents[2]
TAKEN: dict[str, Callable[[], bool]] = {
    "_fast": lambda: fast.COMPILED,
    "_moves": lambda: moves.COMPILED,
    "_stripes": lambda: gates.COMPILED,
    "_answer": lambda: fast.COMPILED,
}
"""By extension: whether what imports it has found it, and found it to be of this revision."""


def missing() -> list[str]:
    """C files whose extension is not taken, of all that are built."""
    sources: tuple[Path, ...] = load(ROOT / "sidecar" / "hatch_build.py").SOURCES
    return [str(source) for source in sources if not TAKEN[source.stem]()]
