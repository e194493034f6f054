"""Finds the peer that has been silent for too long."""

from __future__ import annotations

from collections.abc import Iterable


class PeerWatch:
    """When each peer was last heard, in seconds of a monotonic clock."""

    def __init__(self, peers: Iterable[int], now: float, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._heard = dict.fromkeys(peers, now)
        self._looked = now

    def on_frame(self, peer: int, now: float) -> None:
        """A frame of ``peer`` has come at ``now``."""
        self._heard[peer] = now

    def silent(self, now: float) -> tuple[int, float] | None:
        """A peer that has been silent for longer than the timeout, and for how long; None if there is none.

        Must be called often. A gap between two calls is time in which this process itself stood still and could hear
        nobody: a second of each gap counts, the rest is given back to all peers.
        """
        stood = max(0.0, now - self._looked - 1.0)
        self._looked = now
        if stood:
            self._heard = {peer: at + stood for peer, at in self._heard.items()}
        for peer, at in self._heard.items():
            if now - at > self._timeout_s:
                return peer, now - at
        return None
