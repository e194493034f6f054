"""Explores every state of a group's rounds within bounds, with the very functions that agents and launchers run.

    explore(Bounds(2))            →  Found(verdict="ok", states=…, transitions=…, trace=())

A state is the lead, and for each member its seat, its launcher, the engine that really runs, and what is on its way between
it and the lead. The world may, as often as ``faults`` says, kill an engine or a launcher, start an agent again, put a new
pod in a member's place, lose a message or deliver it later, and let time pass for one of them alone.

All clocks stand at 0: time passes by making what was kept older. What has to be true in every state is in ``fault``; and
from every state in which the world does no more the group must come to serve (``recovers``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal, NamedTuple

from state_space import Found, all_states

from xpyd_sidecar.agent.group import Lead, Seat
from xpyd_sidecar.contract.group import GroupRound, MemberAnswer, MemberHello, MemberState
from xpyd_sidecar.contract.ids import InstanceName
from xpyd_sidecar.member.__main__ import next_step

OLD_S = 20.0
Broken = Literal["", "no promise", "no turn", "begun twice", "seat waits for ever", "ready without all"]


class Bounds(NamedTuple):
    """What the world may do, and which rule is left out."""

    size: int
    faults: int = 1
    broken: Broken = ""
    kinds: frozenset[str] = frozenset()
    """Words of the faults that happen; empty: all of them."""


class Site(NamedTuple):
    """A member."""

    seat: Seat
    boot: int = 0
    """Of its agent."""
    launcher: MemberState = MemberState("l", 0)
    up: bool = True
    """The launcher's process lives."""
    read: GroupRound | None = None
    """What the launcher has read and not yet acted on."""
    engine: str = ""
    """Life of the engine that really runs."""
    begun: str = ""
    """That one began last in this pod."""
    hello: MemberHello | None = None
    """On its way to the lead."""
    late: MemberHello | None = None
    """Taken for lost, and comes at some time."""
    answer: MemberAnswer | None = None


class State(NamedTuple):
    lead: Lead
    boot: int
    sites: tuple[Site, ...]
    faults: int
    bad: str = ""


def start(bounds: Bounds) -> State:
    """The first state."""
    return State(Lead.restore(_boot(0), bounds.size, 0.0, None), 0, (Site(Seat()),) * bounds.size, bounds.faults)


def _boot(number: int) -> str:
    return f"{number:024x}"


def _at(state: State, index: int, site: Site, **more: object) -> State:
    return state._replace(sites=(*state.sites[:index], site, *state.sites[index + 1:]), **more)  # type: ignore[arg-type]


def _seq(state: State, index: int) -> int:
    """Above everything that is known of this member: numbers stay small, so that states are finitely many."""
    known, site = state.lead.members[index], state.sites[index]
    return max(known.seq if known else 0, site.late.seq if site.late else 0) + 1


def _shrunk(state: State) -> State:
    """The same state with the least counts of hellos."""
    sites, members = list(state.sites), list(state.lead.members)
    for index, site in enumerate(sites):
        known = members[index]
        seen = sorted({one.seq for one in (known, site.late, site.hello) if one is not None})
        rank = {seq: place for place, seq in enumerate(seen)}
        if known is not None:
            members[index] = known._replace(seq=rank[known.seq])
        sites[index] = site._replace(late=_renumbered(site.late, rank), hello=_renumbered(site.hello, rank))
    return state._replace(lead=state.lead._replace(members=tuple(members)), sites=tuple(sites))


def _renumbered(hello: MemberHello | None, rank: dict[int, int]) -> MemberHello | None:
    if hello is None:
        return None
    return _said(hello.index, hello.boot, rank[hello.seq], held=hello.held, call=hello.call, beat=hello.beat)


def _said(index: int, boot: str, seq: int, *, held: str, call: str, beat: str) -> MemberHello:
    return MemberHello(1, InstanceName("s-e0"), index, "layout", boot, seq, held, call, beat)  # type: ignore[arg-type]


def _hello(bounds: Bounds, state: State, index: int) -> tuple[Site, MemberHello]:
    """A member's agent looks at its launcher, and says what it sees."""
    site = state.sites[index]
    seat = site.seat.watch(site.launcher if site.up else None)
    held = seat.member_state
    if bounds.broken == "no turn" and not seat.life and held == "busy" and not site.launcher.running:
        held = "free"
    beat = "beats" if held == "running" and site.engine else ""
    return site._replace(seat=seat), _said(index, _boot(site.boot), _seq(state, index), held=held,
                                           call=seat.promised, beat=beat)


