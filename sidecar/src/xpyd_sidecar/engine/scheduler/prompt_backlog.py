"""How many tokens of prompts an engine has and has not computed, by what its scheduler does. No clock, no I/O.

    arrives ──▶ all of its prompt is queued ──▶ first step: what is cached or comes from elsewhere is not any more
                                            ──▶ each step: nor is what it computes ──▶ nothing is left, or it ends

Laws
  1. ``queued`` is the sum of what is left of the requests that are there, and never below 0.
  2. ``computed`` only grows, by what steps compute of prompts.
  3. What ends leaves nothing behind. A prompt that is computed again after a preemption is not counted again.
"""

from __future__ import annotations

from collections.abc import Mapping

from xpyd_sidecar.contract.core_steps import PromptWork


class PromptBacklog:
    """Prompt tokens of one engine that wait and run. One thread changes it; what others read are plain values."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}
        """By request, of prompts that are not computed whole."""
        self._cached: dict[str, int] = {}
        """By request: what of its prompt was there when it first ran."""
        self._queued = self._computed = 0

    def arrives(self, name: str, tokens: int) -> None:
        """A request with so many tokens of a prompt that are to be computed here."""
        self._queued += tokens - self._left.get(name, 0)
        self._left[name] = tokens

    def begins(self, name: str, there: int) -> None:
        """A request runs for the first time, with so many tokens there already. Called before ``runs``."""
        left = self._left.get(name)
        if left is not None:
            self._cached[name] = there
            self._set(name, left, max(0, left - there))

    def runs(self, scheduled: Mapping[str, int]) -> None:
        """A step computes so many tokens of each request."""
        if not self._left:
            return  # an engine that decodes: nearly always
        for name, tokens in scheduled.items():
            left = self._left.get(name)
            if left is not None:
                self._computed += min(left, tokens)
                self._set(name, left, left - min(left, tokens))

    def remove(self, name: str) -> int:
        """Forget a request that has ended. Returns the tokens of its prompt that were there when it first ran.

        -1: it never ran, or was not counted.
        """
        self._queued -= self._left.pop(name, 0)
        return self._cached.pop(name, -1)

    @property
    def prompt_work(self) -> PromptWork:
        """The prompt tokens that wait and run now."""
        return PromptWork(self._queued, self._computed)

    def _set(self, name: str, before: int, left: int) -> None:
        self._queued -= before - left
        if left:
            self._left[name] = left
        else:
            del self._left[name]
