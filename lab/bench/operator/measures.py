"""What is measured, and how."""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from kube_client import Mirror, Object
from kube_team import is_ready, label
from node_agent import ROLE

POLL_S = 0.02
_BUCKET = re.compile(r'^xpyd_operator_reconcile_seconds_bucket\{le="([^"]+)"\} (\S+)$')
Buckets = list[tuple[float, float]]


class Timeline:
    """Counts of engine pods over the seconds since it began, from the events of a watch."""

    def __init__(self, pods: Mirror, services: Mirror) -> None:
        self.made = 0
        self.ready = 0
        self.there = 0
        self._pods = pods
        self._services = services
        self._began = time.monotonic()
        self._points: list[tuple[float, int, int]] = [(0.0, 0, 0)]
        pods.listeners.append(self._on_pod)

    @property
    def serving(self) -> int:
        """Services that say Ready."""
        return sum(any(each["type"] == "Ready" and each["status"] == "True" for each in
                       (service.get("status") or {}).get("conditions", ())) for service in self._services.objects.values())

    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    async def wait(self, condition: Callable[[], bool], what: str, deadline_s: float) -> float:
        """Until it holds; when that was."""
        end = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"not within {deadline_s:.0f} s: {what} ({self.there} there, {self.ready} ready)")
            await asyncio.sleep(POLL_S)
        return self.now()

    def lines(self) -> dict[str, list[tuple[float, float]]]:
        """For a chart: existing and ready pods over time."""
        return {"exist": [(at, float(there)) for at, there, _ in self._points],
                "ready": [(at, float(ready)) for at, _, ready in self._points]}

    def close(self) -> None:
        """Count no more."""
        self._pods.listeners.remove(self._on_pod)

    def _on_pod(self, was: Object | None, now: Object | None) -> None:
        pod = now or was
        if pod is None or not label(pod, ROLE):
            return
        self.made += was is None
        self.there += (now is not None) - (was is not None)
        self.ready += (now is not None and is_ready(now)) - (was is not None and is_ready(was))
        self._points.append((self.now(), self.there, self.ready))


def rounds(metrics: str) -> Buckets:
    """The operator's own histogram of its rounds: upper bound in seconds, and how many were faster."""
    found = [(float(match[1]), float(match[2])) for match in map(_BUCKET.match, metrics.splitlines()) if match]
    if not found:
        raise ValueError("the operator shows no histogram of its rounds")
    return sorted(found)


def quantile_ms(before: Buckets, after: Buckets, share: float = 0.99) -> float:
    """The quantile of the rounds between two looks, milliseconds, linear within a bucket (as Prometheus does it)."""
    counts = [(bound, now - then) for (bound, now), (_, then) in zip(after, before, strict=True)]
    rank = share * counts[-1][1]
    if not counts[-1][1]:
        raise ValueError("there was no round in between")
    lower, below = 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            if math.isinf(bound):
                return lower * 1000
            return (lower + (bound - lower) * (rank - below) / (count - below)) * 1000
        lower, below = bound, count
    raise ValueError("a histogram ends with +Inf")


def peak_rss_mib(pid: int) -> float:
    """Most memory that a process ever had."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_load() -> float:
    """Load average over the last minute."""
    return round(os.getloadavg()[0], 2)
