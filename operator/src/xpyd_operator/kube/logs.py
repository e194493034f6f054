"""What the operator's log lines say beside their message: which service, and which object kopf speaks of.

The lines themselves are the sidecar's (``xpyd_sidecar.process.logs``: one JSON object or one line of text each).
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator
from typing import Literal

from xpyd_sidecar.process import logs

_SUBJECT: contextvars.ContextVar[tuple[str, str] | None] = contextvars.ContextVar("subject", default=None)
_KOPF = ("k8s_skip", "k8s_ref", "settings")
"""What kopf hangs on its records for its own handlers."""


@contextlib.contextmanager
def log_subject(namespace: str, service: str) -> Iterator[None]:
    """Every line logged inside, also by tasks begun inside, names this service."""
    token = _SUBJECT.set((namespace, service))
    try:
        yield
    finally:
        _SUBJECT.reset(token)


class Subject(logging.Filter):
    """Adds ``namespace`` and ``service`` (or ``kind`` and ``name`` where kopf speaks of another object)."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always true."""
        fields = record.__dict__
        reference = fields.get("k8s_ref")
        subject = _SUBJECT.get()
        if isinstance(reference, dict):
            fields.setdefault("namespace", reference.get("namespace", ""))
            fields.setdefault("object", f"{reference.get('kind', '')}/{reference.get('name', '')}")
        elif subject is not None:
            fields.setdefault("namespace", subject[0])
            fields.setdefault("service", subject[1])
        for name in _KOPF:
            fields.pop(name, None)
        return True


def configure(level: Literal["debug", "info", "warning", "error"], style: Literal["json", "text"]) -> None:
    """Send every logger's records to stderr. kopf's own are one level quieter: it tells each step of each request."""
    logs.configure(level, style)
    for handler in logging.getLogger().handlers:
        handler.addFilter(Subject())
    if level == "info":
        logging.getLogger("kopf").setLevel(logging.WARNING)
