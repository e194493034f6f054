"""``nccl.core`` for tests on a CPU: communicators of two ranks between the threads of this process.

What it keeps of NCCL: nothing blocks; a call stays in progress until the peer makes the matching one; no other call may
be made meanwhile; pieces match by their order alone; an abort frees the caller's side and never the peer's. A ``World``
scripts what NCCL and its peers may do: be slow, never answer, fail, take long to abort, change bytes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

import torch
from copies import at_once
from manifest_ranks import DecodeRank

from xpyd_sidecar.kv.selection import Piece
from xpyd_sidecar.memory.marks import CopyMark
from xpyd_sidecar.transport.moves import Scatter


class Misuse(AssertionError):
    """What NCCL forbids."""


class Result(IntEnum):
    Success = 0
    RemoteError = 6
    InProgress = 7


class NcclCommMemStat(IntEnum):
    GPU_MEM_TOTAL = 3


@dataclass
class NCCLConfig:
    blocking: bool = True
    min_ctas: int = 1
    max_ctas: int = 32


class UniqueId:
    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    @staticmethod
    def from_bytes(raw: bytes) -> UniqueId:
        return UniqueId(bytes(raw))

    def __bytes__(self) -> bytes:
        return self.raw


@dataclass
class World:
    """What the two sides share, and the script."""

    open_after_s: float = 0.0
    never_open: bool = False
    fail_at: int = 0
    """The nth call of a communicator fails."""
    stuck_at: int = 0
    """The nth call of a communicator is never over."""
    never_abort: bool = False
    spins: bool = False
    """Of communicators that are made from now on: a call is over at once, so that others may be made behind it, and its
    kernel runs until the peer has called or the communicator is aborted (``nccl_streams``)."""
    allocates: bool = False
    """To make a group, and to move its first piece, takes memory of a GPU: that waits for the process's receives, and the
    process's sends wait for it."""
    change: Callable[[torch.Tensor], None] | None = None
    """Applied to what is received."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    pairs: dict[bytes, dict[int, Communicator]] = field(default_factory=dict)
    minted: int = 0
    threads: set[str] = field(default_factory=set)
    """Those that have called, aborts aside."""
    most_open: int = 0
    carried: int = 0
    """Bytes that have come."""
    misuse: list[str] = field(default_factory=list)
    kernels: dict[int, set[Communicator]] = field(default_factory=dict)
    """That run, by stream."""

    def alive(self) -> int:
        """Communicators that have memory."""
        return sum(one.state != "ended" for pair in self.pairs.values() for one in pair.values())


class Communicator:
    """One rank of a pair."""

    def __init__(self, world: World, process: object, rank: int, pair: dict[int, Communicator], config: NCCLConfig) -> None:
        self.world = world
        self.process = process
        self.open = self.used = False
        self.rank = rank
        self.config = config
        self.born = time.monotonic()
        self.state: Literal["alive", "failed", "ended"] = "alive"
        self.call: tuple[Literal["send", "recv"], torch.Tensor] | None = None
        self.behind: deque[tuple[Literal["send", "recv"], torch.Tensor]] = deque()
        """Calls whose kernels wait for that one's."""
        self.calls = 0
        self.pair = pair
        self.spins = world.spins
        self.stream = 0

    @property
    def peer(self) -> Communicator | None:
        return self.pair.get(1 - self.rank)

    def get_async_error(self) -> Result:
        with self.world.lock:
            self._called(quiet=True)
            if self.state == "failed":
                return Result.RemoteError
            if self._opening():
                return Result.InProgress
            self._match()
            return Result.InProgress if self.call is not None and not self.spins else Result.Success

    def _opening(self) -> bool:
        late = time.monotonic() - self.born < self.world.open_after_s
        if self.peer is None or late or self.world.never_open:
            return True
        if not self.open and (self._waits() or self.peer._waits()):
            return True
        self.open = True
        return False

    def _beside(self) -> list[Communicator]:
        """All of its process that live."""
        return [one for pair in self.world.pairs.values() for one in pair.values()
                if one.process is self.process and one.state == "alive"]

    def _waits(self) -> bool:
        """Whether what takes memory in its process waits: a receive runs."""
        return self.world.allocates and any(one.used and one.call is not None and one.call[0] == "recv"
                                            for one in self._beside())

    def _takes(self) -> bool:
        """Whether something takes memory in its process."""
        return any(not one.open or (one.call is not None and not one.used) for one in self._beside())

    def _match(self) -> None:
        """Move what both sides have called for, as the two kernels would."""
        peer = self.peer
        if peer is None or self.call is None or peer.call is None or peer.state != "alive":
            return
        if self.world.stuck_at and self.world.stuck_at <= min(self.calls, peer.calls):
            return
        (how, mine), (other, theirs) = self.call, peer.call
        if how == other or len(mine) != len(theirs) or self.calls - len(self.behind) != peer.calls - len(peer.behind):
            self.state = peer.state = "failed"
            self.world.misuse.append(f"{how} {len(mine)} bytes met {other} {len(theirs)}, calls {self.calls} {peer.calls}")
            return
        sender = self if how == "send" else peer
        if (sender._takes() and sender._waits()) if self.used else (self._waits() or peer._waits()):
            return
        self.used = peer.used = True
        source, target = (mine, theirs) if how == "send" else (theirs, mine)
        target.copy_(source)
        self.world.carried += len(target)
        if self.world.change is not None:
            self.world.change(target)
        self._next()
        peer._next()

    def _next(self) -> None:
        """A kernel has ended."""
        self.call = self.behind.popleft() if self.behind else None
        if self.call is None:
            self.world.kernels.get(self.stream, set()).discard(self)

    def send(self, data: torch.Tensor, peer: int, *, stream: int) -> None:
        self._launch("send", data, peer, stream)

    def recv(self, data: torch.Tensor, peer: int, *, stream: int) -> None:
        self._launch("recv", data, peer, stream)

    def _launch(self, how: Literal["send", "recv"], data: torch.Tensor, peer: int, stream: int) -> None:
        with self.world.lock:
            self._called()
            if peer != 1 - self.rank:
                raise Misuse(f"rank {self.rank} calls rank {peer}")
            self.calls += 1
            if self.world.fail_at and self.calls >= self.world.fail_at:
                self.state = "failed"
                return
            self.stream = stream
            if self.call is None:
                self.call = how, data
            else:
                self.behind.append((how, data))
            if self.spins:
                self.world.kernels.setdefault(stream, set()).add(self)

    def _called(self, *, quiet: bool = False) -> None:
        self.world.threads.add(threading.current_thread().name)
        wrong = ""
        if self.state == "ended":
            wrong = "called after its end"
        elif not quiet and ((self.call is not None and not self.spins) or self._opening()):
            wrong = "called while a call is in progress"
        if wrong:
            self.world.misuse.append(wrong)
            raise Misuse(wrong)

    def get_last_error(self) -> str:
        return "scripted"

    def get_mem_stat(self, stat: NcclCommMemStat) -> int:
        assert stat is NcclCommMemStat.GPU_MEM_TOTAL
        return 1_000_000

    def abort(self) -> None:
        while self.world.never_abort:
            time.sleep(0.01)
        with self.world.lock:
            self.state = "ended"
            self.behind.clear()
            self._next()


