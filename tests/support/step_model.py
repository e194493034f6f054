"""Explores every state of the step rules within bounds, with the very functions that engines run (``xpyd_sidecar.dp``).

    explore(Bounds(work=(2, 1)))  →  Found(verdict="ok", states=…, transitions=…, trace=())

A state is all ranks, all links (FIFO), the coordinator and what the world may still do: give work, deliver KV, ask for
pauses and resume, lose frames, bring frames of an earlier epoch, kill a rank. A forward ends only when every living rank is
in it. In every state where nothing more can happen, all must be well: nobody in a forward, all at the same step, all work
done, all pauses held, or, after a death, everybody ended.

``Bounds.broken`` leaves out one rule; the exploration must then find a state that is not well, and the way to it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal, NamedTuple

from state_space import Found, all_states

from xpyd_sidecar.dp.coordinator import Coordinator
from xpyd_sidecar.dp.frames import Grant, Want
from xpyd_sidecar.dp.look_ahead import LookAhead
from xpyd_sidecar.dp.rank import Dummy, Forward, GrantReceived, Idle, PauseAsked, Rank

EPOCH = 7
Broken = Literal["", "count before schedule", "no heartbeat", "no dummy while waiting for KV", "vote too early",
                 "epoch ignored", "no watch"]


class Bounds(NamedTuple):
    """What the world may do."""

    work: tuple[int, ...]
    """By rank: tokens of a request that may arrive."""
    kv: tuple[int, ...] = ()
    """By rank: tokens of a request that waits for KV first."""
    kv_comes: bool = True
    policy: LookAhead = LookAhead()
    early_stop: bool = False
    """A request may end after any token, whatever its budget."""
    losses: int = 0
    pause: bool = False
    """Every rank is asked to pause (and sleeps then) and, once all do, to go on."""
    ghosts: int = 0
    """Frames of an earlier epoch that arrive."""
    deaths: int = 0
    broken: Broken = ""

    @property
    def size(self) -> int:
        return len(self.work)


class Site(NamedTuple):
    """A rank and what the machine does not know."""

    rank: Rank
    run: int = 0
    kv: int = 0
    inside: int = 0
    """0: outside; 1: in a forward with tokens; 2: in a dummy."""
    paused: bool = False
    alive: bool = True


class State(NamedTuple):
    sites: tuple[Site, ...]
    up: tuple[tuple[Want, ...], ...]
    down: tuple[tuple[Grant, ...], ...]
    coordinator: Coordinator
    world: tuple[tuple[str, int], ...]
    losses: int
    ghosts: int
    deaths: int


def start(bounds: Bounds) -> State:
    """The first state."""
    kv = bounds.kv or (0,) * bounds.size
    world = [("work", i) for i, tokens in enumerate(bounds.work) if tokens]
    world += [("kv", i) for i, tokens in enumerate(kv) if tokens]
    world += [("pause", i) for i in range(bounds.size)] if bounds.pause else []
    none: tuple[tuple[()], ...] = ((),) * bounds.size
    sites = tuple(Site(Rank(EPOCH, i, bounds.policy)) for i in range(bounds.size))
    return State(sites, none, none, Coordinator.initial(EPOCH, bounds.size), tuple(world), bounds.losses, bounds.ghosts,
                 bounds.deaths)


def _put(values: tuple, i: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:i], value, *values[i + 1:])


def _site(state: State, i: int, site: Site, want: Want | None = None) -> State:
    up = _put(state.up, i, (*state.up[i], want)) if want is not None else state.up
    return state._replace(sites=_put(state.sites, i, site), up=up)


def _world(bounds: Bounds, s: State) -> Iterator[tuple[str, State]]:
    kv = bounds.kv or (0,) * bounds.size
    for n, (what, i) in enumerate(s.world):
        rest = s._replace(world=s.world[:n] + s.world[n + 1:])
        site = s.sites[i]
        match what:
            case "work":
                yield f"work {i}", _site(rest, i, site._replace(run=site.run + bounds.work[i]))
            case "kv":
                more = rest._replace(world=(*rest.world, ("kv comes", i))) if bounds.kv_comes else rest
                yield f"waits for kv {i}", _site(more, i, site._replace(kv=kv[i]))
            case "kv comes":
                yield f"kv comes {i}", _site(rest, i, site._replace(run=site.run + site.kv, kv=0))
            case "pause":
                rank, _ = site.rank.handle(PauseAsked())
                yield f"pause {i}", _site(rest, i, site._replace(rank=rank, paused=True))
            case "resume":
                yield f"resume {i}", _site(rest, i, site._replace(paused=False))
    if s.deaths:
        for i, site in enumerate(s.sites):
            if site.alive:
                yield f"rank {i} dies", _site(s._replace(deaths=s.deaths - 1), i, site._replace(alive=False))


def _rank(bounds: Bounds, s: State, i: int) -> Iterator[tuple[str, State]]:
    """What rank ``i`` does next: the engine's loop in small."""
    site = s.sites[i]
    rank = site.rank
    if site.inside or not site.alive:
        return
    runs = site.run > 0 and not site.paused
    waits = site.kv > 0 and not site.paused
    early = bounds.broken == "vote too early" and site.paused and rank.vote < rank.pauses
    if early:
        vote = rank._replace(vote=rank.pauses)  # says that it is done before what it will still ask for
        yield f"{i} votes early", _site(s, i, site._replace(rank=vote), vote.want)
        if site.run:
            after, want = rank._replace(vote=rank.pauses).handle(Forward(site.run))
            both = _site(s, i, site._replace(rank=after, inside=1), vote.want)
            yield f"{i} votes, then begins {after.local}", _site(both, i, both.sites[i], want)
        return
    if runs:
        after, want = rank.handle(Forward(site.run))
        yield f"{i} begins {after.local}", _site(s, i, site._replace(rank=after, inside=1), want)
    elif waits and bounds.broken == "count before schedule":
        if rank.local < 8:  # counts what is no forward
            after, want = rank.handle(Forward(site.kv))
            yield f"{i} counts {after.local}", _site(s, i, site._replace(rank=after), want)
    elif rank.is_behind:
        asleep = site.paused and not rank.pausing
        if not asleep and not (waits and bounds.broken == "no dummy while waiting for KV"):
            after, want = rank.handle(Dummy())
            yield f"{i} dummy {after.local}", _site(s, i, site._replace(rank=after, inside=2), want)
    elif not waits:
        after, want = rank.handle(Idle())
        if after != rank:
            yield f"{i} idle", _site(s, i, site._replace(rank=after), want)


