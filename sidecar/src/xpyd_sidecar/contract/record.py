"""The file by which an engine's connector makes itself known to the agent beside it.

``<run dir>/engine-<dp rank>.json``, written atomically once the control socket listens. A new incarnation replaces the
file; a stale one does no harm, since the agent calls an engine ready only when its HTTP health check passes too.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from xpyd_sidecar.contract.fingerprint import FingerprintFields
from xpyd_sidecar.contract.ids import HostPort, Incarnation
from xpyd_sidecar.contract.membership import Parallel, Sampling
from xpyd_sidecar.contract.speculation import Speculation

VERSION = 1
FIRST_KV = "1.3.1"
"""What engines of releases speak that did not say it (``EngineRecord.kv``)."""


class EngineRecord(msgspec.Struct, frozen=True):
    """What the connector of one DP rank says of its engine."""

    v: int
    dp_rank: int
    incarnation: Incarnation
    control: HostPort
    fingerprint: FingerprintFields
    parallel: Parallel
    max_model_len: int
    """Tokens."""
    pid: int
    started_unix: float
    sampling: Sampling | None = None
    """None: not told."""
    kv: str = FIRST_KV
    """Versions of the KV plane that it speaks (``kv.versions``)."""
    speculation: Speculation = Speculation()


def path_of(run_dir: Path, dp_rank: int) -> Path:
    """Where the record of one DP rank is."""
    return run_dir / f"engine-{dp_rank}.json"


def write(run_dir: Path, record: EngineRecord) -> None:
    """Write atomically: a reader sees the old record or the new one, never half."""
    target = path_of(run_dir, record.dp_rank)
    temporary = target.with_suffix(f".tmp{os.getpid()}")
    temporary.write_bytes(msgspec.json.encode(record))
    os.replace(temporary, target)


def read(run_dir: Path, dp_rank: int) -> EngineRecord | None:
    """The record, or None where there is none yet.

    Raises:
        ValueError: the file is no record (names the file and the field).
    """
    path = path_of(run_dir, dp_rank)
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineRecord)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path}: {error}") from None
