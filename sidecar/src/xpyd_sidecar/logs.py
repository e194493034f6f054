"""Logging of the sidecar: one JSON object, or one line of text, per event.

Belongs here: the two formatters and the set-up of the root logger. Parts log through ``logging.getLogger(__name__)`` and
pass what a reader wants to filter by as ``extra``: ``logger.info("pushed", extra={"transfer": id, "peer": name})``.

JSON fields: ``time`` (UTC, ISO 8601, milliseconds), ``level``, ``logger``, ``message``, those given to ``configure``
(service, instance), those of ``extra``, and ``exception`` (the traceback) where there is one. A field of ``extra`` never
replaces one of the first four.
"""

from __future__ import annotations

import logging
import sys
import time
from functools import lru_cache
from typing import Literal, TextIO

import msgspec

_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}


def configure(level: Literal["debug", "info", "warning", "error"], style: Literal["json", "text"],
              stream: TextIO | None = None, **fields: str) -> None:
    """Send every logger's records to ``stream`` (stderr by default), with ``fields`` on each."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(fields) if style == "json" else TextFormatter(fields))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # What no line shows need not be found out for each.
    logging.logThreads = logging.logMultiprocessing = logging.logProcesses = False
    logging._srcfile = None  # the way that logging's own documentation gives to leave out file and line
    root.setLevel(level.upper())
    for noisy in ("aiohttp.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def extra_of(record: logging.LogRecord) -> dict[str, object]:
    """What the caller passed as ``extra``."""
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """One JSON object per record; values that JSON does not know are written with ``str``."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        own: dict[str, object] = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            own["exception"] = self.formatException(record.exc_info)
        return _encode(own | {k: v for k, v in {**self._fields, **extra_of(record)}.items() if k not in own}).decode()


class TextFormatter(logging.Formatter):
    """For people: time, level, instance, message, then ``name=value`` of ``extra``."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__()
        self._who = fields.get("instance", "")

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, and its traceback below."""
        who = f" {self._who}" if self._who else ""
        values = "".join(f" {name}={value}" for name, value in extra_of(record).items())
        line = f"{_utc(record)} {record.levelname:7}{who} {record.name}: {record.getMessage()}{values}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _utc(record: logging.LogRecord) -> str:
    return f"{_second(int(record.created))}.{int(record.msecs):03d}Z"


@lru_cache(maxsize=4)
def _second(unix: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix))


_encode = msgspec.json.Encoder(enc_hook=str).encode
