"""Takes messages from a ZMQ socket in the event loop, in batches.

A socket's descriptor is edge-triggered: readable means "look at the socket now", and every look must go on until nothing is
left, also after sending. Waking up costs more than a heartbeat, so after a look that found something the next one is
``PACE_S`` later, whatever comes: a single message is taken at once, a stream of them in batches. A look is bounded too, so
at most ``PER_LOOK`` messages are taken per ``PACE_S``: a flood never starves requests, and ZMQ's fair queue gives each peer
its share. What is answered leaves at the end of a look: ZMQ's own thread is woken once for all of it, and not for each.

    idle, descriptor watched ──readable──▶ look ──found something──▶ paused for PACE_S ──▶ look ──▶ …
            ▲                                │
            └──────── found nothing ─────────┘
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

logger = logging.getLogger(__name__)

PER_LOOK = 512
PACE_S = 0.1


class Pump:
    """Looks at one socket until it is closed."""

    def __init__(self, socket: zmq.Socket[bytes], on_frames: Callable[[list[zmq.Frame]], bytes | None]) -> None:
        """Begins at once. ``on_frames`` gets one message, returns the answer to its sender, if any, and never raises."""
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._on_frames = on_frames
        self._fd = int(socket.getsockopt(zmq.FD))
        self._watched = False
        self._paused: asyncio.TimerHandle | None = None
        self.look()

    def look(self) -> None:
        """Take what is there. Also to be called every second, should an edge ever be missed."""
        taken, receive = 0, self._socket.recv
        answers: list[tuple[bytes, bytes]] = []
        while taken < PER_LOOK and not self._socket.closed:
            try:
                sender = receive(zmq.NOBLOCK)
                frames = [receive(zmq.NOBLOCK, copy=False)]
                while frames[-1].more:
                    frames.append(receive(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                break
            except zmq.ZMQError as error:
                logger.error("membership socket: %s", error)  # noqa: TRY400 (a traceback would say nothing more)
                break
            taken += 1
            answer = self._on_frames(frames)
            if answer is not None:
                answers.append((sender, answer))
        if answers and not self._socket.closed:
            self._answer(answers)
        if taken:
            self._watch(False)
            if self._paused is None:
                self._paused = self._loop.call_later(PACE_S, self._go_on)
        elif self._paused is None:
            self._watch(True)

    def _answer(self, answers: list[tuple[bytes, bytes]]) -> None:
        send = super(zmq.Socket, self._socket).send  # without what other kinds of sockets need, a third of the time
        for sender, answer in answers:
            try:
                send(sender, zmq.NOBLOCK | zmq.SNDMORE)
                send(answer, zmq.NOBLOCK)
            except zmq.ZMQError as error:  # the peer is gone or does not read: it will beat again
                logger.debug("answer not sent: %s", error)

    def close(self) -> None:
        """Look no more, and close the socket."""
        self._watch(False)
        if self._paused is not None:
            self._paused.cancel()
            self._paused = None
        self._socket.close()

    def _go_on(self) -> None:
        self._paused = None
        self.look()

    def _watch(self, watched: bool) -> None:
        if watched and not self._watched:
            self._loop.add_reader(self._fd, self.look)
        elif self._watched and not watched:
            self._loop.remove_reader(self._fd)
        self._watched = watched
