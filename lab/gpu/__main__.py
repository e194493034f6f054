"""``check-gpu``: what xpyd does on a GPU, on a machine with torch and CUDA but without vLLM and without a registry.

    python -m lab check-gpu [--wheels FOLDER] [--only NAMES] [--write] [--device cpu]

Each check is a process of its own with a deadline; after one that fails the next runs. ``--wheels`` names a folder that
``python -m lab extras gpu-wheels`` has filled, ``--write`` records bench/results/gpu.json, ``--device cpu`` tries the
checks themselves. Exit code: 0 all held, but for faults that are known; 1 something did not, or there is no GPU.
docs/development/gpu.md says what each check shows.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_runner import Check, Outcome, failed, line, run, run_all, told
from gpu_seen import LeftOutError, NotHeldError
from gpu_wheels import install

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results/gpu.json"
MACHINE = Check("machine", "gpu_machine:machine", 180)
CHECKS = (
    Check("copies-out", "gpu_copies:copies_out", 120),
    Check("copies-in", "gpu_copies:copies_in", 120),
    Check("marks", "gpu_copies:marks", 120),
    Check("kept", "gpu_copies:kept", 120),
    Check("strided", "gpu_costs:strided", 120),
    Check("costs", "gpu_costs:costs", 120),
    Check("beside", "gpu_costs:beside", 120),
    Check("graph-beside", "gpu_graphs:capture_beside", 120),
    Check("graph-whole", "gpu_graphs:capture_whole", 120),
    Check("shared", "gpu_host:shared_memory", 120),
    *(Check(f"link-{size}k", "gpu_link_checks:link", 180, (size << 10,)) for size in (16, 64, 256, 1024)),
    Check("aborts", "gpu_group_checks:aborts", 60),
    Check("both-ways", "gpu_group_checks:both_ways", 120),
)


def obey(order: Mapping[str, Any]) -> int:
    """Be a check's process: run it and leave what it says in a file."""
    module, _, name = order["run"].partition(":")
    device: Any = order["device"]
    said: dict[str, Any] = {}
    if module != MACHINE.run.partition(":")[0]:
        torch = importlib.import_module("torch")
        device = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        said["no_device"] = device.type == "cpu"
    try:
        said["figures"] = getattr(importlib.import_module(module), name)(device, *order["arguments"])
    except NotHeldError as error:
        said |= {"figures": error.figures, "why": str(error)}
    except LeftOutError as error:
        said["left_out"] = str(error)
    Path(order["result"]).write_text(json.dumps(said))
    return 0


def chosen(only: str) -> tuple[Check, ...]:
    """The checks that are asked for.

    Raises:
        ValueError: there is no such check.
    """
    names = only.replace(",", " ").split()
    if unknown := [name for name in names if name not in {check.name for check in CHECKS}]:
        raise ValueError(f"no such check: {', '.join(unknown)}; there are: {', '.join(check.name for check in CHECKS)}")
    return tuple(check for check in CHECKS if not names or check.name in names)


def environment(target: Path | None) -> dict[str, str]:
    """For the checks: the connector's sources, and what the wheels hold, before what the machine has."""
    first = [str(path) for path in (target, ROOT / "sidecar/src") if path is not None]
    rest = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.environ | {"PYTHONPATH": os.pathsep.join([*first, *rest])}


def check_all(checks: Sequence[Check], device: str, target: Path | None, *, write: bool) -> int:
    """Say what machine it is, then check; the exit code."""
    environ = environment(target)
    command = (sys.executable, str(Path(__file__).parent))
    machine = run(MACHINE, device, command, environ)
    if machine.outcome is Outcome.BAD:
        sys.stdout.write(f"check-gpu: {machine.why}; nothing was checked\n")
        return 1
    print(line(machine), flush=True)
    rows = run_all(checks, device, environ=environ, command=command, say=lambda text: print(text, flush=True))
    if write:
        RESULTS.write_text(json.dumps(told(rows, machine.figures, datetime.now(UTC).date().isoformat()), indent=2) + "\n")
        print(f"written: {RESULTS.relative_to(ROOT)}")
    bad = failed(rows)
    print(f"{len(bad)} of {len(rows)} checks did not hold: {', '.join(bad)}" if bad else f"{len(rows)} checks, none failed")
    return 1 if bad else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, which the extra gpu-wheels downloads")
    parser.add_argument("--only", default="", help="names of checks, with commas or blanks between")
    parser.add_argument("--write", action="store_true", help="record bench/results/gpu.json")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--order", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.order:
        return obey(json.loads(given.order))
    if given.write and (given.device == "cpu" or given.only):
        parser.error("--write records all checks of a GPU: neither --device cpu nor --only goes with it")
    try:
        checks = chosen(given.only)
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="xpyd-gpu-") as folder:
        target = Path(folder) if given.wheels is not None else None
        if target is not None and (wrong := install(given.wheels, target)):
            sys.stdout.write(f"check-gpu: {wrong}; nothing was checked\n")
            return 1
        return check_all(checks, given.device, target, write=given.write)


if __name__ == "__main__":
    sys.exit(main())
