"""The laws of an exchange under random events."""

from __future__ import annotations

import random

import pytest
from exchanges import FakeBudget, FakePicks, FakeStream, lost

from xpyd_sidecar.contract.ids import Role, TransferId
from xpyd_sidecar.router.api.faults import FailureKind
from xpyd_sidecar.router.serving.exchange import MAX_REFUSALS, Exchange
from xpyd_sidecar.router.serving.instructions import (
    AttemptAnswered,
    AttemptBegun,
    AttemptEnded,
    AttemptLeaves,
    AttemptStalls,
    CancelAttempt,
    Complete,
    DeadlinePassed,
    Event,
    Fail,
    GivenUp,
    Instruction,
    Pass,
    Relay,
    RequestLimits,
    RequestOver,
    Resume,
    SendAttempt,
)


@pytest.mark.parametrize("seed", range(60))
def test_simulated_with_random_events_the_laws_hold(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(60):
        _simulate(dice)


def _simulate(dice: random.Random) -> None:
    picks = FakePicks(dice.randrange(4), dice.randrange(4))
    limits = RequestLimits(request_s=100.0, pair_s=dice.choice([5.0, 500.0]), load_s=dice.choice([0.0, 20.0]),
                    on_no_prefill=dice.choice(["decode", "reject"]), prefill_legs=dice.randrange(1, 4),
                           decode_legs=dice.randrange(1, 4), stream_legs=dice.randrange(1, 6))
    exchange = Exchange(TransferId("0" * 32), picks, limits, alone=dice.choice([False, False, True]), now=0.0,
                        stream=dice.choice([None, FakeStream()]), budget=FakeBudget(dice.choice([0, 1, 100])))
    now, attempt, terminal, over = 0.0, 0, 0, 0
    open_legs: dict[int, Role] = {}
    sent = 0
    relaying: int | None = None
    begun = False
    resumed = False
    ended: int | None = None
    out = exchange.start(now)
    for _ in range(200):
        attempts: set[int] = set()
        for i in out:
            assert not over, "something after Over"
            match i:
                case SendAttempt(leg=leg, role=role, params=params):
                    assert not terminal
                    assert relaying not in open_legs
                    assert leg not in open_legs
                    assert resumed or not begun, "a leg that begins anew behind a stream"
                    assert role not in open_legs.values(), "two legs of a role"
                    open_legs[leg] = role
                    sent += 1
                    if params is not None:
                        assert params.attempt >= attempt
                        assert params.remaining_s > 0
                        assert params.limit_s is not None
                        assert params.limit_s > 0
                        attempts.add(params.attempt)
                        if role is Role.PREFILL:
                            assert params.attempt > attempt, "attempts grow with every prefill leg"
                case CancelAttempt(leg=leg):
                    del open_legs[leg]
                case Resume():
                    assert begun
                    assert not open_legs
                    resumed = True
                case Relay(leg=leg):
                    assert open_legs[leg] is Role.DECODE
                    assert not terminal
                    relaying, begun, resumed = leg, True, False
                case Complete():
                    assert begun
                    terminal += 1
                case Pass(leg=leg):
                    assert not begun
                    assert leg == ended, "an answer that is not there"
                    terminal += 1
                case Fail():
                    terminal += 1
                case RequestOver():
                    over += 1
                    assert not open_legs, "over with a leg open"
        attempt = max(attempts, default=attempt)
        assert terminal <= 1
        if over:
            break
        assert open_legs, "neither over nor waiting for anything"
        out, ended, now = _random_event(exchange, dice, open_legs, relaying in open_legs, now)
    assert over == 1
    assert exchange.over
    assert exchange.handle(GivenUp("client_gone"), now) == []
    most = limits.prefill_legs + 2 * (limits.decode_legs + limits.stream_legs + MAX_REFUSALS) + 2
    assert sent <= (1 + exchange.continued) * most


def _random_event(exchange: Exchange, dice: random.Random, open_legs: dict[int, Role], relaying: bool,
                  now: float) -> tuple[list[Instruction], int | None, float]:
    now += dice.random() * 3
    roll = dice.random()
    if roll < 0.04:
        return exchange.handle(GivenUp("client_gone"), now), None, now
    if now >= exchange.deadline or roll < 0.1:
        return exchange.handle(DeadlinePassed(), now), None, now
    if roll < 0.15:
        return exchange.handle(AttemptAnswered(999, 200), now), None, now
    leg = dice.choice(list(open_legs))
    if roll < 0.2:
        stirs: Event = dice.choice([AttemptLeaves(leg), AttemptStalls(leg), AttemptStalls(leg, free=True)])
        return exchange.handle(stirs, now), None, now
    if open_legs[leg] is Role.DECODE and relaying:
        if roll < 0.6:
            return [], None, now
        event: Event = dice.choice([AttemptEnded(leg), lost(leg, FailureKind.ABORTED)])
    elif open_legs[leg] is Role.DECODE and roll < 0.4:
        return exchange.handle(AttemptBegun(leg), now), None, now
    else:
        event = dice.choice([AttemptAnswered(leg, dice.choice([200, 200, 400, 429, 500])),
                             AttemptAnswered(leg, 200, aborted=True), lost(leg, dice.choice(list(FailureKind)))])
    del open_legs[leg]
    return exchange.handle(event, now), leg if isinstance(event, AttemptAnswered) else None, now
