"""The file by which an engine's connector makes itself known to the agent beside it.

``<run dir>/engine-<dp rank>.json``, written atomically once the control socket listens. A new incarnation replaces the
file; a stale one does no harm, since the agent calls an engine ready only when its HTTP health check passes too.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from xpyd_sidecar.contract import run_folder
from xpyd_sidecar.contract.fingerprint import FingerprintFields
from xpyd_sidecar.contract.ids import HostPort, Incarnation
from xpyd_sidecar.contract.membership import Parallel, Sampling
from xpyd_sidecar.contract.speculation import Speculation

VERSION = 1


class EngineRecord(msgspec.Struct, frozen=True):
    """What the KV connector of one data-parallel rank says of its engine. ``v`` is ``VERSION`` of its writer."""

    v: int
    dp_rank: int
    incarnation: Incarnation
    control: HostPort
    fingerprint: FingerprintFields
    parallel: Parallel
    max_model_len: int
    """Tokens."""
    pid: int
    kv: str
    """Versions of the KV plane that it speaks (``kv.peers.SPOKEN``)."""
    sampling: Sampling | None = None
    """None: not told."""
    speculation: Speculation = Speculation()


def path_of(run_dir: Path, dp_rank: int) -> Path:
    """Return the path of the record of one data-parallel rank."""
    return run_dir / f"engine-{dp_rank}.json"


def write(run_dir: Path, record: EngineRecord) -> None:
    """Write the record atomically: a reader sees the old one or the new one, never half.

    Raises:
        OSError: the file cannot be written.
    """
    run_folder.write(path_of(run_dir, record.dp_rank), record)


def read(run_dir: Path, dp_rank: int) -> EngineRecord | None:
    """Return the record of one data-parallel rank, of whatever version; None where there is no file yet.

    Raises:
        ValueError: the file is no record; the message names the file and the field.
        OSError: the file cannot be read.
    """
    return run_folder.read(path_of(run_dir, dp_rank), EngineRecord)
