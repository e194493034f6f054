from __future__ import annotations

import contextlib
import random

import msgspec
from beats import SERVICE, beat

from xpyd_sidecar.contract.ids import Incarnation, InstanceName, Role, State
from xpyd_sidecar.contract.membership import WIRE_VERSION, Goodbye
from xpyd_sidecar.router.fleet.member import BeatRefused, FleetMember, Probed
from xpyd_sidecar.router.fleet.roster import Roster

_KINDS = (State.STARTING, State.READY, State.DRAINING)


def roster() -> Roster:
    return Roster(SERVICE, started=0.0, settle_s=1.0, missed_beats=3)


def seen(made: Roster) -> list[tuple[object, ...]]:
    return [(m.name, m.role, m.state, m.incarnation, m.http, m.epoch, m.suspended, m.beat_at) for m in made.members()]


def happens(rng: random.Random, at: float, ours: Roster) -> InstanceName:
    """Something that the owner hears; of whom."""
    name, incarnation = InstanceName(f"e{rng.randrange(6)}"), Incarnation(f"i{rng.randrange(2)}")
    with contextlib.suppress(BeatRefused):
        match rng.randrange(6):
            case 0 | 1 | 2:
                role = rng.choice([Role.PREFILL, Role.DECODE])
                ours.on_message(at, beat(name, role, f"127.0.0.1:{rng.randrange(1, 9)}", state=rng.choice(_KINDS),
                                         incarnation=incarnation, epoch=rng.randrange(3)))
            case 3:
                ours.on_refused(at, name, incarnation, "connection refused")
            case 4:
                ours.on_probe(at, name, incarnation, rng.choice(list(Probed)), "said so")
            case _:
                if rng.random() < 0.3:
                    ours.on_message(at, Goodbye(WIRE_VERSION, SERVICE, name, incarnation))
                elif rng.random() < 0.7:
                    ours.on_tick(at)
                else:
                    ours.on_doubt(at, name, incarnation)
    return name


def over_a_wire(members: list[FleetMember]) -> list[FleetMember]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(members), type=list[FleetMember])


def tell(ours: Roster, theirs: Roster, name: InstanceName, before: set[InstanceName]) -> None:
    gone = sorted(before - {member.name for member in ours.members()})
    known = ours.known(name)
    theirs.follow(over_a_wire([] if known is None else [known]), gone)


def everything(ours: Roster) -> list[FleetMember]:
    return over_a_wire(sorted(ours.members(), key=lambda member: member.beat_at))


def test_a_replica_that_is_told_of_each_event_is_equal() -> None:
    rng = random.Random(5)
    for _ in range(30):
        ours, theirs, at = roster(), roster(), 0.0
        for _ in range(200):
            at += rng.random() * 2
            before = {member.name for member in ours.members()}
            tell(ours, theirs, happens(rng, at, ours), before)
            assert seen(ours) == seen(theirs)
            assert [m.name for m in ours.pickable(Role.DECODE)] == [m.name for m in theirs.pickable(Role.DECODE)]
            assert ours.models() == theirs.models()


def test_a_replica_that_missed_events_or_is_new_becomes_as_the_roster_is() -> None:
    rng = random.Random(11)
    for _ in range(100):
        ours, theirs, at = roster(), roster(), 0.0
        for number in range(150):
            at += rng.random() * 2
            before = {member.name for member in ours.members()}
            name = happens(rng, at, ours)
            if number < 50 or number > 100:
                tell(ours, theirs, name, before)
            elif number == 100:
                for one in (theirs, roster()):
                    one.follow(everything(ours), None)
                    assert seen(one) == seen(ours)


def test_open_legs_are_counted_where_they_are() -> None:
    ours, theirs = roster(), roster()
    ours.on_message(1.0, beat("d0"))
    theirs.follow(everything(ours), None)
    (member,), (mine,) = theirs.members(), ours.members()
    member.in_flight, mine.in_flight = 2, 7
    ours.on_message(2.0, beat("d0", seq=2))
    theirs.follow(everything(ours), [])
    assert theirs.members() == [member], "who counts legs on it has it in hand"
    assert (member.in_flight, member.in_flight_at_beat, member.beat_at) == (2, 2, 2.0)


def test_a_beat_that_says_nothing_new_changes_no_choice() -> None:
    ours, theirs = roster(), roster()
    ours.on_message(1.0, beat("d0"))
    theirs.follow(everything(ours), None)
    before = theirs.pickable(Role.DECODE)
    ours.on_message(2.0, beat("d0", seq=2))
    theirs.follow(everything(ours), [])
    assert theirs.pickable(Role.DECODE) is before


def test_what_a_replica_suspends_stays_suspended_until_the_owner_has_said_so_too() -> None:
    ours, theirs = roster(), roster()
    ours.on_message(1.0, beat("d0"))
    theirs.follow(everything(ours), None)
    (member,) = theirs.members()
    theirs.on_refused(1.5, member.name, member.incarnation, "refused here")
    member.suspected = True
    ours.on_message(2.0, beat("d0", seq=2))
    theirs.follow(everything(ours), [])
    assert member.suspended == "refused here", "the owner does not know of it yet"
    ours.on_refused(2.1, member.name, member.incarnation, "refused here")
    theirs.follow(everything(ours), [])
    assert member.suspended
    ours.on_probe(3.0, member.name, member.incarnation, Probed.HEALTHY, "")
    theirs.follow(everything(ours), [])
    assert not member.suspended


def test_another_incarnation_is_not_who_was_suspected() -> None:
    ours, theirs = roster(), roster()
    ours.on_message(1.0, beat("d0", incarnation=Incarnation("a")))
    theirs.follow(everything(ours), None)
    (member,) = theirs.members()
    theirs.on_refused(1.5, member.name, member.incarnation, "refused here")
    member.suspected = True
    ours.on_message(2.0, beat("d0", seq=2, incarnation=Incarnation("b")))
    theirs.follow(everything(ours), [])
    assert (member.incarnation, member.suspended, member.suspected) == ("b", "", False)


def test_a_replica_made_late_is_as_settled_as_the_roster_it_follows() -> None:
    late = Roster(SERVICE, started=100.0, settle_s=10.0, missed_beats=3)
    assert not late.settled(105.0)
    late.begin(0.0, 10.0, beside_engine=False)
    assert late.settled(105.0)
    assert late.listened(105.0)
