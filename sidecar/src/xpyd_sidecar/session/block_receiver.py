"""The blocks that one prefill rank sends: where each frame belongs, whether it is what was asked for, and that it has come.

A frame goes right into its blocks where the try has a target, into a chunk of staging memory where it has none, into the
buffer where no load has asked for it yet, and nowhere if it is no longer wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from xpyd_sidecar.errors import ChecksumError, ProtocolError
from xpyd_sidecar.kv import bodies, frames
from xpyd_sidecar.kv.blocks import runs
from xpyd_sidecar.kv.frames import FrameKind, Header
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.memory.staging import Chunk
from xpyd_sidecar.session.lookup_buffer import Slot
from xpyd_sidecar.session.receiver_events import AskedBlocks, ReceiverContext
from xpyd_sidecar.transport.link import PieceTaker
from xpyd_sidecar.transport.moves import Scatter
from xpyd_sidecar.transport.tcp.placement import NOWHERE, Expected, PayloadPlace, packed

FOLLOW_BYTES: Final = 128 << 20
"""Of frames that are expected after the one that is received, together."""


class BlockReceiver:
    """Of one connection (``link.PieceOwner``). ``asked``: what its peer owes."""

    def __init__(self, shared: ReceiverContext, peer: str) -> None:
        self.asked: dict[Key, AskedBlocks] = {}
        self.taker: PieceTaker | None = None
        """Where blocks come beside the connection."""
        self._shared = shared
        self._peer = peer
        self._chunk: Chunk | None = None
        self._slot: Slot | None = None

    def close(self) -> None:
        """The connection has ended: give back what it has taken for a frame."""
        self._give_chunk()
        if self._slot is not None:
            slot, self._slot = self._slot, None
            self._shared.staging.give(slot.chunk)
        if self.taker is not None:
            self.taker.close()

    def room(self, header: Header) -> PayloadPlace | None:
        """Where the payload of a DATA goes; None: wait until staging memory is free.

        Raises:
            ProtocolError: it is not what was asked for.
        """
        asked = self.asked.get(header.key)
        if asked is None:
            return self._beforehand(header)
        wanted = asked.wanted(header) if asked.granted else header
        if wanted is None:
            return NOWHERE
        size = self._expected(asked, wanted)
        if wanted.length != size or (wanted.blocks < header.blocks and header.length > self._shared.me.largest_frame):
            raise ProtocolError(self._peer, f"sent {header.length} bytes for {header.blocks} blocks, not {size}")
        self._must_cover(header.kind, covered=header.covered)
        direct = self._direct(asked, header, cover=header.covered) if wanted.blocks == header.blocks else None
        if direct is not None:
            return direct._replace(after=partial(self._after, asked, header))
        self._chunk = self._shared.staging.take()
        return self._chunk and PayloadPlace(packed(self._chunk.view, header.blocks, cover=header.covered,
                                                   size=header.length))

    @staticmethod
    def _direct(asked: AskedBlocks, header: Header, *, cover: bool) -> PayloadPlace | None:
        """Blocks of their own, where they may be written directly."""
        target = asked.target
        scatter = target.scatter(header.region, header.first, header.blocks, cover=cover) if target is not None else None
        return PayloadPlace(scatter, target.gate) if target is not None and scatter is not None else None

    def _must_cover(self, kind: FrameKind, *, covered: bool) -> None:
        if self._shared.cover and not covered:
            raise ProtocolError(self._peer, f"sent {kind.name} without the checksum that was asked for")

    def _after(self, asked: AskedBlocks, header: Header, most: int) -> list[Expected]:
        """The frames that come next if prefill has all that is asked for: array by array, in blocks' order."""
        step, target = asked.step, asked.target
        assert target is not None
        out: list[Expected] = []
        region, first, room = header.region, header.first + header.blocks, FOLLOW_BYTES
        begin, blocks = step.span(region)
        for _ in range(most):
            if first == begin + blocks:
                region += 1
                begin, blocks = step.span(region)
                first = begin
            unit = step.units.get(region)
            if unit is None:
                break
            _, count = next(runs(first, begin + blocks - first, unit.size, frames.aim(step.ready.frame)))
            nth = step.slot(region, first, count)
            if nth is None:
                break
            scatter = target.scatter(region, first, count, cover=header.covered)
            room -= count * unit.size
            if scatter is None or room < 0 or asked.have.find(1, nth, nth + count) >= 0:
                break
            header = header._replace(length=count * unit.size, region=region, first=first, blocks=count)
            place = PayloadPlace(scatter, target.gate, after=partial(self._after, asked, header))
            out.append(Expected(frames.known(header), header, place))
            first += count
        return out

    def begin(self, key: Key) -> Callable[[int], list[Expected]] | None:
        """What a try that was asked for begins with, if its blocks come in frames and to places of their own."""
        asked = self.asked[key]
        if asked.target is None or self.taker is not None or not asked.step.units:
            return None
        region = min(asked.step.units)
        before = Header(FrameKind.DATA, self._shared.cover, 0, key, region, asked.step.span(region)[0], 0, 0)
        return partial(self._after, asked, before)

    def _beforehand(self, header: Header) -> PayloadPlace:
        """A place in the buffer for what no load has asked for, if it was granted."""
        self._slot = self._shared.ahead.begin(header)
        if self._slot is None:
            return NOWHERE
        self._must_cover(header.kind, covered=header.covered)
        return PayloadPlace(packed(self._slot.chunk.view, header.blocks, cover=header.covered))

    def _buffered(self, header: Header, slot: Slot, place: PayloadPlace) -> None:
        """A frame for the buffer is complete; a load may have begun to ask for it meanwhile."""
        if header.covered and place.total() != header.checksum:
            self._shared.staging.give(slot.chunk)
            raise ChecksumError(self._peer, "DATA frame with a wrong checksum")
        asked = self.asked.get(header.key)
        if asked is None:
            self._shared.ahead.complete(header, slot)
        elif (wanted := asked.wanted(header)) is None:
            self._shared.staging.give(slot.chunk)
        else:
            self._arrived(asked, wanted, wanted.length, asked.part(header, wanted, slot.chunk), "buffer")

    def _expected(self, asked: AskedBlocks, header: Header, most: int = 0) -> int:
        """Bytes of the blocks that a header speaks of, which must have been asked for and not have come.

        ``most``: that they may have; 0: as many as may come in one frame.
        """
        end = header.first + header.blocks
        slot = asked.step.slot(header.region, header.first, header.blocks)
        if slot is None:
            raise ProtocolError(self._peer, f"sent blocks {header.first}..{end - 1} of array {header.region}, "
                                                f"not among those asked for")
        if asked.have.find(1, slot, slot + header.blocks) >= 0:
            raise ProtocolError(self._peer, f"sent blocks {header.first}..{end - 1} of array {header.region} twice")
        size = header.blocks * asked.step.units[header.region].size
        most = most or max(self._shared.me.largest_frame, asked.step.ready.frame)
        if size > most:
            raise ProtocolError(self._peer, f"sent {size} bytes in one frame, over {most}")
        return size

    def data(self, header: Header, place: PayloadPlace) -> None:
        """A frame of DATA is complete.

        Raises:
            ChecksumError: it is not what was sent.
        """
        slot, self._slot = self._slot, None
        if slot is not None:
            self._buffered(header, slot, place)
            return
        asked = self.asked.get(header.key)
        if asked is None or place.scatter is None:  # a try that was cancelled; the next frame may be long in coming
            self._give_chunk()
            return
        self._check(header, place, header.checksum if header.covered else None)
        chunk = None
        if place.gate is None:
            chunk, self._chunk = self._chunk, None
            assert chunk is not None
        wanted = (asked.wanted(header) if chunk is not None and asked.granted else None) or header
        if chunk is not None and wanted.blocks < header.blocks:
            chunk = asked.part(header, wanted, self._shared.staging.homed(chunk))
        self._arrived(asked, wanted, wanted.length, chunk, "tcp")

    def wants(self, header: Header, offer: bodies.Offer, most: int) -> bool:
        """As of ``PieceOwner``."""
        asked = self.asked.get(header.key)
        if asked is None:
            return False
        self._must_cover(header.kind, covered=offer.checksum is not None)
        size = self._expected(asked, header, most)
        if offer.size != size:
            raise ProtocolError(self._peer, f"offered {offer.size} bytes for {header.blocks} blocks, not {size}")
        return True

    def received(self, header: Header, chunk: Chunk, size: int) -> None:
        """As of ``PieceOwner``: blocks have come in a group, into a slot of GPU memory."""
        asked = self.asked.get(header.key)
        wanted = False
        try:
            wanted = asked is not None and self._expected(asked, header, size) == size
        finally:
            if not wanted:
                self._shared.staging.give(chunk)
        if asked is not None and wanted:
            self._arrived(asked, header, size, chunk, "nccl")

    def place(self, header: Header, offer: bodies.Offer, bring: Callable[[Scatter], str]) -> bool:
        """As of ``PieceOwner``; what is free or not is staging memory."""
        asked = self.asked.get(header.key)
        if asked is None:
            return True
        size, cover = self._expected(asked, header, offer.size), offer.checksum is not None
        place, chunk = self._direct(asked, header, cover=cover), None
        if place is None:  # not ``_chunk``: a frame of DATA may be coming into that
            if (chunk := self._shared.staging.take()) is None:
                return False
            place = PayloadPlace(packed(chunk.view, header.blocks, cover=cover, size=size))
        elif place.gate is not None and not place.gate.enter():
            return True
        assert place.scatter is not None
        try:
            try:
                way = bring(place.scatter)
            finally:
                if place.gate is not None:
                    place.gate.leave()
            self._check(header, place, offer.checksum)
        except BaseException:
            if chunk is not None:
                self._shared.staging.give(chunk)
            raise
        self._arrived(asked, header, size, chunk, way)
        return True

    def _give_chunk(self) -> None:
        """Nothing that was asked for is in it."""
        if self._chunk is not None:
            chunk, self._chunk = self._chunk, None
            self._shared.staging.give(chunk)

    def _check(self, header: Header, place: PayloadPlace, expected: int | None) -> None:
        if expected is None or place.total() == expected:
            return
        if place.gate is None or place.gate.enter():  # else the blocks may be another's by now
            if place.gate is not None:
                place.gate.leave()
            raise ChecksumError(self._peer, f"{header.kind.name} frame with a wrong checksum")

    def _arrived(self, asked: AskedBlocks, header: Header, size: int, chunk: Chunk | None, way: str) -> None:
        slot = asked.step.slot(header.region, header.first, header.blocks)
        assert slot is not None  # ``_expected`` has seen to it
        asked.have[slot:slot + header.blocks] = b"\1" * header.blocks
        self._shared.arrived(asked.step, header.region, header.first, header.blocks, chunk, size, way)
