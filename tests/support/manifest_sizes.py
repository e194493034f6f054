"""How much of prefill's store a manifest stands for."""

from __future__ import annotations

from collections.abc import Sequence

from xpyd_sidecar.kv.array_layout import ArrayLayout
from xpyd_sidecar.kv.extents import round_up
from xpyd_sidecar.kv.manifests import ALIGN, Manifest, layout


def size_of(manifest: Manifest, arrays: Sequence[ArrayLayout]) -> int:
    """Bytes of it.

    Raises:
        ValueError: as of ``layout``.
    """
    last = layout(manifest, arrays)[-1]
    return last.offset + round_up(last.packed.size, ALIGN) - manifest.offset
