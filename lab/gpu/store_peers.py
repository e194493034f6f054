"""Another process that has a store in memory of its own, or maps one of ours, by the connector's own mailbox.

    python -m lab.gpu.store_peers owner BOX SIZE    makes a store, fills it, sends it to that mailbox; ends with its stdin
    python -m lab.gpu.store_peers reader            names a mailbox, maps what comes there, and says what it sees

Neither needs torch.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.gpu.children import Answer, Child, say
from lab.gpu.findings import NotHeldError
from xpyd_sidecar.kv.session_bodies import SharedStore
from xpyd_sidecar.transport.shm.fetch import Mapping
from xpyd_sidecar.transport.shm.mailbox import Mailbox, MailboxSender
from xpyd_sidecar.transport.shm.serve import HEAD_BYTES, TICKETS_AT, SharedCopies


def words(begin: int, size: int) -> NDArray[np.uint64]:
    """What the copies of an owner's store have from a byte on: each word of 8 bytes its number."""
    return np.arange(begin // 8, (begin + size) // 8, dtype=np.uint64)


def describe(copies: SharedCopies) -> Answer:
    """What a session tells decode of a store, with a ticket."""
    cell = copies.tickets.take()
    assert cell is not None
    at, ticket = copies.tickets.descriptor(cell)
    return {"name": copies.name.hex(), "size": copies.size, "ticket_at": TICKETS_AT + at, "ticket": ticket.hex()}


def shared_memory(described: Answer) -> SharedStore:
    """The same, as decode has it."""
    return SharedStore(bytes.fromhex(described["name"]), described["size"], described["ticket_at"],
                        bytes.fromhex(described["ticket"]), b"")


def take_descriptor(box: Mailbox, name: str) -> int:
    """The descriptor that has come with a store's name.

    Raises:
        NotHeldError: it has not.
    """
    found = box.take(lambda letter: letter.hex() == name)
    if found is None or found[1] is None:
        raise NotHeldError("the descriptor of another process's memory has not come", {})
    return found[1]


def read_by_peer(copies: SharedCopies, byte: int) -> str:
    """What another process makes of a store that has one byte everywhere: ``right``, or what is wrong."""
    with Child("store_peers", "reader") as peer:
        box = peer.hear()["box"]
        sender = MailboxSender(box, None)
        sender.send(copies.name, copies.fd)
        sender.close()
        peer.tell({"byte": byte, **describe(copies)})
        answer: str = peer.hear()["sees"]
        return answer


def own(name: str, size: int) -> None:
    """Be the owner."""
    copies = SharedCopies(size)
    np.frombuffer(copies.copies, np.uint64)[:] = words(0, size)
    sender = MailboxSender(name, None)
    sender.send(copies.name, copies.fd)
    say(describe(copies))
    sys.stdin.read()


def read() -> None:
    """Be the reader."""
    box = Mailbox(None)
    say({"box": box.name})
    order = json.loads(sys.stdin.readline())
    fd = take_descriptor(box, order["name"])
    again = os.dup(fd)
    mapping = Mapping(fd, shared_memory(order))
    view = mapping.view[HEAD_BYTES:]
    sees = "right" if view == bytes([order["byte"]]) * len(view) else "other bytes"
    if writable(again, len(mapping.view)):
        sees = "memory that it can write"
    say({"sees": sees})


def writable(fd: int, size: int) -> bool:
    """Whether who has a descriptor of a store can write into it, also by opening it anew."""
    try:
        opened = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        mmap.mmap(opened, size).close()
    except OSError:
        return False
    return True


def resident(kind: str) -> int:
    """Bytes that this process has in memory, of a kind that /proc names: ``RssAnon``, ``RssShmem``."""
    time.sleep(0.05)  # counted by each processor for itself
    rows = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith(f"{kind}:"))


if __name__ == "__main__":
    if sys.argv[1] == "owner":
        own(sys.argv[2], int(sys.argv[3]))
    else:
        read()
