"""GPUs of this host, and which of them an instance gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from xpyd_operator.api.devices import devices
from xpyd_operator.api.roles import RoleSpec

NVIDIA = Path("/proc/driver/nvidia/gpus")
NVIDIA_KEYS = "nvidia.com/"


def count(folder: Path = NVIDIA) -> int:
    """How many GPUs this host has."""
    try:
        return sum(1 for _ in folder.iterdir())
    except OSError:
        return 0


def assign(spec: RoleSpec, gpus: int, taken: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The least used GPUs for one more instance; none where there are none or the role asks for none.

    Instances share a GPU when there are fewer than they ask for: whether they fit is said by
    ``--gpu-memory-utilization``, which is the user's on a single host.
    """
    found = devices(spec)
    if not gpus or not (found.claimed or any(key.startswith(NVIDIA_KEYS) for key in found.keys)):
        return ()
    used = Counter(index for devices in taken for index in devices)
    order = sorted(range(gpus), key=lambda index: (used[index], index))
    return tuple(sorted(order[: spec.parallelism.devices]))


def shares(found: tuple[int, ...], members: int) -> list[tuple[int, ...]]:
    """Equal shares for the members of an instance. Where there are too few each gets all, and vLLM says what it lacks."""
    each = len(found) // members
    if not each or len(found) % members:
        return [found] * members
    return [found[index * each : (index + 1) * each] for index in range(members)]