def _heard(bounds: Bounds, state: State, hello: MemberHello) -> tuple[State, MemberAnswer]:
    before = state.lead
    if bounds.broken == "no promise":
        hello = _said(hello.index, hello.boot, hello.seq, held=hello.held, call=before.life or before.call, beat=hello.beat)
    lead = before.receive(hello, 0.0)
    bad = state.bad
    if lead.life and not before.life and any(site.engine for site in state.sites):
        bad = "a life begins while an engine runs"
    call, life = lead.answer()
    return state._replace(lead=lead, bad=bad), MemberAnswer(1, call, life, "leader", 1)


def _told(bounds: Bounds, site: Site, answer: MemberAnswer) -> Site:
    seat = site.seat
    if bounds.broken == "no promise" and answer.life:
        seat = seat._replace(promised=answer.life)
    return site._replace(seat=seat.receive(answer, 0.0), answer=None)


def _agents(bounds: Bounds, s: State, i: int) -> Iterator[tuple[str, State]]:
    site = s.sites[i]
    if i == 0:
        looked, said = _hello(bounds, s, 0)
        after, answer = _heard(bounds, _at(s, 0, looked), said)
        yield "leader looks at itself", _at(after, 0, _told(bounds, after.sites[0], answer))
        return
    if site.answer is not None:
        yield f"{i} is answered", _at(s, i, _told(bounds, site, site.answer))
    elif site.hello is None:
        looked, said = _hello(bounds, s, i)
        yield f"hello of {i}: {said.held}", _at(s, i, looked._replace(hello=said))
    if site.hello is not None:
        after, answer = _heard(bounds, _at(s, i, site._replace(hello=None)), site.hello)
        yield f"lead hears {i}", _at(after, i, after.sites[i]._replace(answer=answer))
    if site.late is not None:
        after, _ = _heard(bounds, _at(s, i, site._replace(late=None)), site.late)
        yield f"lead hears {i} late", after


def _launcher(bounds: Bounds, s: State, i: int) -> Iterator[tuple[str, State]]:
    site = s.sites[i]
    if not site.up:
        if bounds.broken == "begun twice":
            yield f"launcher {i} comes back", _at(s, i, site._replace(up=True, launcher=MemberState("l", 0)))
        else:
            known = site.launcher
            back = MemberState("l", 0, life=known.life)
            yield f"launcher {i} comes back", _at(s, i, site._replace(up=True, launcher=back))
        return
    state = site.launcher
    if state.running and not site.engine:
        yield f"launcher {i} sees the end", _at(s, i, site._replace(launcher=_now(state, running=False)))
        return
    if site.read is None:
        told = site.seat.round
        if next_step(state, told) or state.turn != told.turn:
            yield f"launcher {i} reads {told.life[-4:] or 'nothing'}", _at(s, i, site._replace(read=told))
        return
    told, site = site.read, site._replace(read=None)
    match next_step(state, told):
        case "begin":
            bad = "an engine begins beside one of another life" if any(
                other.engine not in ("", told.life) for other in s.sites) else s.bad
            bad = "a life begins twice" if site.begun == told.life else bad
            now = _now(state, turn=told.turn, life=told.life, running=True)
            yield f"launcher {i} begins", _at(s, i, site._replace(launcher=now, engine=told.life, begun=told.life),
                                                bad=bad)
        case "end":
            now = _now(state, turn=told.turn, running=False)
            yield f"launcher {i} ends", _at(s, i, site._replace(launcher=now, engine=""))
        case _:
            yield f"launcher {i} has seen it", _at(s, i, site._replace(launcher=_now(state, turn=told.turn)))


def _now(state: MemberState, turn: int | None = None, life: str | None = None, *,
         running: bool | None = None) -> MemberState:
    return MemberState("l", 0, state.turn if turn is None else turn, state.life if life is None else life,
                       state.running if running is None else running)


def _aged(lead: Lead, by: float) -> Lead:
    """As it is after some time: whatever beats, beats another time then."""
    def older(at: float) -> float:
        return max(at - by, -OLD_S)
    members = tuple(None if one is None else one._replace(heard=older(one.heard), beaten=older(one.beaten), beat="before")
                    for one in lead.members)
    return lead._replace(members=members, since=older(lead.since))


def _world(bounds: Bounds, s: State) -> Iterator[tuple[str, State]]:
    if s.faults:
        yield from (move for move in _faults(bounds, s)
                    if not bounds.kinds or any(word in move[0] for word in bounds.kinds))


