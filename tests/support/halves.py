"""Instances of two pods of which one has what the other lacks: a place, or its admission."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from kube_client import Object
from kube_watched import label
from node_agent import INSTANCE, SERVICE


class Halves:
    """For how long an instance was half, at most."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._since: dict[str, float] = {}

    def look(self, having: Iterable[Object]) -> None:
        """Once more, with the pods that have it; pods of instances of one are left out. Call it often."""
        now = time.monotonic()
        counts = Counter(f"{label(pod, SERVICE)}/{label(pod, INSTANCE)}" for pod in having if label(pod, INSTANCE))
        self._since = {name: self._since.get(name, now) for name, count in counts.items() if count == 1}
        self.longest_s = max([self.longest_s, *(now - since for since in self._since.values())])
