"""``check-gpu``: what xpyd does on a GPU, on a machine with torch and CUDA but without vLLM and without a registry.

    python -m lab.gpu [--only NAMES] [--write [FILE]] [--device cpu]

Each check is a process of its own with a deadline; after one that fails the next runs. ``--write`` records
bench/results/gpu.json, or another file; ``--device cpu`` tries the checks themselves. Exit code: 0 all held, but for faults
that are known; 1 something did not, or there is no GPU. docs/development/gpu.md says what each check shows, and what brings
it to a machine without a registry.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lab.gpu import machine
from lab.gpu.findings import LeftOutError, NotHeldError
from lab.gpu.runner import Check, Outcome, failures, line, record, run, run_all

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = ROOT / "bench/results/gpu.json"
CHECKS: Final = (
    Check("copies-out", "order_checks:copies_out", 120),
    Check("copies-in", "order_checks:copies_in", 120),
    Check("marks", "order_checks:marks", 120),
    Check("kept", "order_checks:kept", 120),
    Check("layouts", "layout_checks:layouts", 120),
    Check("costs", "cost_checks:costs", 120),
    Check("beside", "cost_checks:beside", 120),
    Check("graph-beside", "graph_checks:capture_beside", 120),
    Check("graph-whole", "graph_checks:capture_whole", 120),
    Check("shared", "host_checks:shared_memory", 120),
    Check("locked", "host_checks:locked_memory", 120),
    Check("nodes", "node_checks:nodes", 120),
    Check("mapped", "mapping_checks:mapped", 120),
    *(Check(f"link-shm-{size}k", "link_checks:link", 120, (size << 10, "shm")) for size in (16, 64, 1024)),
    Check("link-tcp-64k", "link_checks:link", 120, (64 << 10, "tcp")),
    *(Check(f"link-{size}k", "link_checks:link", 180, (size << 10,)) for size in (16, 64, 256, 1024)),
    Check("aborts", "group_checks:aborts", 60),
    Check("both-ways", "group_checks:both_ways", 120),
)


def obey(order: Mapping[str, Any]) -> int:
    """Be a check's process: run it and leave what it finds in a file."""
    module, _, name = order["run"].partition(":")
    device: Any = order["device"]
    said: dict[str, Any] = {}
    if order["run"] != machine.CHECK.run:
        torch = importlib.import_module("torch")
        device = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        said["no_device"] = device.type == "cpu"
    try:
        said["figures"] = getattr(importlib.import_module(f"lab.gpu.{module}"), name)(device, *order["arguments"])
    except NotHeldError as error:
        said |= {"figures": error.figures, "why": str(error)}
    except LeftOutError as error:
        said["left_out"] = str(error)
    Path(order["result"]).write_text(json.dumps(said))
    return 0


def select(only: str) -> tuple[Check, ...]:
    """The checks that are named; all, where none is.

    Raises:
        ValueError: there is no such check.
    """
    names = only.replace(",", " ").split()
    if unknown := [name for name in names if name not in {check.name for check in CHECKS}]:
        raise ValueError(f"no such check: {', '.join(unknown)}; there are: {', '.join(check.name for check in CHECKS)}")
    return tuple(check for check in CHECKS if not names or check.name in names)


def environment(device: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """For the checks: the connector's sources before what the machine has; on a CPU the tests' stand-in for a device."""
    ours = [ROOT, ROOT / "sidecar/src", *([ROOT / "tests/support"] if device == "cpu" else [])]
    rest = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**environ, "PYTHONPATH": os.pathsep.join([*(str(path) for path in ours if path.exists()), *rest])}


def check_all(checks: Sequence[Check], device: str, write: Path | None) -> int:
    """Say what machine it is, then check; the exit code."""
    environ = environment(device)
    if write is not None:
        write.parent.mkdir(parents=True, exist_ok=True)
    here = run(machine.CHECK, device, environ)
    if here.outcome is Outcome.BAD:
        sys.stdout.write(f"check-gpu: {here.why}; nothing was checked\n")
        return 1
    print(line(here), flush=True)
    rows = run_all(checks, device, environ, lambda text: print(text, flush=True))
    if write is not None:
        write.write_text(json.dumps(record(rows, here.figures), indent=2) + "\n")
        print(f"written: {write}")
    bad = failures(rows)
    print(f"{len(bad)} of {len(rows)} checks did not hold: {', '.join(bad)}" if bad else f"{len(rows)} checks, none failed")
    return 1 if bad else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of checks, with commas or blanks between")
    parser.add_argument("--write", type=Path, nargs="?", const=RESULTS, help="record bench/results/gpu.json, or a file")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--order", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.order:
        return obey(json.loads(given.order))
    if given.write == RESULTS and (given.device == "cpu" or given.only):
        parser.error("bench/results/gpu.json has all checks of a GPU: neither --device cpu nor --only goes with it")
    try:
        checks = select(given.only)
    except ValueError as error:
        parser.error(str(error))
    return check_all(checks, given.device, given.write)


if __name__ == "__main__":
    sys.exit(main())
