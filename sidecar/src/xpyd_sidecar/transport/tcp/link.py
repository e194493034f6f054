"""The link that puts blocks into frames of the session itself: everywhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from xpyd_sidecar.kv import frames
from xpyd_sidecar.kv.frames import FrameKind
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.transport.link import BlockLink, Blocks
from xpyd_sidecar.transport.tcp.frame_writer import Late


class TcpLink(BlockLink):
    """Blocks as DATA frames of the session itself: what is queued is the session's own, and nothing is ever on offer."""

    name = "tcp"

    def put(self, key: Key, blocks: Blocks, sent: Callable[[], None], *, most: int = frames.FRAME_BYTES) -> None:
        """Cut blocks into frames and queue them; the last one to leave frees the data."""
        *others, last = blocks.cut(most)
        late = blocks.cover and (blocks.sums is None or not blocks.sums.made)
        for part in (*others, last):
            head = (Late if late else partial)(_header, key, part)
            self.session.queue(head, part.data, sent if part is last else _not_the_last)


def _not_the_last() -> None:
    """The data is freed with the last part of it."""


def _header(key: Key, part: Blocks) -> bytes:
    return frames.encode(FrameKind.DATA, key, part.data, region=part.region, first=part.first, blocks=part.blocks,
                         cover=part.cover, known=part.total())
