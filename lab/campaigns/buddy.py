"""A million random operations on the buddy allocator, with how broken up its space gets: ``bench/results/buddy.json``."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/support"))

import buddy_judge

RESULTS = Path(__file__).parents[2] / "bench/results/buddy.json"
CASES = {
    "frames: up to 1 MiB in 16 MiB": (16 << 20, 4096, 1 << 20),
    "copies: up to 16 MiB in 128 MiB": (128 << 20, 4096, 16 << 20),
    "tight: up to 256 KiB in 3 MiB and a bit": ((3 << 20) + 12345, 4096, 256 << 10),
    "odd: up to 900 bytes in 100,003": (100_003, 1, 900),
}


def main() -> None:
    """Run every case."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--operations", type=int, default=1_000_000)
    given = arguments.parse_args()
    each = given.operations // len(CASES)
    out = {}
    for number, (name, case) in enumerate(CASES.items()):
        began = time.monotonic()
        seen = buddy_judge.run(number, each, *case)
        took = time.monotonic() - began
        out[name] = {
            "operations": seen.operations, "overlaps": seen.overlaps, "not_merged_back": seen.unmerged,
            "refused": seen.refused,
            "refused_although_the_bytes_were_free": len(seen.external),
            "external_fragmentation_then": round(statistics.mean(seen.external), 4) if seen.external else None,
            "internal_fragmentation": round(statistics.mean(seen.internal), 4),
            "us_per_operation_with_its_check": round(1e6 * took / each, 2),
        }
        print(name, out[name], flush=True)
    bad = {name: sum(one[name] for one in out.values()) for name in ("overlaps", "not_merged_back")}
    RESULTS.write_text(json.dumps({"operations": each * len(CASES), **bad, "cases": out}, indent=2) + "\n")
    sys.exit(any(bad.values()))


if __name__ == "__main__":
    main()
