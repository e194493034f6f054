"""What can go wrong with a queue, beside what the sidecar's errors name (``xpyd_sidecar.errors``).

    SidecarError
    ├── QueueClosed        to readers: the writer has closed the queue, and every message was read
    ├── ReadCancelled      to readers: another thread of this process has ended the wait
    ├── ReaderStuck        to the writer: readers that live do not read (a TimeoutError)
    ├── NothingCame        to readers: no message came in time (a TimeoutError)
    └── PeerError
        ├── ReaderDropped  to readers: the writer does not wait for them any more
        └── PeerGone       the process of the writer, or of every reader, has ended
"""

from __future__ import annotations

from xpyd_sidecar.errors import PeerError, SidecarError


class QueueClosed(SidecarError):
    """The writer has closed the queue, and every message was read."""


class ReadCancelled(SidecarError):
    """``cancel`` was called while this reader waited."""


class NothingCame(SidecarError, TimeoutError):
    """No message came in time. The queue is as it was."""


class ReaderStuck(SidecarError, TimeoutError):
    """Readers that live have not given back an old message in time. Nothing was sent to anyone; sending again is right.

    ``readers`` names them.
    """

    def __init__(self, queue: str, readers: tuple[str, ...], reason: str) -> None:
        super().__init__(f"{queue}: {', '.join(readers)}: {reason}")
        self.readers = readers


class ReaderDropped(PeerError):
    """The writer has dropped this reader: what it read last may be torn, and nothing more comes."""
