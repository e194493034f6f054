"""Whether a draft writes its KV of the prompt before the copies of the step leave, as far as hooks of layers tell.

Prefill's request can use no draft. A vLLM that therefore runs none, or runs it after the step's copies are made, hands over
a KV of the draft that nobody has written: texts stay right, and decode accepts few drafts. So it is said, once. Where a
whole graph runs the layers no hook is called, and nothing is known.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class DraftHooks:
    """Notes which layers' hooks are called in a step, to find a draft model that writes no KV."""

    def __init__(self, layers: frozenset[str]) -> None:
        """``layers``: the draft's."""
        self._layers = layers
        self._called: set[bool] = set()
        """In this step: hooks of the draft's layers (True), of others (False)."""
        self._told = not layers

    def begin(self) -> None:
        """A step begins."""
        self._called.clear()

    def on_layer(self, layer: str) -> None:
        """The hook of ``layer`` is called: its KV has been written."""
        if not self._told:
            self._called.add(layer in self._layers)

    def finish(self, *, pushes: bool) -> None:
        """Copies leave now; ``pushes``: those of a prompt that this step has computed."""
        if not self._told and pushes and self._called == {False}:
            self._told = True
            logger.warning("xpyd: the draft has written no KV in a step of prefill that leaves now: decode will accept few "
                           "drafts (docs/speculation.md)")
