"""Calls to a group of workers: a method and its arguments go to all or some of them, and answers come back by rank.

    group = WorkerGroup("kv", ("rank 0", "rank 1"))                  worker = Worker(handle, "rank 1")   (``worker``)
    … hand group.handle to the workers …                             worker.serve({"drain": drain, …})
    group.wait_ready(60)
    group.call("drain", 30.0)                  → [answer of rank 0, answer of rank 1]
    later = group.start("load", SeparateBuffer(data), to=("rank 1",));  …;  later.wait(5.0)
    group.tell("peer_dead", "d-e3")            no answers

One broadcast queue carries calls to all workers. Each worker answers over a queue of its own, whose handle it hands over
when it joins. A worker runs calls one after the other, in the order in which they were made. A process may have several
groups, which are independent of each other. One thread at a time may use a group, and one thread at a time a worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from typing import Any, Final

from xpyd_sidecar.broadcast import calls
from xpyd_sidecar.broadcast.calls import Answer, Call, Failure
from xpyd_sidecar.broadcast.errors import NothingCame, QueueClosed
from xpyd_sidecar.broadcast.queue import Writer
from xpyd_sidecar.broadcast.reader import LocalReader, RemoteReader, join
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.errors import ConfigError, OurFault, PeerError, PeerGone, SidecarError

logger = logging.getLogger(__name__)

CALL_S: Final = 60.0
OPEN_MAX: Final = 1024
"""Calls that wait for answers at once."""
CALLER: Final = "caller"
_SLICE_S: Final = 0.05


class CallFailed(PeerError):
    """A method raised on a worker. ``peer`` names the worker, ``failure`` has the exception's class, text and traceback."""

    def __init__(self, worker: str, method: str, failure: Failure) -> None:
        super().__init__(worker, f"{method} raised {failure.kind}: {failure.text}\n{failure.trace}")
        self.failure = failure


class NoAnswer(SidecarError, TimeoutError):
    """Workers that are not known to be gone have not answered a call in time; ``workers`` names them. Answers that come
    later are discarded.
    """

    def __init__(self, group: str, method: str, workers: tuple[str, ...], timeout_s: float) -> None:
        super().__init__(f"{group}: {method}: no answer from {', '.join(workers)} in {timeout_s:.1f} s")
        self.workers = workers


class Pending:
    """A call that was made, whose answers may still come. Wait for them once: with ``wait``, or with ``outcomes``."""

    def __init__(self, group: WorkerGroup, number: int, method: str, to: tuple[str, ...]) -> None:
        self.method = method
        self.to = to
        self.answers: dict[str, Answer | PeerGone] = {}
        """By worker, as they come."""
        self._group = group
        self._number = number

    def missing(self) -> tuple[str, ...]:
        """Names of the workers called that have neither answered nor been lost."""
        return tuple(name for name in self.to if name not in self.answers)

    def wait(self, timeout_s: float = CALL_S) -> list[Any]:
        """Wait until all workers called have answered; their results, in the order of ranks.

        Raises:
            CallFailed: the method raised on a worker; at once, without waiting for the others.
            PeerGone: a worker is gone; at once, without waiting for the others.
            NoAnswer: some did not answer within ``timeout_s`` seconds.
        """
        self._group.collect(self, self._number, timeout_s, eager=True)
        return [_result(name, self.method, self.answers[name]) for name in self.to]

    def outcomes(self, timeout_s: float = CALL_S) -> dict[str, Any]:
        """Wait until all workers called have answered or are gone. For each of them, by name: its result, or the
        CallFailed or PeerGone that ``wait`` would raise.

        Raises:
            NoAnswer: some did not answer within ``timeout_s`` seconds.
        """
        self._group.collect(self, self._number, timeout_s, eager=False)
        found: dict[str, Any] = {}
        for name in self.to:
            try:
                found[name] = _result(name, self.method, self.answers[name])
            except (CallFailed, PeerGone) as error:
                found[name] = error
        return found


