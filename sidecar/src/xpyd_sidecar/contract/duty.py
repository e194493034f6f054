"""What an engine is for at present, as the agent beside it tells: ``<run dir>/duty.json``.

Written whole by the agent whenever it changes, read by the connector's scheduler side (``engine.worker_rpc``). An engine
serves both kinds of legs whatever stands there; it tells which memory is of use.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from xpyd_sidecar.contract import run_folder
from xpyd_sidecar.contract.ids import Role

FILE = "duty.json"


class EngineRole(msgspec.Struct, frozen=True):
    """What an engine is for at present. Fields that are not known are ignored."""

    role: Role
    epoch: int
    draining: bool = False


def write(run_dir: Path, duty: EngineRole) -> None:
    """Write the file, so that it is there whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    run_folder.write(run_dir / FILE, duty)


def read(run_dir: Path) -> EngineRole | None:
    """What stands in the file; None where there is none.

    Raises:
        ValueError: what stands there is none; names the file and the field.
        OSError: it cannot be read.
    """
    return run_folder.read(run_dir / FILE, EngineRole)