def _faults(bounds: Bounds, s: State) -> Iterator[tuple[str, State]]:
    s = s._replace(faults=s.faults - 1)
    yield "time passes for the lead", s._replace(lead=_aged(s.lead, OLD_S).tick(0.0))
    for i, site in enumerate(s.sites):
        if site.engine:
            yield f"engine {i} dies", _at(s, i, site._replace(engine=""))
        if site.up:
            yield f"launcher {i} dies", _at(s, i, site._replace(up=False, engine="", read=None))
        if i and site.seat.life and bounds.broken != "seat waits for ever":
            yield f"time passes for {i}", _at(s, i, site._replace(seat=site.seat._replace(heard=-OLD_S).tick(0.0)))
        if site.hello is not None:
            yield f"hello of {i} is lost", _at(s, i, site._replace(hello=None))
            yield f"hello of {i} is late", _at(s, i, site._replace(hello=None, late=site.hello))
        if site.answer is not None:
            yield f"answer to {i} is lost", _at(s, i, site._replace(answer=None))
        again = site._replace(seat=Seat.restore(0.0, site.seat.round), boot=site.boot + 1, hello=None, answer=None)
        lead = Lead.restore(_boot(s.boot + 1), bounds.size, 0.0, site.seat.round) if i == 0 else s.lead
        boot = s.boot + (i == 0)
        yield f"agent {i} is started again", _at(s, i, again, lead=lead, boot=boot)
        lead = Lead.restore(_boot(s.boot + 1), bounds.size, 0.0, None) if i == 0 else s.lead
        yield f"pod {i} is a new one", _at(s, i, Site(Seat(), site.boot + 1, late=site.late), lead=lead, boot=boot)


def moves(bounds: Bounds, s: State) -> list[tuple[str, State]]:
    """Everything that can happen."""
    out = list(_world(bounds, s))
    for i in range(bounds.size):
        out += _agents(bounds, s, i)
        out += _launcher(bounds, s, i)
    return [(name, _shrunk(after)) for name, after in out]


def fault(bounds: Bounds, s: State) -> str:
    """What is wrong with a state."""
    if s.bad:
        return s.bad
    lives = {site.engine for site in s.sites if site.engine}
    if len(lives) > 1:
        return "two lives at once"
    ready = not s.lead.problem(0.0)
    if bounds.broken == "ready without all":
        ready = bool(s.lead.life)
    if ready and not all(one is not None and one.held == "running" for one in s.lead.members):
        return "ready with a hole"
    if ready and not _aged(s.lead, 6.0).problem(0.0):
        return "ready without having heard"
    return ""


def recovers(bounds: Bounds, s: State, turns: int = 40) -> bool:
    """Whether the group serves, once the world does no more and everybody does what it can."""
    s = s._replace(faults=0)
    for turn in range(turns):
        if not s.lead.problem(0.0) and all(site.engine == s.lead.life for site in s.sites):
            return True
        for i in range(bounds.size):
            for _ in range(3):
                s = next((after for _, after in _launcher(bounds, s, i)), s)
            for _ in range(3 if i else 1):
                s = _shrunk(next((after for _, after in _agents(bounds, s, i)), s))
        if turn == turns // 2:  # a seat that waits for an answer which is a lead's no more hears nothing, and gives up
            s = s._replace(lead=_aged(s.lead, OLD_S).tick(0.0))
    return False


def explore(bounds: Bounds, most: int = 2_000_000, check_every: int = 211) -> Found:
    """Breadth first, so the way to a bad state is a shortest one."""
    def wrong(state: State, _: object, met: int) -> str:
        if found := fault(bounds, state):
            return found
        return "stuck" if met % check_every == 0 and not recovers(bounds, state) else ""

    return all_states(start(bounds), lambda state: moves(bounds, state), wrong, most)


def walk(bounds: Bounds, rng: random.Random, most: int = 300) -> Found:
    """One random way, and whether the group serves at its end."""
    state, names = start(bounds), list[str]()
    for _ in range(most):
        following = moves(bounds, state)
        calm = [move for move in following if move[1].faults == state.faults]
        name, state = rng.choice(calm if calm and rng.random() < 0.9 else following)
        names.append(name)
        if wrong := fault(bounds, state):
            return Found(wrong, len(names), len(names), tuple(names))
    return Found("ok" if recovers(bounds, state) else "stuck", len(names), len(names), tuple(names))
