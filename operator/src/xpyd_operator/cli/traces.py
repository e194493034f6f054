"""Traces, models and results as files, for ``xpyd simulate`` and ``xpyd bench``."""

from __future__ import annotations

import argparse
import gzip
import math
from pathlib import Path

import msgspec

from xpyd_operator.api.durations import seconds
from xpyd_operator.errors import XpydError
from xpyd_operator.simulation.engine import EngineModel
from xpyd_operator.simulation.hardware import PRESETS, preset
from xpyd_operator.simulation.trace import Trace, Unit, read


def load_trace(name: str, unit: Unit | None = None) -> Trace:
    """A trace from a file, packed or not; ``unit``: of numbers that are times, where its form does not tell.

    Raises:
        XpydError: it cannot be read, or a line is wrong.
    """
    path = Path(name)
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            return read(lines, name, unit)
    except UnicodeDecodeError as error:
        raise XpydError(f"{name}: byte {error.start} is no text in UTF-8; a trace is CSV or JSON lines, packed with gzip "
                        "or not") from None
    except (OSError, EOFError) as error:
        raise XpydError(f"{name}: {getattr(error, 'strerror', None) or error}") from None


def load_model(name: str) -> EngineModel:
    """A preset by its name, or a model from a JSON file.

    Raises:
        XpydError: there is none, or a field is wrong.
    """
    if name in PRESETS or not Path(name).exists():
        return preset(name)
    try:
        return msgspec.json.decode(Path(name).read_bytes(), type=EngineModel)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise XpydError(f"{name}: {error}") from None


def write(name: str, raw: bytes) -> None:
    """A result.

    Raises:
        XpydError: it cannot be written.
    """
    try:
        Path(name).write_bytes(raw)
    except OSError as error:
        raise XpydError(f"{name}: {error.strerror}") from None


def duration(text: str) -> float:
    """Seconds.

    Raises:
        XpydError: it is none; says what would be.
    """
    try:
        return seconds(text)
    except ValueError as error:
        raise XpydError(str(error)) from None


def positive(text: str) -> float:
    """An argument: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: write a number above 0")
    return value
