"""Targets as processes, some at a time; what fails is written down with the command that shows it again."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fuzz.worker import noted

GRACE_S = 90.0
"""For the start, the seeds, the last input, and a report."""
MAX_REPORT = 6000
"""Bytes of a report that are shown; all of it lies beside the input."""


@dataclass(frozen=True)
class Outcome:
    """How a target's run ended. ``failure``: empty, or what was found and where it is written down."""

    target: str
    figures: str
    failure: str = ""


def run(targets: Sequence[str], folder: Path, env: Mapping[str, str], *, seconds: float, seed: int, jobs: int = 2,
        tell: Callable[[str], None] = print) -> list[Outcome]:
    """Search each target for so long, and tell of each when it is done."""
    folder.mkdir(parents=True, exist_ok=True)

    def one(target: str) -> Outcome:
        found = _search(target, folder, env, seconds, seed)
        tell(found.failure or f"{target:8} {found.figures}")
        return found

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, targets))


def _search(target: str, folder: Path, env: Mapping[str, str], seconds: float, seed: int) -> Outcome:
    notebook, report = folder / f"{target}.now", folder / f"{target}.report"
    notebook.unlink(missing_ok=True)
    command = [sys.executable, "-m", "fuzz.worker", target, str(folder), "--seconds", str(seconds), "--seed", str(seed)]
    with report.open("w+b") as words:
        try:
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=words, check=False,
                                  timeout=seconds + GRACE_S)
            code, figures = done.returncode, done.stdout.decode().strip()
        except subprocess.TimeoutExpired:
            code, figures = -1, "did not end"
    if code == 0:
        report.unlink()
        return Outcome(target, figures)
    said = report.read_text(encoding="utf-8", errors="replace")
    if not notebook.exists():
        return Outcome(target, figures, f"{target}: exit code {code} before the first input\n{said[-MAX_REPORT:]}")
    data = noted(notebook)
    kept = folder / f"{target}-{hashlib.sha256(data).hexdigest()[:12]}"
    kept.write_bytes(data)
    said = said if len(said) <= MAX_REPORT else f"{said[:MAX_REPORT // 2]}\n…\n{said[-MAX_REPORT // 2:]}"
    again = f"{sys.executable} scripts/sanitize.py again {target} {kept}"
    return Outcome(target, figures, f"{target}: exit code {code} {figures}\n{said}\ninput: {data[:300]!r}\nagain: {again}")