def _forward_ends(bounds: Bounds, s: State) -> Iterator[tuple[str, State]]:
    if not all(site.inside and site.alive for site in s.sites):
        return
    done = tuple(site._replace(run=site.run - (site.inside == 1), inside=0) for site in s.sites)
    yield "forward ends", s._replace(sites=done)
    if bounds.early_stop:
        for i, site in enumerate(done):
            if s.sites[i].inside == 1 and site.run:
                yield f"forward ends, {i} stops", s._replace(sites=_put(done, i, site._replace(run=0)))


def _links(bounds: Bounds, s: State) -> Iterator[tuple[str, State]]:
    for i, site in enumerate(s.sites):
        if s.up[i] and s.sites[0].alive:
            taken = s._replace(up=_put(s.up, i, s.up[i][1:]))
            yield f"coordinator hears {i}", _hear(taken, s.up[i][0])
            if s.losses:
                yield f"lost on the way up: {i}", taken._replace(losses=s.losses - 1)
        if s.down[i] and site.alive:
            taken = s._replace(down=_put(s.down, i, s.down[i][1:]))
            rank, _ = site.rank.handle(GrantReceived(s.down[i][0]))
            yield f"{i} hears", _site(taken, i, site._replace(rank=rank))
            if s.losses:
                yield f"lost on the way down: {i}", taken._replace(losses=s.losses - 1)
        if bounds.broken != "no heartbeat" and site.alive and s.sites[0].alive:
            if not s.up[i] and s.coordinator.receive(site.rank.want) != s.coordinator:
                yield f"heartbeat of {i}", _hear(s, site.rank.want)
            rank, _ = site.rank.handle(GrantReceived(s.coordinator.grant))
            if not s.down[i] and rank != site.rank:
                yield f"heartbeat to {i}", _site(s, i, site._replace(rank=rank))
    if s.ghosts:
        epoch = EPOCH if bounds.broken == "epoch ignored" else EPOCH - 1
        for i in range(bounds.size):
            ghost = Want(1, epoch, i, 1, 1, vote=9)
            yield f"frame of an earlier rank {i}", _hear(s._replace(ghosts=s.ghosts - 1), ghost)


