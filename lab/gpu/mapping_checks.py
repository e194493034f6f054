"""Another process's store, mapped here and read by the copy engine: ``memory.mapped_store`` by the connector's own mailbox.

On a CPU a core reads it, which shows the check itself, and the bytes.
"""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from lab.gpu.busy import wait_done
from lab.gpu.cache import Copies
from lab.gpu.children import Child
from lab.gpu.findings import Figures, require
from lab.gpu.host_copies import HostCopies
from lab.gpu.store_peers import shared_memory, take_descriptor, words
from xpyd_sidecar.memory import registration
from xpyd_sidecar.memory.device import DeviceCopies
from xpyd_sidecar.memory.mapped_store import PART_BYTES, MappedStore, Registrar
from xpyd_sidecar.transport.shm.fetch import Mapping
from xpyd_sidecar.transport.shm.mailbox import Mailbox
from xpyd_sidecar.transport.shm.serve import HEAD_BYTES, LABEL

SIZES: Final = {"cuda": 1 << 30, "cpu": PART_BYTES + (16 << 20)}
SPAN: Final = 16 << 20
"""Bytes of a copy whose bytes are looked at, over the end of a part."""
TIMED: Final = 64 << 20
MAPS: Final = Path("/proc/self/maps")
FLAGS: Final = {"plain": 0, "read_only": registration.READ_ONLY, "read_only_io": registration.READ_ONLY | 4}
"""Of cudaHostRegister; 4: memory of a device."""
REGISTER_S: Final = 20.0
CLOSE_S: Final = 1.0
"""In which a store that is given up is let go of."""


def mapped(device: torch.device) -> Figures:
    """Read before CUDA knows of it, registered part by part, read again, also when its owner was killed, and let go of."""
    size = SIZES[device.type]
    copies: Copies = DeviceCopies(device) if device.type == "cuda" else HostCopies()
    copies.prepare(0, TIMED)
    box = Mailbox(None)
    with Child("store_peers", "owner", box.name, str(size)) as owner:
        shown = shared_memory(owner.hear())
        mapping = Mapping(take_descriptor(box, shown.name.hex()), shown)
        box.close()
        figures = _refusals(mapping) if device.type == "cuda" else {}
        return _read(copies, mapping, size, owner, figures)


def _refusals(mapping: Mapping) -> Figures:
    """CUDA's error for each kind of registration of memory that can only be read; 0: it takes it."""
    found = {}
    for name, flags in FLAGS.items():
        found[f"register_{name}"] = registration.register(mapping.base, len(mapping.view), flags)
        if not found[f"register_{name}"]:
            registration.unregister(mapping.base)
    return found


def _read(copies: Copies, mapping: Mapping, size: int, owner: Child, figures: Figures) -> Figures:
    device_copies: Any = copies
    registrar = Registrar(device_copies)
    store = MappedStore(mapping.view, registrar)
    whole = len(mapping.view)
    figures = figures | {"gb_s_unregistered": _speed(copies, store, size)}
    right = {"before CUDA knows of it": _right(copies, store)}
    began = time.monotonic()
    registrar.start()
    while store.registered_bytes < whole and not registrar.refused and time.monotonic() - began < REGISTER_S:
        time.sleep(0.001)
    figures |= {"registered_s": round(time.monotonic() - began, 3), "registered_mib": store.registered_bytes >> 20,
                "refused": registrar.refused, "gb_s_registered": _speed(copies, store, size)}
    known = store.registered_bytes
    right["registered"] = _right(copies, store)
    owner.kill()
    right["when its owner was killed"] = _right(copies, store)
    closed, at = threading.Event(), f"{mapping.base:x}-"

    def let_go() -> None:
        mapping.close()
        closed.set()

    began = time.monotonic()
    store.close(let_go)
    ended = closed.wait(REGISTER_S)
    figures |= {"closed_s": round(time.monotonic() - began, 3)}
    registrar.stop()
    left = [line for line in MAPS.read_text().splitlines() if line.startswith(at) and LABEL in line]
    return require(figures, *(f"other bytes have come {when}" for when, well in right.items() if not well),
                   f"{known} of {whole} bytes are registered, CUDA's error {registrar.refused}" if known < whole else None,
                   None if ended and figures["closed_s"] <= CLOSE_S else f"it is let go of after {figures['closed_s']} s",
                   "it is still mapped" if left else None)


def _right(copies: Copies, store: MappedStore) -> bool:
    """Whether bytes over the end of a part come as they are."""
    begin = PART_BYTES - SPAN // 2
    spans, into = [], 0
    for part in store.parts(begin, SPAN):
        spans.append((part, into))
        into += len(part)
    wait_done(copies.bring(spans))
    found = copies.ring_range(0, SPAN).cpu().numpy().view(np.uint64)
    return bool(np.array_equal(found, words(begin - HEAD_BYTES, SPAN)))


def _speed(copies: Copies, store: MappedStore, size: int) -> float:
    """GB/s of copies from the begin on, the median."""
    times = []
    for nth in range(6):
        offset = nth * TIMED % (size - TIMED + 1)
        began = time.perf_counter()
        wait_done(copies.bring([(part, 0) for part in store.parts(offset, TIMED)]))
        times.append(time.perf_counter() - began)
    return round(TIMED / statistics.median(times[1:]) / 1e9, 2)
