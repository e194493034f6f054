"""What can go wrong with a queue, beside what the sidecar's errors name (``xpyd_sidecar.errors``).

    XpydError
    ├── Closed         to readers: the writer has closed, and everything was read
    ├── Cancelled      to readers: another thread of this process ended the wait
    ├── ReaderStuck    to the writer: readers that live do not read (a TimeoutError)
    ├── NothingCame    to readers: no message in time (a TimeoutError)
    └── PeerError
        ├── Dropped    to readers: the writer waits for them no more
        └── PeerGone   the writer's, or every reader's, process has ended
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
