"""Figures of what runs in one thread, as in the router: processor time, the best of several rounds, and the command that
prints and records them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROUNDS = 7


def best_us(work: Callable[[], object], times: int) -> float:
    """Processor time of one turn of ``work``, microseconds: the mean over so many ``times``, the best of ``ROUNDS``."""
    found = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(times):
            work()
        found.append((time.process_time() - began) / times * 1e6)
    return min(found)


def run_command(about: str, results: Path, measure: Callable[[], Mapping[str, float]]) -> None:
    """Measure, and print each figure by its name; with ``--write`` they go into ``results`` as JSON. ``about``: what
    ``--help`` says.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--write", action="store_true", help=f"into {results.name}")
    args = parser.parse_args()
    figures = {name: round(value, 3) for name, value in measure().items()}
    for name, value in figures.items():
        print(f"{name:24} {value:10.3f}")
    if args.write:
        results.write_text(json.dumps(figures, indent=2) + "\n")
