"""A snapshot as a table for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from xpyd_operator.local.view import InstanceView, Snapshot

_COLOURS = {"ready": "green", "crashed": "red", "starting": "yellow"}
_LEAVING = "cyan"


def headline(snapshot: Snapshot) -> str:
    """``qwen: 1P3D wanted, 1P2D ready · http://127.0.0.1:10001 · model qwen``."""
    status = snapshot.status
    parts = [f"{snapshot.service}: {status.wanted} wanted, {status.ready} ready", snapshot.url, f"model {snapshot.model}"]
    if snapshot.requests_total:
        parts.append(f"{snapshot.requests_total} requests, {snapshot.requests_failed} failed")
    return " · ".join(parts)


def notes(snapshot: Snapshot) -> list[str]:
    """What else should be known, in words."""
    lines = []
    if snapshot.stopping:
        lines.append("The service is being stopped.")
    if not snapshot.runs:
        lines.append("Nothing of it runs; `xpyd up` starts it.")
    elif not snapshot.supervisor:
        lines.append("No supervisor runs: what serves goes on, but nothing is restarted or changed. `xpyd up` takes over.")
    if snapshot.status.plan:
        lines.append(f"Plan: {snapshot.status.plan}")
    lines += [f"{c.type}: {c.message}" for c in snapshot.status.conditions if c.type == "Degraded" and c.status == "True"]
    lines += [f"{c.type}: {c.status}, {c.message}" for c in snapshot.status.conditions
              if c.type in ("Disaggregating", "AdaptersLoaded") and c.status != "Unknown"]
    if not snapshot.ready and snapshot.runs:
        lines += [f"Not ready: {c.message}" for c in snapshot.status.conditions if c.type == "Ready"]
    return lines


def render(snapshot: Snapshot) -> RenderableType:
    """Headline, table, notes."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("INSTANCE", "ROLE", "STATE", "LOAD", "ADDRESS", "UPTIME", "RESTARTS", ""):
        table.add_column(name, overflow="fold")
    rows = (*((snapshot.router,) if snapshot.router else ()), *snapshot.instances)
    for view in rows:
        note = view.progress or view.problem or ("joined by hand" if view.joined else "")
        table.add_row(
            view.name,
            view.role,
            Text(view.state, _COLOURS.get(view.state, _LEAVING)),
            load(view),
            view.address,
            duration(view.uptime_s) if view.uptime_s else "-",
            str(view.restarts) if not view.joined else "-",
            Text(note),
        )
    lines = [Text(line) for line in notes(snapshot)]
    return Group(Text(headline(snapshot), "bold"), *((table,) if rows else ()), *lines)


def load(view: InstanceView) -> str:
    """``2 running, 1 waiting, KV 12 %``; empty for a router."""
    if view.role == "router":
        return "-"
    parts = [f"{view.load.running} running"]
    if view.load.waiting:
        parts.append(f"{view.load.waiting} waiting")
    if view.load.transfers:
        parts.append(f"{view.load.transfers} transfers")
    drafts = view.load.drafts
    if drafts is not None and drafts.drafted:
        parts.append(f"{drafts.accepted / drafts.drafted * 100:.0f} % of drafts accepted")
    return ", ".join([*parts, f"KV {view.load.kv_usage * 100:.0f} %"])


def duration(seconds: float) -> str:
    """``42s``, ``3m10s``, ``5h02m``, ``3d4h``."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600}h"
