"""What an engine is for at present, as the agent beside it tells: ``<run dir>/duty.json``.

Written whole by the agent whenever it changes, read by the connector's scheduler side (``engine.worker_rpc``). An engine
serves both kinds of legs whatever stands there; it tells which memory is of use.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from xpyd_sidecar.contract.ids import Role

FILE = "duty.json"


class Duty(msgspec.Struct, frozen=True):
    """Fields that are not known are ignored."""

    role: Role
    epoch: int
    draining: bool = False


def write(run_dir: Path, duty: Duty) -> None:
    """Write it, so that it is there whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    temporary = run_dir / f"{FILE}.{os.getpid()}"
    temporary.write_bytes(msgspec.json.encode(duty))
    temporary.replace(run_dir / FILE)


def read(run_dir: Path) -> Duty | None:
    """What stands there; None where nobody has said anything.

    Raises:
        ValueError: what stands there is none; names the file and the field.
        OSError: it cannot be read.
    """
    path = run_dir / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Duty)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from None
