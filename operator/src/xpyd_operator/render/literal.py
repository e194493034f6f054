"""Escaping of text that Kubernetes must pass to a container unchanged.

In ``command``, ``args`` and the values of ``env`` Kubernetes replaces ``$(NAME)`` by the value of that variable, if there
is one, and ``$$`` by one ``$``; any other ``$`` stays. So a text in which every ``$`` is doubled arrives unchanged
(https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/).
"""

from __future__ import annotations

from typing import Any


def literal(text: str) -> str:
    """Return the text with every ``$`` doubled, so that Kubernetes expands nothing in it."""
    return text.replace("$", "$$")


def literals(value: Any) -> Any:
    """Return a copy of ``value`` with ``literal`` applied to every text in it, but for keys; tuples become lists."""
    if isinstance(value, str):
        return literal(value)
    if isinstance(value, dict):
        return {key: literals(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [literals(one) for one in value]
    return value
