from __future__ import annotations

import random

import msgspec
from beats import SERVICE, beat

from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role, State
from xpyd_sidecar.contract.membership import WIRE_VERSION, Goodbye
from xpyd_sidecar.router.fleet import replica as rep
from xpyd_sidecar.router.fleet.member import BeatRefused, Probed
from xpyd_sidecar.router.fleet.roster import Roster

_KINDS = (State.STARTING, State.READY, State.DRAINING)


def roster() -> Roster:
    return Roster(SERVICE, started=0.0, settle_s=1.0, missed_beats=3)


def seen(made: Roster) -> list[tuple[object, ...]]:
    return [(m.name, m.role, m.state, m.incarnation, m.http, m.epoch, m.suspended, m.beat_at) for m in made.members()]


def random_event(rng: random.Random, at: float) -> rep.Event:
    name, incarnation = InstanceName(f"e{rng.randrange(6)}"), Incarnation(f"i{rng.randrange(2)}")
    match rng.randrange(6):
        case 0 | 1 | 2:
            role = rng.choice([Role.PREFILL, Role.DECODE])
            return rep.Message(at, beat(name, role, f"127.0.0.1:{rng.randrange(1, 9)}", state=rng.choice(_KINDS),
                                        incarnation=incarnation, epoch=rng.randrange(3)))
        case 3:
            return rep.RefusedAt(at, name, incarnation, "connection refused")
        case 4:
            return rep.ProbeEnded(at, name, incarnation, rng.choice(list(Probed)), "said so")
        case _:
            if rng.random() < 0.3:
                return rep.Message(at, Goodbye(WIRE_VERSION, SERVICE, name, incarnation))
            return rep.RosterTick(at) if rng.random() < 0.7 else rep.Doubt(at, name, incarnation)


def taken(rng: random.Random, at: float, ours: Roster) -> rep.Event | None:
    """An event that the owner has taken, of which alone it tells; None: it was refused."""
    event = random_event(rng, at)
    try:
        rep.apply(ours, event)
    except BeatRefused:
        return None
    return event


def test_replicas_that_get_the_same_events_over_a_wire_are_equal() -> None:
    rng = random.Random(5)
    decode = msgspec.msgpack.Decoder(rep.Event).decode
    for _ in range(30):
        ours, theirs, at = roster(), roster(), 0.0
        for _ in range(200):
            at += rng.random() * 2
            if (event := taken(rng, at, ours)) is None:
                continue
            rep.apply(theirs, decode(msgspec.msgpack.encode(event)))
            assert seen(ours) == seen(theirs)


def test_a_replica_that_missed_events_catches_up() -> None:
    rng = random.Random(11)
    for _ in range(100):
        ours, theirs, beginning, at = roster(), roster(), rep.Beginning(), 0.0
        names: set[str] = set()
        for number in range(150):
            at += rng.random() * 2
            if (event := taken(rng, at, ours)) is None:
                continue
            beginning.note(event)
            here = {str(member.name) for member in ours.members()}
            if number < 50 or number > 100:
                rep.follow(theirs, event)
                for name in names - here:
                    rep.forget(theirs, at, InstanceName(name))
            elif number == 100:
                rep.catch_up(theirs, beginning.events(ours))
                assert seen(theirs) == seen(ours)
            names = here


def test_what_the_owner_took_a_replica_takes_too() -> None:
    theirs = roster()
    rep.follow(theirs, rep.Message(1.0, beat("d0", epoch=5)))
    rep.follow(theirs, rep.Message(2.0, beat("d0", epoch=3)))
    assert [member.epoch for member in theirs.members()] == [3]
    rep.forget(theirs, 3.0, InstanceName("d0"))
    rep.forget(theirs, 3.0, InstanceName("d0"))
    assert not theirs.members()


def test_a_beginning_makes_an_equal_roster_at_any_time() -> None:
    rng = random.Random(7)
    for _ in range(100):
        ours, beginning, at = roster(), rep.Beginning(), 0.0
        for _ in range(rng.randrange(100)):
            at += rng.random() * 2
            if (event := taken(rng, at, ours)) is None:
                continue
            beginning.note(event)
        fresh = roster()
        for event in beginning.events(ours):
            rep.apply(fresh, event)
        assert seen(fresh) == seen(ours)


def test_a_replica_made_late_is_as_settled_as_the_roster_it_follows() -> None:
    late = Roster(SERVICE, started=100.0, settle_s=10.0, missed_beats=3)
    assert not late.settled(105.0)
    late.begin(0.0, 10.0, beside_engine=False)
    assert late.settled(105.0)
    assert late.listened(105.0)
