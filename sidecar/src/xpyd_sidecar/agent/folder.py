"""Whether the folder that engines share is in memory: KV that is written to a disk is neither fast nor gone with them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

MOUNTS: Final = Path("/proc/self/mountinfo")
IN_MEMORY: Final = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_OCTAL = re.compile(r"\\([0-7]{3})")


def trouble(folder: str, mounts: Path = MOUNTS) -> str:
    """What is wrong with it, in words; empty where it is in memory, or where that cannot be told."""
    try:
        kind = file_system(os.path.realpath(folder), mounts.read_text("utf-8", errors="surrogateescape"))
    except OSError:
        return ""
    if not kind or kind in IN_MEMORY:
        return ""
    return (f"kv.sharedMemory.hostPath is on {kind}, not in memory (tmpfs or hugetlbfs): KV of prompts is written to the "
            "node's disk; name a folder in memory, such as /dev/shm/xpyd")


def file_system(path: str, mountinfo: str) -> str:
    """Type of the file system that a path is on (proc(5), ``mountinfo``); empty where no mount holds it.

    A mount hides what was mounted before it at the same place, so the last one of the longest name counts.
    """
    best, kind = "", ""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, types = before.split(" "), after.split(" ")
        if len(fields) < 6 or not types[0]:
            continue
        point = _OCTAL.sub(lambda found: chr(int(found[1], 8)), fields[4])
        inside = point in ("/", path) or path.startswith(f"{point}/")
        if inside and len(point) >= len(best):
            best, kind = point, types[0]
    return kind
