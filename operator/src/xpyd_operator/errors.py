"""The operator's errors.

    XpydError
    ├── SpecError          a document is wrong: one or more faults, each with the path of its field
    ├── UnsupportedField   valid, but this version or backend cannot do it; says which field and why
    ├── LocalError         the local backend cannot go on (port taken, no state folder …)
    ├── NotFound           no such service or instance
    ├── NotYet             nothing is wrong: what this needs is not there yet
    └── ServiceGone        nothing is wrong: what this is for does not exist any more
"""

from __future__ import annotations

import msgspec


class XpydError(Exception):
    """Root of the tree; its message is fit for a user."""


class Fault(msgspec.Struct, frozen=True, order=True):
    """One thing wrong with a document."""

    path: str
    """Where, e.g. ``spec.decode.replicas``."""
    message: str
    """What is wrong and what would be right."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class SpecError(XpydError):
    """A document is wrong."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = faults


class UnsupportedField(XpydError):
    """A field whose value is valid, but that this version or backend cannot do."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path


class LocalError(XpydError):
    """The local backend cannot go on."""


class NotFound(XpydError):
    """No such service or instance."""


class NotYet(XpydError):
    """Something is not made yet, since what it needs is not there; the message says what lacks."""


class ServiceGone(XpydError):
    """The service does not exist any more, or is being deleted: nothing may be written for it."""
