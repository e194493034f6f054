"""Reading the status of a pod: conditions, times, last words. Pure, and the same for every kind of pod."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

Body = dict[str, Any]
WORDS_MAX = 500


def condition(status: Body, kind: str) -> Body | None:
    """One of the pod's conditions."""
    return next((each for each in status.get("conditions") or () if each.get("type") == kind), None)


def node_lost(status: Body) -> bool:
    """The pod's node does not answer. Kubernetes then calls a pod that was ready not ready, and leaves what the kubelet
    said of its containers; a kubelet says both alike, or names the gate that is not. A pod that was not ready is not
    marked: it is deleted after five minutes.
    """
    ready, containers = (condition(status, kind) or {} for kind in ("Ready", "ContainersReady"))
    marked = ready.get("status") == "False" and containers.get("status") == "True" and not ready.get("reason")
    return marked or status.get("reason") == "NodeLost"


def has_ended(status: Body) -> bool:
    """Whether the pod has ended, and never runs again."""
    return status.get("phase") in ("Failed", "Succeeded")


def unix(text: str | None) -> float:
    """A time as Kubernetes writes it, in unix seconds; 0 where there is none."""
    if not text:
        return 0.0
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def clock(when: float) -> str:
    """A time in words that stay the same from round to round."""
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def last_line(text: str | None) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return lines[-1][:WORDS_MAX] if lines else ""