class WorkerGroup:
    """The caller's side of a group of workers, which join it by its ``handle``."""

    def __init__(self, name: str, workers: Sequence[str], *, remote: Collection[str] = (), key: ServiceKey | None = None,
                 chunks: int = 10, chunk_bytes: int = 10 << 20, listen: str = "127.0.0.1") -> None:
        """Make the queue to the workers.

        Args:
            name: of the group, for log and error messages.
            workers: names, in the order of ranks.
            remote: those of them that run on other hosts.
            key: the service's key, for workers on other hosts.
            chunks: calls that a worker may be behind.
            chunk_bytes: bytes of a call that fit into the queue's ring; larger calls get shared memory of their own.
            listen: address to which workers on other hosts connect; any but loopback needs ``key``.

        Raises:
            ConfigError: an argument is wrong, or the address cannot be listened on.
            OSError: no memory or descriptor is left.
        """
        unknown = [each for each in remote if each not in workers]
        if unknown:
            raise ConfigError(f"{name}: remote: {', '.join(unknown)}: not one of {', '.join(workers)}")
        self.name = name
        self.workers = tuple(workers)
        self._key = key
        self._writer = Writer(name, local=[each for each in workers if each not in remote],
                              remote=[each for each in workers if each in remote], chunks=chunks, chunk_bytes=chunk_bytes,
                              listen=listen, key=key, on_drop=self._lost)
        self.handle = self._writer.handle
        self._answers: dict[str, LocalReader | RemoteReader] = {}
        self._open: dict[int, Pending] = {}
        self._made = 0
        self.gone: dict[str, str] = {}
        """Workers that were lost, and why."""

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every worker has joined, and join the queues over which they answer.

        Raises:
            PeerGone: some did not join within ``timeout_s`` seconds, or ended meanwhile; the message names them.
            Incompatible, AuthError, ProtocolError: the queue of a worker cannot be joined.
        """
        end = time.monotonic() + timeout_s
        notes = self._writer.wait_ready(timeout_s)
        for name in self.workers:
            self._answers[name] = join(notes[name], CALLER, timeout_s=max(end - time.monotonic(), 1.0), key=self._key)

    def call(self, method: str, *args: Any, to: Collection[str] | None = None, timeout_s: float = CALL_S,
             **kwargs: Any) -> list[Any]:
        """Call a method on all workers, or on those of ``to``, and wait ``timeout_s`` seconds at most for their results,
        which are in the order of ranks. Raises as ``start`` and ``Pending.wait`` do.
        """
        end = time.monotonic() + timeout_s
        pending = self.start(method, *args, to=to, timeout_s=timeout_s, **kwargs)
        return pending.wait(max(end - time.monotonic(), 0.0))

    def start(self, method: str, *args: Any, to: Collection[str] | None = None, timeout_s: float = CALL_S,
              **kwargs: Any) -> Pending:
        """Call a method on all workers, or on those of ``to``, and do not wait for their answers.

        Raises:
            ReaderStuck: a worker was too many calls behind for ``timeout_s`` seconds. No worker got this one.
            PeerGone: every worker is gone.
            OurFault: ``OPEN_MAX`` calls wait for answers, or the group is closed.
            TypeError: an argument is none of the types that calls carry (``calls``).
            ValueError: ``to`` is empty or names one that is no worker of the group, or the arguments are too large.
            OSError, MemoryError: no memory or descriptor is left for the call. No worker got it.
        """
        if len(self._open) >= OPEN_MAX:
            raise OurFault(f"{self.name}: {OPEN_MAX} calls wait for answers; wait for some first")
        pending = Pending(self, self._made + 1, method, self._to(to))
        self._send(Call(self._made + 1, method, None if to is None else pending.to, answer=True, args=args, kwargs=kwargs),
                   timeout_s)
        self._open[self._made] = pending
        for name in pending.to:
            if name in self.gone:
                pending.answers[name] = PeerGone(name, self.gone[name])
        return pending

    def tell(self, method: str, *args: Any, to: Collection[str] | None = None, timeout_s: float = CALL_S,
             **kwargs: Any) -> None:
        """Call a method on all workers, or on those of ``to``, without answers: a worker logs what the method raises.
        Raises as ``start`` does.
        """
        names = self._to(to)
        self._send(Call(self._made + 1, method, None if to is None else names, answer=False, args=args, kwargs=kwargs),
                   timeout_s)

    def check(self) -> None:
        """Look for workers that are gone, and note them in ``gone``, before a call has to wait for them."""
        self._writer.check()
        self._hear_all()

    def collect(self, pending: Pending, number: int, timeout_s: float, *, eager: bool) -> None:
        """Take answers until ``pending``, the call of this number, has those of all its workers. For ``Pending`` alone.

        Raises:
            NoAnswer: some did not come within ``timeout_s`` seconds.
            CallFailed, PeerGone: with ``eager``, what came of the call on one worker while others still lack an answer.
        """
        end = time.monotonic() + timeout_s
        try:
            while missing := pending.missing():
                if eager:
                    for name, answer in pending.answers.items():
                        _result(name, pending.method, answer)
                left = end - time.monotonic()
                if left <= 0:
                    raise NoAnswer(self.name, pending.method, missing, timeout_s)
                self._hear(missing[0], min(_SLICE_S, left))
                if len(missing) > 1:
                    self._hear_all()
        finally:
            self._open.pop(number, None)

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the queue: workers finish the calls that were made and then return from ``Worker.serve``.

        Raises:
            ReaderStuck: some have not read every call within ``timeout_s`` seconds. The group is closed all the same.
        """
        try:
            self._writer.close(timeout_s)
        finally:
            for reader in self._answers.values():
                reader.close()
            self._answers.clear()

    def _to(self, to: Collection[str] | None) -> tuple[str, ...]:
        if to is None:
            return self.workers
        unknown = [each for each in to if each not in self.workers]
        if unknown or not to:
            raise ValueError(f"{self.name}: to: {', '.join(unknown) or 'nobody'}: workers are {', '.join(self.workers)}")
        return tuple(each for each in self.workers if each in to)

    def _send(self, call: Call, timeout_s: float) -> None:
        self._writer.send(*calls.pack(call), timeout_s=timeout_s, while_waiting=self._hear_all)
        self._made += 1

    def _hear_all(self) -> None:
        """Take every answer that is there: no worker waits for room in its answer queue while this side waits for it."""
        for name in self.workers:
            while name not in self.gone and self._hear(name, 0.0):
                continue

    def _hear(self, name: str, timeout_s: float) -> bool:
        if name in self.gone:
            return False
        try:
            message = calls.unpack(self._answers[name].recv(timeout_s), Answer)
        except NothingCame:
            return False
        except (PeerError, QueueClosed) as error:
            self._lost(name, getattr(error, "reason", str(error)))
            return False
        except ValueError as error:
            self._lost(name, str(error))
            return False
        pending = self._open.get(message.number)
        if pending is not None:
            pending.answers[name] = message
        return True

    def _lost(self, name: str, reason: str) -> None:
        if self.gone.setdefault(name, reason) is reason:
            logger.warning("broadcast %s: worker %s is lost: %s", self.name, name, reason)
        for pending in self._open.values():
            if name in pending.to:
                pending.answers.setdefault(name, PeerGone(name, reason))


def _result(name: str, method: str, answer: Answer | PeerGone) -> Any:
    if isinstance(answer, PeerGone):
        raise answer
    if answer.failure is not None:
        raise CallFailed(name, method, answer.failure)
    return answer.result
