"""The ledger of bytes: what is held is what was taken, accepted requests stay, and who comes later pays."""

from __future__ import annotations

import contextlib
import random
import time

import pytest

from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.http.ledger import ByteLedger, HeldKind, Reservation


class One:
    def cut(self, kind: HeldKind) -> None:
        raise AssertionError("who calls this is the server")


def refused(ledger: ByteLedger, key: str, body: int, size: int) -> int:
    with pytest.raises(HttpFault) as fault:
        ledger.reserve(key, body, size, 0.0)[0]
    assert fault.value.retry_after_s == 1
    return fault.value.status


def test_a_request_is_accepted_where_its_reservation_fits_and_then_stays() -> None:
    bodies = 400
    ledger = ByteLedger(1000, lambda: bodies)
    first = ledger.reserve("", 400, 500, 0.0)[0]
    assert (ledger.free_bytes, ledger.other_bytes) == (100, 500)
    assert (ledger.held_bytes(HeldKind.REQUESTS), ledger.held_bytes(HeldKind.BODIES)) == (500, 400)
    assert refused(ledger, "", 10, 101) == 503
    ledger.settle(first, 450)
    assert ledger.free_bytes == 150, "its answer has begun, and it holds less"
    ledger.settle(first, 700)
    assert ledger.free_bytes == -100, "who was accepted goes on"
    assert refused(ledger, "", 0, 1) == 503
    second = ledger.reserve("", 0, 0, 0.0)[0]
    ledger.release(first)
    ledger.release(first)
    ledger.settle(first, 9999)
    ledger.release(second)
    assert (ledger.free_bytes, ledger.other_bytes) == (600, 0)


def test_of_several_keys_each_has_its_share_and_one_request_always_fits() -> None:
    ledger = ByteLedger(1000)
    ledger.release(ledger.reserve("a", 900, 0, 0.0)[0])
    ledger.shares.several = lambda: True
    large = ledger.reserve("a", 600, 300, 0.0)[0]
    assert refused(ledger, "a", 1, 0) == 429
    other = ledger.reserve("b", 300, 50, 0.0)[0]
    assert refused(ledger, "b", 151, 0) == 429
    ledger.release(large)
    ledger.release(ledger.reserve("a", 500, 0, 0.0)[0])
    ledger.release(other)
    assert ledger.shares._had == {}


def test_the_head_that_began_first_is_cut_and_what_has_not_been_read_for_longest() -> None:
    ledger = ByteLedger(100)
    slow, quick, new = One(), One(), One()
    assert ledger.hold(HeldKind.HEADS, slow, 30, 0.0) == []
    assert ledger.hold(HeldKind.HEADS, quick, 60, 9.0) == []
    assert ledger.hold(HeldKind.HEADS, new, 20, 10.0) == [slow]
    assert ledger.hold(HeldKind.HEADS, new, 50, 10.5) == [quick]
    early, late = One(), One()
    assert ledger.hold(HeldKind.UNREAD, early, 25, 11.0) == []
    assert ledger.hold(HeldKind.UNREAD, late, 25, 12.0) == []
    assert ledger.hold(HeldKind.UNREAD, late, 30, 13.0) == [early], "of its own kind alone"
    assert ledger.hold(HeldKind.UNREAD, late, 200, 14.0) == [late]
    assert (ledger.held_bytes(HeldKind.HEADS), ledger.held_bytes(HeldKind.UNREAD), ledger.cuts) == (50, 0, 4)


def test_for_a_request_that_does_not_fit_the_slow_are_cut_if_that_is_enough_and_else_nobody() -> None:
    ledger = ByteLedger(100)
    head, early, late = One(), One(), One()
    ledger.hold(HeldKind.UNREAD, early, 30, 0.0)
    ledger.hold(HeldKind.HEADS, head, 20, 1.0)
    ledger.hold(HeldKind.UNREAD, late, 30, 2.5)
    for size, now in ((30, 1.9), (80, 4.0)):
        with pytest.raises(HttpFault) as fault:
            ledger.reserve("", 0, size, now)
        assert fault.value.status == 503
    assert (ledger.other_bytes, ledger.cuts) == (80, 0)
    assert ledger.reserve("", 0, 40, 3.0)[1] == [(HeldKind.HEADS, head)]
    assert ledger.reserve("", 0, 20, 3.0)[1] == [(HeldKind.UNREAD, early)]
    assert ledger.other_bytes == 90


