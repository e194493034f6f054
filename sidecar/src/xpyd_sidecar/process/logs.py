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
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, Protocol, TextIO, TypeVar

import msgspec

_T = TypeVar("_T")
_T_contra = TypeVar("_T_contra", contravariant=True)
_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}


MAX_KNOWN = 64
"""Beginnings of lines that are remembered."""


class Form(Protocol[_T_contra]):
    """How lines of one kind are made of what they tell of."""

    def message(self, one: _T_contra) -> str:
        """What the line says."""

    def timestamp(self, one: _T_contra) -> float:
        """The line's time (Unix)."""

    def fields(self, one: _T_contra) -> dict[str, object]:
        """Its fields."""

    def json(self, one: _T_contra) -> str:
        """The same as JSON without braces; at least one."""


def configure(level: Literal["debug", "info", "warning", "error"], style: Literal["json", "text"],
              stream: TextIO | None = None, **fields: str) -> None:
    """Send every logger's records to ``stream`` (stderr by default), with ``fields`` on each."""
    handler: logging.Handler
    if style == "json":
        handler = JsonHandler(stream or sys.stderr, fields)
    else:
        handler = logging.StreamHandler(stream or sys.stderr)
        handler.setFormatter(TextFormatter(fields))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # What no line shows need not be found out for each.
    logging.logThreads = logging.logMultiprocessing = logging.logProcesses = False
    logging._srcfile = None  # the way that logging's own documentation gives to leave out file and line
    root.setLevel(level.upper())
    for noisy in ("aiohttp.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def tell_all(logger: logging.Logger, those: Sequence[_T], form: Form[_T]) -> None:
    """Log what has waited, as ``logger.info(message, extra=fields)`` does of each. Where a JSON line is all that comes of
    it there is no record, and the line has the time of what it tells. Fields have names of their own, as ``extra`` must.
    """
    handler = _lines_alone(logger)
    if handler is None:
        for one in those:
            logger.info("%s", form.message(one), extra=form.fields(one))
    elif logger.isEnabledFor(logging.INFO):
        handler.tell_all(logger.name, those, form)


def _lines_alone(logger: logging.Logger) -> JsonHandler | None:
    """The handler, where a JSON line is all that comes of a record of this logger."""
    handlers = logging.root.handlers
    only = handlers[0] if len(handlers) == 1 else None
    return only if type(only) is JsonHandler and not logger.handlers else None


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


class JsonHandler(logging.StreamHandler[TextIO]):
    """Writes JSON lines, of records and, many at a time, without them: a write costs more than a line."""

    def __init__(self, stream: TextIO, fields: dict[str, str]) -> None:
        super().__init__(stream)
        self._fields = fields
        self._known: dict[tuple[str, str], str] = {}
        """What lines of a logger and message have in common."""
        self.setFormatter(JsonFormatter(fields))

    def tell_all(self, logger: str, those: Sequence[_T], form: Form[_T]) -> None:
        """Lines of level info that have waited."""
        lines = []
        for one in those:
            try:
                words = self._words(logger, form.message(one))
                lines.append(f'{{"time":"{_stamp(form.timestamp(one))}",{words},{form.json(one)}}}\n')
            except Exception as error:  # noqa: BLE001 (a bug here must cost one line's fields, not the other lines)
                words = self._words(logger, "a line could not be made")
                lines.append(f'{{"time":"{_stamp(time.time())}",{words},{_encode(_broken(error)).decode()[1:]}\n')
        self.acquire()
        try:
            self.stream.write("".join(lines))
            self.flush()
        except OSError:  # as the library does: what is logged to is gone, and the router goes on
            self.handleError(logging.LogRecord(__name__, logging.INFO, "", 0, "access lines", (), None))
        finally:
            self.release()

    def _words(self, logger: str, message: str) -> str:
        known = self._known.get((logger, message))
        if known is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            words = {"level": "info", "logger": logger, "message": message, **self._fields}
            known = self._known[logger, message] = _encode(words).decode()[1:-1]
        return known


def _broken(error: Exception) -> dict[str, object]:
    return {"exception": repr(error)}


class TextFormatter(logging.Formatter):
    """For people: time, level, instance, message, then ``name=value`` of ``extra``.

    What is said cannot make a line of its own: all but printable characters are written as escapes, and a traceback is
    indented. So every line that begins with a time is one that was logged.
    """

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__()
        self._who = _printable(fields.get("instance", ""))

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, and its traceback below."""
        who = f" {self._who}" if self._who else ""
        values = "".join(f" {name}={value}" for name, value in extra_of(record).items())
        line = f"{_utc(record)} {record.levelname:7}{who} {_printable(f'{record.name}: {record.getMessage()}{values}')}"
        if not record.exc_info:
            return line
        return "\n  ".join([line, *map(_printable, self.formatException(record.exc_info).splitlines())])


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _utc(record: logging.LogRecord) -> str:
    return _stamp(record.created)


def _stamp(unix: float) -> str:
    second = int(unix)
    return _second(second) + _BEHIND[int((unix - second) * 1000)]


_BEHIND = [f".{number:03d}Z" for number in range(1000)]
"""Of a stamp, by its milliseconds."""


@lru_cache(maxsize=4)
def _second(unix: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix))


_encode = msgspec.json.Encoder(enc_hook=str).encode
