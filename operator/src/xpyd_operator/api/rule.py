"""What a rule across fields is. The rules themselves are in the modules ``rules_…``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

import msgspec

Finding = tuple[str, str]
"""Path below the rule's section (empty: the section itself), and what is wrong and what would be right."""


class Target(StrEnum):
    """Where a service is to run."""

    KUBERNETES = "kubernetes"
    LOCAL = "local"


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule: ``wrong`` in Python and ``cel`` for the API server say the same about one section of the spec."""

    at: tuple[str, ...]
    """Sections that it holds for, e.g. ``spec.prefill``."""
    reads: tuple[str, ...]
    """Fields it looks at, below the section. When one of them is itself faulty, the rule is not asked."""
    says: str
    """Message of the CEL rule."""
    tells: str = ""
    """CEL for a message that names what is wrong, over what ``cel`` is over; ``says`` stands in where it is empty or fails.
    Of functions it has only CEL's own, and its texts are literal, so that its cost is bounded."""
    cel: str = ""
    """CEL over the section (``self``), true when all is well; empty when there is no twin."""
    cel_at: str = ""
    """Field below the section where the CEL rule stands, for rules over a list."""
    wrong: Callable[[Any], Iterable[Finding]]
    """The findings; none when all is well."""
    target: Target | None = None
    """Set: holds for this target only."""
    no_twin: str = ""
    """Why there is no CEL twin."""


def finding_if(condition: bool, path: str, message: str) -> list[Finding]:
    """One finding where ``condition`` holds, or none."""
    return [(path, message)] if condition else []
