"""A mixed load on the router for long: ``python -m lab campaign-mixed --minutes 30``, into a results file.

Exit code 1: a request failed, or the router's memory grew.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import uvloop

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support")]

from load import mixed_load  # noqa: E402 (tests/support is not on the path before)

RESULTS = ROOT / "bench" / "results" / "campaign_mixed.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        report = uvloop.run(mixed_load(Path(folder), options.minutes * 60, options.seed))
    told = {**report.told(), "rss_kib": [(round(at), size) for at, size in report.rss_kib]}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(told) + "\n")
    sys.stdout.write(json.dumps(report.told(), indent=1) + "\n")
    try:
        report.check()
    except AssertionError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
