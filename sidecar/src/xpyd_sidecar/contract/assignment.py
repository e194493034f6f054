"""The role that an instance is told to have, where it stands and how agent and operator write it.

An assignment is one text, so that role and epoch are never read half old and half new:

    annotation ``xpyd.dev/assignment`` of the pod ──▶ file of a downward API volume     durable, seconds to minutes late
    ``POST /role`` of the agent, a signed call ──▶ ``role.json`` in its run folder              at once

Of several the one with the highest epoch holds. The epoch that an instance begins with is 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from xpyd_sidecar.contract import run_folder
from xpyd_sidecar.contract.ids import Role

FIRST_EPOCH = 1
KEPT = "role.json"
"""File in the run folder: what the agent was told last, so that a restart does not take it back."""
PATH = "/role"
"""Of the agent's endpoint."""
MOST_BYTES = 4096


class Assignment(msgspec.Struct, frozen=True):
    """Which role, and since when. Fields that are not known are ignored, as on the wire."""

    role: Role
    epoch: Annotated[int, msgspec.Meta(ge=1)]
    """Grows by one with each change of the role."""
    at: float = 0.0
    """When it was decided, unix seconds."""


def encode(assignment: Assignment) -> str:
    """The text of an assignment."""
    return msgspec.json.encode(assignment).decode()


def decode(text: str | bytes) -> Assignment:
    """An assignment from its text.

    Raises:
        ValueError: it is none; the message names the field.
    """
    try:
        return msgspec.json.decode(text, type=Assignment)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not an assignment of a role: {error}") from None


def read(path: Path) -> Assignment | None:
    """The assignment in a file; None where the file is missing or empty.

    Raises:
        ValueError: what stands there is none.
        OSError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES)
    except FileNotFoundError:
        return None
    return decode(raw) if raw.strip() else None


def keep(run_dir: Path, assignment: Assignment) -> None:
    """Write it into the run folder, so that it is there whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    run_folder.put(run_dir / KEPT, encode(assignment).encode())
