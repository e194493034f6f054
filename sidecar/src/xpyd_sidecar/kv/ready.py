"""What decode asks of a prefill rank with READY: whether that rank has it, and which part of each array is meant."""

from __future__ import annotations

from typing import NamedTuple

from xpyd_sidecar.kv.bodies import Ready
from xpyd_sidecar.kv.mapping import ArrayKind, Cut
from xpyd_sidecar.kv.reach import span_of


class RankArrays(NamedTuple):
    """``regions`` arrays with blocks of ``block_bytes`` together; ``kinds``: of each, where blocks may be cut."""

    regions: int
    block_bytes: int
    kinds: tuple[ArrayKind, ...] = ()

    def unfit(self, ready: Ready, *, whole: bool) -> str:
        """Why this rank does not have what is asked for; empty: it has. ``whole``: no cuts, for one taker."""
        wrong = (f"geometry: {self.regions} arrays of {self.block_bytes} bytes a block here, "
                 f"{ready.regions} of {ready.block_bytes} there")
        if ready.takers < 1:
            return f"takers: {ready.takers} is below 1"
        if whole and (ready.takers > 1 or ready.cuts or not ready.regions):
            return "part of it lies whole in the buffer of one decode rank"
        if odd := self._odd_spans(ready):
            return odd
        if not ready.cuts:  # the whole rank, or nothing of it
            fits = (ready.regions, ready.block_bytes) in {(self.regions, self.block_bytes), (0, 0)}
            return "" if fits else wrong
        after = size = count = 0
        for cut in ready.cuts:
            if cut.region < after or cut.count < 1 or cut.region + cut.count > len(self.kinds):
                return f"{wrong} (arrays {cut.region} to {cut.region + cut.count - 1})"
            after = cut.region + cut.count
            for kind in self.kinds[cut.region:after]:
                heads = cut.heads or kind.heads
                if not 0 <= cut.head <= kind.heads - heads or heads < 1 or cut.size != heads * kind.head_bytes:
                    return f"{wrong} (heads {cut.head} to {cut.head + heads - 1} of {kind.heads}, {cut.size} bytes)"
            size += cut.count * cut.size
            count += cut.count
        return "" if (count, size) == (ready.regions, ready.block_bytes) else wrong

    def _odd_spans(self, ready: Ready) -> str:
        """Why other blocks of some arrays cannot be meant; empty: they can, or there are none."""
        after = 0
        for one in ready.spans:
            if one.region < after or one.arrays < 1 or one.region + one.arrays > self.regions:
                return f"spans: arrays {one.region} to {one.region + one.arrays - 1} of {self.regions}"
            if one.first < 0 or one.count < 1:
                return f"spans: blocks {one.first} to {one.first + one.count - 1}"
            after = one.region + one.arrays
        if ready.spans and ready.window:
            return "spans: blocks are pulled in their order, which arrays with other blocks do not have"
        for region, kind in enumerate(self.kinds):
            if kind.reach.over == "state" and asked_of(ready, region)[0] and blocks_asked(ready, region) != (0, 1):
                return f"spans: array {region} is a state, which is one block"
        return ""


def blocks_asked(ready: Ready, region: int) -> tuple[int, int]:
    """First and count of the blocks that are asked for of an array, where it is asked for."""
    return span_of(ready.spans, region, (ready.first, ready.count))


def asked_of(ready: Ready, region: int) -> tuple[bool, Cut | None]:
    """Whether an array is asked for, and how it is cut."""
    if not ready.cuts:
        return ready.regions > 0, None
    for cut in ready.cuts:
        if cut.region <= region < cut.region + cut.count:
            return True, cut if cut.heads else None
    return False, None
