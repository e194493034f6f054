"""Reads of peers' memory by one agent for all sessions of the process: what ``kv.reads`` decides, carried out.

Used on the thread that owns the agents (``thread``). What belongs to one session is guarded by itself: whatever NIXL raises
ends that session alone. A session is told what became of it on its own I/O thread (``ReadMember``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, Protocol

from xpyd_sidecar.kv import reads
from xpyd_sidecar.kv.reads import TICKET_BYTES, ReadLimits, Reads
from xpyd_sidecar.kv.ring import Ring
from xpyd_sidecar.kv.session_bodies import NixlMemory
from xpyd_sidecar.transport.nixl.agent import ReadAgent
from xpyd_sidecar.transport.nixl.driver import NixlDriver, NixlReader, ReadHandle, ReadSpan
from xpyd_sidecar.transport.tickets import SESSIONS

SPARE_PEERS: Final = 64
"""That are known and not read, before the agent ends at a moment when nothing is under way."""


class ReadMember(Protocol):
    """Decode's side of a session, called on its own I/O thread."""

    def post(self, call: Callable[[], None]) -> None:
        """Have a call made on that thread."""

    def on_open(self) -> None:
        """Prefill's memory can be read."""

    def come(self, numbers: Sequence[tuple[int, int]]) -> None:
        """Orders are here, each at an address, and were what prefill had told of."""

    def on_order_dropped(self, number: int) -> None:
        """An order does not come, and nothing writes into what it was to fill."""

    def on_lost(self, reason: str, *, late: bool) -> None:
        """Nothing more is read. ``late``: the peer has not answered in time."""


class ReadOrder(NamedTuple):
    """Bytes of a peer that lie one behind the other here."""

    number: int
    size: int
    reads: Sequence[Sequence[tuple[int, int, int]]]
    """Of each read: where in the peer's memory, where in the ``size`` bytes here, and how many."""
    at: int | None
    """Where in the memory that was given for orders; None: a slot has to be found."""


@dataclass
class BegunOrder:
    """An order. ``handles``: its reads that are under way; ``address``: where it lies, once it was begun."""

    order: ReadOrder
    address: int = 0
    handles: list[ReadHandle] = field(default_factory=list)
    failed: str = ""
    """Why not all of it comes."""


@dataclass
class ReadPeer:
    """A session. ``ticket``: the read of it, which is begun again and again; ``proving``: it is under way.

    ``reached``: the agent has known its peer.
    """

    member: ReadMember
    memory: NixlMemory
    cell: int
    ticket: ReadHandle | None = None
    proving: bool = False
    reached: bool = False


