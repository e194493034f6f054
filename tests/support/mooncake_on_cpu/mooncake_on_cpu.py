"""A vLLM plugin for tests: vLLM's connector of Mooncake's store on CPUs, where a step is over when its hooks are called.

Before it saves blocks it waits for an event of CUDA, which a CPU build does not have; here that is none.

    PYTHONPATH=<this folder>      vLLM finds it by its entry point
"""

from __future__ import annotations


class Passed:
    """An event of what has happened."""

    def record(self) -> None:
        """It has."""

    def synchronize(self) -> None:
        """It has."""


def plugin() -> None:
    """What vLLM calls in each process."""
    import torch

    if not torch.cuda.is_available():
        torch.cuda.Event = Passed  # type: ignore[assignment,misc]