def _hear(s: State, want: Want) -> State:
    after = s.coordinator.receive(want)
    down = tuple((*link, after.grant) for link in s.down) if after.grant != s.coordinator.grant else s.down
    return s._replace(coordinator=after, down=down)


def _ends(bounds: Bounds, s: State) -> Iterator[tuple[str, State]]:
    """Whose peer is silent ends: the coordinator (with rank 0) for any rank, a rank for the coordinator."""
    if bounds.broken == "no watch" or all(site.alive for site in s.sites):
        return
    for i, site in enumerate(s.sites):
        if site.alive and (i == 0 or not s.sites[0].alive):
            yield f"{i} ends for a silent peer", _site(s, i, site._replace(alive=False))


def _resume(bounds: Bounds, s: State) -> Iterator[tuple[str, State]]:
    held = all(site.paused and not site.inside and not site.rank.pausing and site.rank.pauses for site in s.sites)
    if held and not any(what == "resume" for what, _ in s.world):
        yield "all paused", s._replace(world=(*s.world, *(("resume", i) for i in range(bounds.size))))


def moves(bounds: Bounds, s: State) -> list[tuple[str, State]]:
    """Everything that can happen."""
    out = [*_world(bounds, s), *_forward_ends(bounds, s), *_links(bounds, s), *_ends(bounds, s)]
    for i in range(bounds.size):
        out += _rank(bounds, s, i)
    if bounds.pause:
        out += _resume(bounds, s)
    return out


def fault(bounds: Bounds, s: State, *, last: bool) -> str:
    """What is wrong with a state; ``last``: nothing more can happen in it."""
    inside = {site.rank.local for site in s.sites if site.inside}
    if len(inside) > 1 and all(site.inside for site in s.sites) and bounds.broken != "count before schedule":
        return "misaligned"
    if not last:
        return ""
    if any(not site.alive for site in s.sites):
        return "" if all(not site.alive for site in s.sites) else "stuck"
    well = (not inside and len({site.rank.local for site in s.sites}) == 1
            and all(not site.run and not site.rank.is_behind for site in s.sites)
            and all(not site.kv or not bounds.kv_comes for site in s.sites)
            and all(not site.paused for site in s.sites))
    return "" if well else "stuck"


def explore(bounds: Bounds, most: int = 3_000_000) -> Found:
    """Breadth first, so the way to a bad state is a shortest one."""
    return all_states(start(bounds), lambda state: moves(bounds, state),
                      lambda state, following, _: fault(bounds, state, last=not following), most)


def walk(bounds: Bounds, rng: random.Random, most: int = 10_000) -> Found:
    """One random way to its end."""
    state = start(bounds)
    names: list[str] = []
    for _ in range(most):
        following = moves(bounds, state)
        if wrong := fault(bounds, state, last=not following):
            return Found(wrong, 1, len(names), tuple(names))
        if not following:
            return Found("ok", 1, len(names), tuple(names))
        name, state = rng.choice(following)
        names.append(name)
    return Found("cut off", 1, len(names), tuple(names))