class Reading:
    """All sessions of the process that read."""

    def __init__(self, driver: NixlDriver, limits: ReadLimits, slot_bytes: int) -> None:
        """``slot_bytes``: memory for orders that have none, a multiple of what one read has at most."""
        self.agent = ReadAgent(driver, slot_bytes)
        self._machine = Reads(Ring(slot_bytes), limits)
        self._peers: dict[int, ReadPeer] = {}
        self._orders: dict[tuple[int, int], BegunOrder] = {}
        """By session and number, until they are placed or dropped."""
        self._flights: dict[tuple[int, int], BegunOrder] = {}
        """Those of them that are under way."""
        self._cells = deque(range(SESSIONS))
        self._now = 0.0

    @property
    def working(self) -> bool:
        """Whether anything is under way that somebody waits for."""
        return self._machine.working

    @property
    def lingers(self) -> bool:
        """Whether anything is under way that nobody waits for."""
        return self._machine.lingers

    @property
    def flying(self) -> bool:
        """Whether anything is under way."""
        return any(self._flying(session) for session in self._peers)

    def _flying(self, session: int) -> bool:
        """Whether anything is under way in a session."""
        return self._peers[session].proving or any(its == session for its, _ in self._flights)

    # --- what sessions say ---

    def join(self, session: int, member: ReadMember, memory: NixlMemory) -> None:
        """Reach a peer's memory."""
        if not self._cells:
            member.post(partial(member.on_lost, f"{SESSIONS} sessions are open", late=False))
            return
        self._peers[session] = ReadPeer(member, memory, self._cells.popleft())
        self._carry_out(self._machine.join(session, self._now))

    def order(self, session: int, order: ReadOrder) -> None:
        """Read bytes of its peer."""
        self._orders[session, order.number] = BegunOrder(order)
        self._carry_out(self._machine.order(session, order.number, order.size, self._now, slot=order.at is None))

    def release_order(self, session: int, number: int) -> None:
        """What was handed over is not needed any more."""
        self._orders.pop((session, number), None)
        self._carry_out(self._machine.on_placed(session, number, self._now))

    def leave(self, session: int) -> None:
        """A session has ended."""
        self._carry_out(self._machine.leave(session, self._now))

    # --- time ---

    def poll_once(self, now: float) -> bool:
        """Poll the reads once. Returns whether something was done; ``now``: in seconds in which this thread has polled."""
        self._now = now
        out: list[reads.Step] = []
        moved = False
        for (session, number), one in list(self._flights.items()):
            if self._over(self._peers[session], one):
                moved = True
                del self._flights[session, number]
                out += (self._machine.on_failed(session, number, one.failed, now) if one.failed else
                        self._machine.on_done(session, number, now))
        for session, peer in list(self._peers.items()):
            if peer.proving:
                steps = self._proven(session, peer)
                moved = moved or not peer.proving
                out += steps
        self._carry_out(out)
        return moved

    def tick(self) -> None:
        """Look at deadlines, and at what peers have said beside.

        Raises:
            Exception: NIXL's own, of no session.
        """
        self._carry_out(self._machine.tick(self._now))
        spare = self.agent.spare({one.memory.agent for one in self._peers.values()})
        if self.agent.unended or (spare >= SPARE_PEERS and not self.flying):
            self._end_agent()
        self.agent.poll()

    def end(self) -> None:
        """End the agent, and with it all that is under way."""
        self._end_agent()

    def _over(self, peer: ReadPeer, one: BegunOrder) -> bool:
        """Whether nothing of an order is under way any more."""
        reader = self.agent.reader
        assert reader is not None
        under_way = []
        for handle in one.handles:
            try:
                if not reader.is_done(handle):
                    under_way.append(handle)
            except Exception as error:  # noqa: BLE001  # the binding's have no common root
                one.failed = one.failed or self._failed(peer, error)
        one.handles = under_way
        return not under_way

    def _proven(self, session: int, peer: ReadPeer) -> list[reads.Step]:
        reader = self.agent.reader
        assert reader is not None
        assert peer.ticket is not None
        try:
            peer.proving = not reader.is_done(peer.ticket)
        except Exception as error:  # noqa: BLE001  # the binding's have no common root
            peer.proving, peer.ticket = False, None
            return self._machine.on_failed(session, None, self._failed(peer, error), self._now)
        if peer.proving:
            return []
        return self._machine.proven(session, self.agent.memory.ticket(peer.cell) == peer.memory.ticket, self._now)

    # --- what the machine says ---

    def _carry_out(self, steps: Sequence[reads.Step]) -> None:
        todo = deque(steps)
        while todo:
            todo.extend(self._take(todo.popleft()))

    def _take(self, step: reads.Step) -> list[reads.Step]:
        """Carry a step out; what follows at once."""
        if isinstance(step, reads.EndAgent):
            return self._machine.on_agent_ended(self._now) if self._end_agent() else []
        peer = self._peers[step.session]
        member = peer.member
        if isinstance(step, reads.BeginRead):
            return self._begin(peer, step)
        if isinstance(step, reads.Prove):
            return self._prove(peer, step.session)
        if isinstance(step, reads.PeerOpened):
            member.post(member.on_open)
        elif isinstance(step, reads.HandOver):
            here = [(number, self._orders[step.session, number].address) for number in step.numbers]
            member.post(partial(member.come, here))
        elif isinstance(step, reads.DropOrder):
            del self._orders[step.session, step.number]
            member.post(partial(member.on_order_dropped, step.number))
        elif isinstance(step, reads.SessionLost):
            member.post(partial(member.on_lost, step.reason, late=step.late))
        else:
            self._forget(step.session)
        return []

    def _begin(self, peer: ReadPeer, step: reads.BeginRead) -> list[reads.Step]:
        one = self._orders[step.session, step.number]
        order, one.failed = one.order, ""
        try:
            reader = self._reach(peer)
            region, at = (self.agent.memory.slots, step.slot) if step.slot is not None else (self.agent.ring, order.at)
            assert region is not None
            assert at is not None
            one.address = region.address + at
            for read in order.reads:
                spans = [ReadSpan(source, one.address + into, size) for source, into, size in read]
                handle = reader.prepare(peer.memory.agent, spans, region)
                one.handles.append(handle)
                reader.begin(handle)
        except Exception as error:  # noqa: BLE001  # the binding's have no common root
            one.failed = self._failed(peer, error)
        if one.handles:
            self._flights[step.session, step.number] = one
            return []
        return self._machine.on_failed(step.session, step.number, one.failed, self._now)

    def _prove(self, peer: ReadPeer, session: int) -> list[reads.Step]:
        try:
            reader, cells = self._reach(peer), self.agent.memory.cells
            if peer.ticket is None:
                span = ReadSpan(peer.memory.ticket_at, cells.address + peer.cell * TICKET_BYTES, TICKET_BYTES)
                peer.ticket = reader.prepare(peer.memory.agent, [span], cells)
            self.agent.memory.wipe(peer.cell)
            reader.begin(peer.ticket)
        except Exception as error:  # noqa: BLE001  # the binding's have no common root
            peer.ticket = None
            return self._machine.on_failed(session, None, self._failed(peer, error), self._now)
        peer.proving = True
        return []

    def _failed(self, peer: ReadPeer, error: Exception) -> str:
        """A read of a peer has failed: in words."""
        if peer.reached:
            self.agent.on_read_failed(peer.memory.agent)
        return f"{type(error).__name__}: {error}"[:300]

    def _reach(self, peer: ReadPeer) -> NixlReader:
        """The agent, which knows this peer. Raises what ``ReadAgent.reach`` does.

        A connection that is broken is made anew for a session that begins, and for none that has used it.
        """
        name = peer.memory.agent
        anew = not peer.reached and not any(
            self._flying(session) for session, one in self._peers.items() if one.memory.agent == name)
        reader = self.agent.reach(peer.memory, anew=anew)
        peer.reached = True
        return reader

    def _forget(self, session: int) -> None:
        """Nothing of a session is under way."""
        peer = self._peers.pop(session)
        peer.ticket = None
        self._cells.append(peer.cell)

    def _end_agent(self) -> bool:
        """Nothing that was begun is written after this. False: that could not be had; to be tried again."""
        for one in self._flights.values():
            one.handles.clear()
        self._flights.clear()
        for peer in self._peers.values():
            peer.ticket, peer.proving = None, False
        return self.agent.end()
