"""Mailboxes as decode has them, and what lies in them; files that a test leaves open."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

from xpyd_sidecar.transport.shm import mailbox
from xpyd_sidecar.transport.shm.mailbox import Mailbox


def files() -> int:
    """That this process has open."""
    gc.collect()  # those of other tests
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def box_in(folder: Path | None) -> Iterator[Mailbox]:
    box = Mailbox(folder)
    try:
        yield box
    finally:
        box.close()


def secret_in(box: Mailbox, mark: bytes) -> bytes:
    letter = box.take(lambda letter: mailbox.mark(letter) == mark)
    assert letter is not None
    assert letter[1] is None
    return letter[0]


def descriptor_in(box: Mailbox, name: bytes) -> int | None:
    _, fd = box.take(lambda letter: letter == name) or (b"", None)
    return fd
