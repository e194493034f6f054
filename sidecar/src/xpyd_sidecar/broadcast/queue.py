"""The writer's end of a broadcast queue. Readers: ``reader``. Protocol: docs/protocols/broadcast.md.

    writer = Writer("steps", local=("rank 0", "rank 1"), remote=("rank 2",), listen="10.0.0.1", key=key)
    … hand writer.handle to the readers …              reader = join(handle, "rank 1", note=b"…", timeout_s=60)
    notes = writer.wait_ready(60)
    writer.send(head, tensor_bytes)                    with reader.take(None) as parts: …

A message is one or more buffers. It goes to every live reader or, where the call raises, to nobody. A reader whose process
has ended is dropped with a warning and ``on_drop``; one that lives and does not read ends the call with ``ReaderStuck``,
after which the caller may send again or ``drop`` it. One thread at a time may use a writer.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final

from xpyd_sidecar.broadcast import message, wire
from xpyd_sidecar.broadcast.layout import Layout
from xpyd_sidecar.broadcast.remote import Remotes
from xpyd_sidecar.broadcast.shared import SLICE_S, Patience, SharedWriter
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.errors import ConfigError, OurFault, PeerGone

logger = logging.getLogger(__name__)

Buffer = bytes | bytearray | memoryview
SEND_S: Final = 60.0
SPIN_S: Final = 0.0002
"""How long either side looks again and again before it sleeps: longer than most wake-ups take, and no more."""
JOIN_SLICE_S: Final = 0.02
MESSAGE_MAX: Final = 1 << 30
LOOPBACK: Final = frozenset({"127.0.0.1", "::1"})


class Writer:
    """One queue's writer. ``handle``: what readers join with, as bytes; who has it can join."""

    def __init__(self, name: str, *, local: Sequence[str] = (), remote: Sequence[str] = (), chunks: int = 10,
                 chunk_bytes: int = 10 << 20, message_max: int = MESSAGE_MAX, listen: str = "127.0.0.1", port: int = 0,
                 key: ServiceKey | None = None, spin_s: float = SPIN_S,
                 on_drop: Callable[[str, str], None] | None = None) -> None:
        """Make the ring and listen.

        Args:
            name: of the queue, for messages to people.
            local: names of the readers on this host.
            remote: names of the readers elsewhere; they connect to ``listen`` and ``port``.
            chunks: messages that a reader may be behind.
            chunk_bytes: larger messages go through a side segment.
            message_max: bytes of the largest message.
            listen: address for remote readers; any but loopback wants ``key``.
            port: for remote readers; 0: any.
            key: the service's key: remote links are then encrypted and authenticated (CURVE).
            spin_s: how long to look again and again before sleeping.
            on_drop: called with a reader's name and the reason when it is dropped, from within a call of this object.

        Raises:
            ConfigError: an argument is wrong, or the address cannot be listened on.
            OSError: no memory or descriptor is left.
        """
        names = (*local, *remote)
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"{name}: local, remote: readers need names, each once: {', '.join(names) or 'none'}")
        if remote and key is None and listen not in LOOPBACK:
            raise ConfigError(f"{name}: key: readers from elsewhere can reach {listen}, so it needs the service's key")
        try:
            layout = Layout(max(len(local), 1), chunks, chunk_bytes)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from None
        self.name = name
        self.lost: dict[str, str] = {}
        """Readers that were dropped, and why."""
        self._number = 1
        self._message_max = message_max
        self._window = chunks
        self._on_drop = on_drop
        self._closed = False
        self._remotes: Remotes | None = None
        token = secrets.token_bytes(16)
        self._shared = SharedWriter(name, token, tuple(local), layout, spin_s=spin_s, lose=self._lose) if local else None
        if remote:
            try:
                self._remotes = Remotes(name, token, tuple(remote), host=listen, port=port, key=key)
            except BaseException:
                self.close()
                raise
        self.handle = wire.pack(wire.Handle(
            version=wire.WIRE_VERSION, queue=name, token=token, layout=layout, local=tuple(local),
            door=self._shared.door.address if self._shared else "", remote=tuple(remote),
            endpoint=self._remotes.endpoint if self._remotes else "", secure=key is not None, message_max=message_max,
            second=self._remotes.second if self._remotes else ""))

    @property
    def live(self) -> tuple[str, ...]:
        """Readers that are not dropped (remote ones: and have joined)."""
        return (*(self._shared.live() if self._shared else ()), *(self._remotes.taken if self._remotes else ()))

    def wait_ready(self, timeout_s: float) -> dict[str, bytes]:
        """Wait until every reader has joined; what each handed over when it did, by name.

        Raises:
            PeerGone: some did not join in time; the message names them.
        """
        doors = [door for door in (self._shared.door if self._shared else None, self._remotes) if door is not None]
        end = time.monotonic() + timeout_s
        while missing := [name for door in doors for name in door.missing()]:
            left = end - time.monotonic()
            if left <= 0:
                raise PeerGone(", ".join(missing), f"did not join {self.name} within {timeout_s:.1f} s")
            for door in doors:
                door.step(min(JOIN_SLICE_S, left))
        return {name: note for door in doors for name, note in door.notes.items()}

    def send(self, *parts: Buffer, timeout_s: float = SEND_S, while_waiting: Callable[[], None] | None = None) -> None:
        """Send a message of these buffers; they may be changed again when this returns.

        Args:
            parts: one or more contiguous buffers.
            timeout_s: how long to wait for readers that are behind.
            while_waiting: called now and then in that time.

        Raises:
            ReaderStuck: readers that live did not make room in time. Nobody got the message.
            PeerGone: every reader is gone.
            ValueError: no parts, too many, or too large. Nobody got the message.
            TypeError: a part is not contiguous. Nobody got the message.
            OSError, MemoryError: no memory or descriptor for a side segment, or for remote readers. Nobody got the message.
        """
        flat = [part if type(part) is bytes else memoryview(part).cast("B") for part in parts]
        lengths = tuple([len(part) for part in flat])
        total = sum(lengths)
        if not 1 <= len(lengths) <= message.PARTS_MAX or total > self._message_max:
            raise ValueError(f"{self.name}: a message of {len(lengths)} parts and {total} bytes; allowed are 1 to "
                             f"{message.PARTS_MAX} parts and {self._message_max} bytes")
        if self._closed:
            raise OurFault(f"{self.name}: sent after close")
        shared, remotes = self._shared, self._remotes
        end, aside = 0.0, False
        if shared is not None:
            aside = not shared.fits(lengths)
            awaited = shared.awaited_message(aside)
            if awaited:
                end = time.monotonic() + timeout_s
                shared.wait_taken(awaited, Patience(end, timeout_s, while_waiting))
        if remotes is not None:
            self._wait_remotes(self._number - self._window, Patience(end or time.monotonic() + timeout_s, timeout_s,
                                                                     while_waiting))
        to_local = shared is not None and bool(shared.flags.live)
        if not to_local and (remotes is None or not remotes.taken):
            raise PeerGone(self.name, f"every reader is gone: {self.lost}")
        copies = [bytes(part) for part in flat] if remotes is not None and remotes.taken else []  # before anybody has it
        if shared is not None and to_local:
            shared.write(flat, lengths, aside)
        if remotes is not None and copies:
            remotes.send(self._number, copies)
            self._note_remotes()
        self._number += 1

    def wait_taken(self, timeout_s: float, while_waiting: Callable[[], None] | None = None) -> None:
        """Wait until every live reader has given back everything that was sent.

        Raises:
            ReaderStuck: some have not in time; the error names them.
        """
        patience = Patience(time.monotonic() + timeout_s, timeout_s, while_waiting)
        if self._shared is not None:
            self._shared.wait_taken(self._shared.flags.number - 1, patience)
        if self._remotes is not None:
            self._wait_remotes(self._number - 1, patience)

    def check(self) -> None:
        """Drop readers that are gone now, rather than when the writer next has to wait for them."""
        if self._shared is not None:
            self._shared.check()
        if self._remotes is not None:
            self._remotes.step(0)
            self._remotes.ask(time.monotonic())
            self._note_remotes()

    def silent(self) -> tuple[str, ...]:
        """Live readers that are stopped or cut off, 5 s after it happened at the latest. They may come back. One elsewhere
        that stays silent is dropped in the end, one of this host is not.
        """
        local = self._shared.door.silent() if self._shared is not None else ()
        return (*local, *(self._remotes.silent() if self._remotes is not None else ()))

    def after_fork(self) -> None:
        """In a child of this process, which is not to use the queue: have readers see when this process alone has ended."""
        if self._shared is not None:
            self._shared.door.after_fork()

    def drop(self, name: str, reason: str) -> None:
        """Wait for a reader no more: it gets ``ReaderDropped``. Does nothing where it was dropped before.

        Raises:
            ValueError: no live reader has that name.
        """
        if name in self.lost:
            return
        if name not in self.live:
            raise ValueError(f"{self.name}: {name!r} is not one of its readers: {', '.join(self.live)}")
        if self._remotes is not None and name in self._remotes.taken:
            self._remotes.lose(name, reason)
            self._note_remotes()
        else:
            self._lose(name, reason)

    def close(self, timeout_s: float = 0.0) -> None:
        """Close: local readers still get what was published. Remote ones lose what is on the way when this process ends, so
        give ``timeout_s`` to wait for them.

        Raises:
            ReaderStuck: with a timeout, some have not given back everything in time. The queue is closed all the same.
        """
        if self._closed:
            return
        try:
            if timeout_s > 0 and self.live:
                self.wait_taken(timeout_s)
        finally:
            self._closed = True
            if self._shared is not None:
                self._shared.close()
            if self._remotes is not None:
                self._remotes.close(self._number - 1)

    def _wait_remotes(self, number: int, patience: Patience) -> None:
        assert self._remotes is not None
        self._remotes.step(0)
        while behind := self._remotes.lagging_readers(number):
            now = time.monotonic()
            if now >= patience.end:
                raise patience.reader_stuck(self.name, behind, number)
            self._remotes.ask(now)
            self._remotes.step(min(SLICE_S, patience.end - now))
            self._note_remotes()
            if patience.meanwhile is not None:
                patience.meanwhile()

    def _note_remotes(self) -> None:
        assert self._remotes is not None
        while self._remotes.gone:
            self._noted(*self._remotes.gone.popitem())

    def _lose(self, name: str, reason: str) -> None:
        assert self._shared is not None
        if name not in self.lost:
            self._shared.drop(name)
            self._noted(name, reason)

    def _noted(self, name: str, reason: str) -> None:
        self.lost[name] = reason
        logger.warning("broadcast %s: dropped reader %s: %s", self.name, name, reason)
        if self._on_drop is not None:
            self._on_drop(name, reason)
