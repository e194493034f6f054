"""Text that Kubernetes must hand over as it is.

In ``command``, ``args`` and the values of ``env`` it puts the value of a variable in place of ``$(NAME)`` and one ``$`` in
place of ``$$``; any other ``$`` stays. So with every ``$`` doubled, each text arrives unchanged
(https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/).
"""

from __future__ import annotations

from typing import Any


def literal(text: str) -> str:
    """The text, so written that nothing in it is expanded."""
    return text.replace("$", "$$")


def literals(value: Any) -> Any:
    """The same for every text inside lists and dictionaries; keys are ours and stay."""
    if isinstance(value, str):
        return literal(value)
    if isinstance(value, dict):
        return {key: literals(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [literals(one) for one in value]
    return value
