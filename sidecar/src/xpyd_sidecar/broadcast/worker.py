"""The worker's end of a group of calls (``rpc``)."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from xpyd_sidecar.broadcast import calls, wire
from xpyd_sidecar.broadcast.calls import Answer, Call, Failure
from xpyd_sidecar.broadcast.errors import QueueClosed, ReadCancelled, ReaderStuck
from xpyd_sidecar.broadcast.queue import Buffer, Writer
from xpyd_sidecar.broadcast.reader import join
from xpyd_sidecar.broadcast.rpc import CALLER
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.errors import ProtocolError

logger = logging.getLogger(__name__)


class Worker:
    """A worker's end."""

    def __init__(self, handle: bytes, name: str, *, timeout_s: float = 60.0, key: ServiceKey | None = None,
                 chunks: int = 10, chunk_bytes: int = 10 << 20, listen: str = "127.0.0.1") -> None:
        """Make the queue back, join the group, and wait until the caller has joined in turn.

        Raises:
            as ``reader.join`` and ``Writer`` do.
        """
        known = wire.read_handle(handle)
        far = name in known.remote
        self.name = name
        self._group = known.queue
        back = (CALLER,)
        self._back = Writer(f"{known.queue} from {name}", local=() if far else back, remote=back if far else (),
                            chunks=chunks, chunk_bytes=chunk_bytes, listen=listen, key=key)
        try:
            self._reader = join(handle, name, note=self._back.handle, timeout_s=timeout_s, key=key)
        except BaseException:
            self._back.close()
            raise
        try:
            self._back.wait_ready(timeout_s)
        except BaseException:
            self.close()
            raise

    def serve(self, methods: Mapping[str, Callable[..., Any]]) -> None:
        """Run calls until the caller closes the group or ``cancel`` is called.

        Raises:
            PeerGone: the caller's process has ended.
            ReaderDropped: the caller does not wait for this worker any more.
            ProtocolError: it sent what is not allowed.
        """
        while True:
            try:
                self.serve_one(methods, None)
            except (QueueClosed, ReadCancelled):
                return

    def serve_one(self, methods: Mapping[str, Callable[..., Any]], timeout_s: float | None) -> None:
        """Run the next call; raises as ``Reader.take`` does, and PeerGone where the caller does not take the answer.

        An error of the method goes to the caller, whatever it is; only what ends a process (SystemExit,
        KeyboardInterrupt) passes through.
        """
        with self._reader.take(timeout_s) as parts:
            try:
                call = calls.unpack(parts, Call)
            except ValueError as error:
                raise ProtocolError(self._group, str(error)) from None
            if call.to is not None and self.name not in call.to:
                return
            try:
                answer = Answer(call.number, _method(methods, call.method)(*call.args, **call.kwargs))
                parts_back = calls.pack(answer)
            except Exception as error:  # the caller decides what an error means
                if not call.answer:
                    logger.exception("broadcast %s: %s failed, and nobody waits for it", self._group, call.method)
                parts_back = calls.pack(Answer(call.number, failure=_failure(error)))
            if call.answer:
                self._answer(call.number, parts_back)

    def cancel(self) -> None:
        """Have ``serve`` return when its method does, or at once where it waits; from any thread."""
        self._reader.cancel()

    def close(self) -> None:
        """Leave the group: the caller sees this worker as gone. Answers that were given can still be read."""
        self._reader.close()
        self._back.close()

    def _answer(self, number: int, parts: list[Buffer]) -> None:
        while True:
            try:
                return self._back.send(*parts)
            except ReaderStuck as error:  # it is busy, and lives: PeerGone ends this otherwise
                logger.warning("broadcast %s: the caller does not take answers: %s", self._group, error)
            except (ValueError, OSError) as error:  # too large: nothing was sent, and this fits
                parts = calls.pack(Answer(number, failure=_failure(error)))


def _method(methods: Mapping[str, Callable[..., Any]], name: str) -> Callable[..., Any]:
    if name not in methods:
        raise LookupError(f"no method {name!r}; there are {', '.join(sorted(methods))}")
    return methods[name]


def _failure(error: Exception) -> Failure:
    text = "".join(traceback.format_exception(error))
    return Failure(type(error).__qualname__, str(error)[-calls.MESSAGE_MAX:], text[-calls.MESSAGE_MAX:])
