"""Every process of a service, found without knowing its instances: the proof that nothing is left, and the last resort.

The mark in the environment finds most. vLLM's engine core and workers overwrite theirs with a title, so the sessions of all
units that have a record are looked at too, also of instances that are gone (their records lie under ``previous/``).
"""

from __future__ import annotations

from xpyd_operator.local import procs
from xpyd_operator.local.paths import ServiceFolder, matching
from xpyd_operator.local.procs import Stat
from xpyd_operator.local.units import Unit


def processes(folder: ServiceFolder) -> list[Stat]:
    """Every living process of the service, by process id."""
    scan = procs.Scan()
    found = {stat.pid: stat for unit in _units(folder) for stat in unit.processes(scan)}
    return [found[pid] for pid in sorted(found)]


def pids(folder: ServiceFolder) -> list[int]:
    """Their process ids."""
    return [stat.pid for stat in processes(folder)]


async def end(folder: ServiceFolder) -> None:
    """Kill them all.

    Raises:
        LocalError: one does not end.
    """
    for unit in _units(folder):
        await unit.kill()


def _units(folder: ServiceFolder) -> list[Unit]:
    everything = Unit("everything", folder.path, folder.marker())
    records = [
        *matching(folder.router, "*.pid"),
        *matching(folder.instances, "*/*.pid"),
        *matching(folder.path / "previous", "*/*.pid"),
    ]
    return [everything, *(Unit(record.stem, record.parent, folder.marker()) for record in records)]