class FakeNccl:
    """The module, for one of the processes that a test plays."""

    NCCLConfig = NCCLConfig
    UniqueId = UniqueId
    NcclCommMemStat = NcclCommMemStat

    def __init__(self, world: World) -> None:
        self._world = world
        module = self

        class Bound:
            @staticmethod
            def init(nranks: int, rank: int, unique_id: UniqueId, config: NCCLConfig) -> Communicator:
                return module._init(nranks, rank, unique_id, config)

        self.Communicator = Bound

    def get_unique_id(self) -> UniqueId:
        with self._world.lock:
            self._world.minted += 1
            return UniqueId(self._world.minted.to_bytes(16, "big") * 8)

    def _init(self, nranks: int, rank: int, unique_id: UniqueId, config: NCCLConfig) -> Communicator:
        world = self._world
        with world.lock:
            if nranks != 2 or config.blocking:
                raise Misuse(f"{nranks} ranks, blocking {config.blocking}")
            pair = world.pairs.setdefault(bytes(unique_id), {})
            if rank in pair:
                raise Misuse(f"rank {rank} joins twice")
            pair[rank] = Communicator(world, self, rank, pair, config)
            world.most_open = max(world.most_open, world.alive())
            return pair[rank]

    @staticmethod
    def get_error_string(code: int) -> str:
        return Result(code).name


class HostDevice:
    """Host memory in the place of a GPU's. ``marks``: when what its one stream does is done."""

    def __init__(self, name: str, marks: Callable[[], CopyMark] = at_once) -> None:
        self.name = name
        self._marks = marks

    def enter(self) -> None:
        """Threads need no device."""

    def stream(self) -> Any:
        return None

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return contextlib.nullcontext(stream)

    def handle(self, stream: Any) -> int:
        return 0

    def mark(self, stream: Any) -> CopyMark:
        return self._marks()

    def settle(self) -> None:
        """Everything is done at once."""

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)


class OneRing:
    """A ring whose memory is the same for the device and the host (``links.RingMemory``)."""

    def __init__(self, decode: DecodeRank) -> None:
        self._decode = decode

    def device(self, at: int, size: int) -> torch.Tensor:
        return torch.from_numpy(self._decode.ring)[at:at + size]

    def host_places(self, batch: Sequence[Piece], at: int) -> Sequence[Scatter]:
        return self._decode.landing.host_places(batch, at)