def test_bodies_that_come_too_slowly_go_where_heads_and_unread_answers_are_not_enough_and_then_alone() -> None:
    slow = [One()]
    there = {slow[0]: 60}

    def let_go(missing: int, now: float) -> list[One]:
        found = [one for one in slow if sum(there.values()) >= missing]
        for one in found:
            del there[one]
        return found

    ledger = ByteLedger(100, lambda: sum(there.values()), slow_bodies=let_go)
    head = One()
    ledger.hold(HeldKind.HEADS, head, 30, 0.0)
    assert refused(ledger, "", 0, 101) == 503
    assert (there, ledger.other_bytes) == ({slow[0]: 60}, 30), "nobody goes for one that would not fit even so"
    assert ledger.reserve("", 0, 40, 5.0)[1] == [(HeldKind.HEADS, head)]
    assert ledger.reserve("", 0, 60, 5.0)[1] == [(HeldKind.BODIES, slow[0])]
    assert (ledger.free_bytes, ledger.cuts) == (0, 2)


def test_an_answer_that_is_read_a_moment_later_is_not_cut_for_who_comes() -> None:
    bodies = 0
    ledger = ByteLedger(800, lambda: bodies)
    read, forgotten = One(), One()
    assert ledger.hold(HeldKind.UNREAD, read, 60, 10.0) == []
    bodies = 790
    assert ledger.hold(HeldKind.UNREAD, read, 70, 10.5) == [], "a body took the room"
    assert ledger.hold(HeldKind.UNREAD, forgotten, 30, 11.9) == []
    assert ledger.hold(HeldKind.UNREAD, forgotten, 31, 12.1) == [read]
    assert ledger.hold(HeldKind.UNREAD, read, 80, 12.2) == [forgotten], "all of them have more than an eighth"


def test_the_bytes_of_a_body_that_count_already_count_once() -> None:
    ledger = ByteLedger(1000)
    ledger.shares.several = lambda: True
    ledger.shares.add("a", 400)
    first = ledger.reserve("a", 400, 300, 0.0, counted=400)[0]
    assert ledger.shares.counted_bytes("a") == 700, "one request always fits"
    assert refused(ledger, "a", 1, 0) == 429
    ledger.release(first)
    assert ledger.shares.counted_bytes("a") == 400
    ledger.shares.add("a", -400)
    assert ledger.shares._had == {}


def test_many_heads_that_are_cut_at_once_cost_a_look_each() -> None:
    count = 20_000
    ledger = ByteLedger(count)
    heads = [One() for _ in range(count)]
    for one in heads:
        assert ledger.hold(HeldKind.HEADS, one, 1, 0.0) == []
    ledger.settle(ledger.reserve("", 0, 0, 0.0)[0], 2 * count)
    began = time.process_time()
    assert ledger.hold(HeldKind.HEADS, last := One(), 1, 1.0) == [*heads, last]
    assert time.process_time() - began < 2, "a look at all of them for each would take a minute"
    assert ledger.held_bytes(HeldKind.HEADS) == 0


def test_nobody_is_cut_for_who_gives_back() -> None:
    ledger = ByteLedger(100)
    one, other = One(), One()
    ledger.hold(HeldKind.UNREAD, one, 60, 0.0)
    accepted = ledger.reserve("", 0, 40, 0.0)[0]
    ledger.settle(accepted, 90)
    assert ledger.hold(HeldKind.UNREAD, one, 50, 1.0) == []
    assert ledger.hold(HeldKind.UNREAD, other, 1, 2.0) == [one]
    ledger.drop(HeldKind.UNREAD, other)
    ledger.drop(HeldKind.UNREAD, other)
    ledger.release(accepted)
    assert ledger.other_bytes == 0


def test_in_every_order_the_sums_are_those_of_what_is_held() -> None:
    draw, ledger = random.Random(11), ByteLedger(500)
    ledger.shares.several = lambda: True
    there = {kind: {} for kind in (HeldKind.HEADS, HeldKind.UNREAD)}
    accepted: list[Reservation] = []
    for now in range(6000):
        kind = draw.choice((HeldKind.HEADS, HeldKind.UNREAD))
        match draw.randrange(6):
            case 0 | 1:
                one = draw.choice([*there[kind], One()])
                there[kind][one] = size = draw.randrange(80)
                for cut in ledger.hold(kind, one, size, float(now)):
                    del there[kind][cut]
            case 2 if there[kind]:
                one = draw.choice([*there[kind]])
                ledger.drop(kind, one)
                del there[kind][one]
            case 3:
                with contextlib.suppress(HttpFault):
                    key = draw.choice(("", "a", "b"))
                    accepted.append(ledger.reserve(key, draw.randrange(60), draw.randrange(60), 0.0)[0])
            case 4 if accepted:
                ledger.settle(draw.choice(accepted), draw.randrange(90))
            case 5 if accepted:
                ledger.release(accepted.pop(draw.randrange(len(accepted))))
        for each, held in there.items():
            assert ledger.held_bytes(each) == sum(held.values())
        assert ledger.held_bytes(HeldKind.REQUESTS) == sum(one.size for one in accepted)
        for key in ("a", "b"):
            assert ledger.shares.counted_bytes(key) == sum(one.counts for one in accepted if one.key == key)
    assert any(one.key for one in accepted)
