"""Pairing on the decode side, rule by rule; random orders are in ``test_kv_simulation``."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, TransferId
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.leases import Lease
from xpyd_sidecar.kv.messages import Announce, ListeningRank, TryGone, WorkDone
from xpyd_sidecar.kv.pairing import (
    LEFT_MAX,
    UNCLAIMED_MAX,
    Abandon,
    DecodeLegEnded,
    DropPeer,
    FailLoad,
    LoadProgress,
    LoadVerdict,
    Pairing,
    StartLoad,
)

T = TransferId("a" * 32)
PROMPT = b"i" * 32


def source(attempt: int = 1, **changes: Any) -> Announce:
    rank = ListeningRank(HostPort(f"10.0.0.{attempt}:1"), Incarnation("p" * 32))
    return msgspec.structs.replace(Announce(T, Attempt(attempt), 1, PROMPT, 300, 299, (rank,)), **changes)


def machine(*, recompute: bool = True) -> Pairing:
    return Pairing(recompute=recompute, unclaimed_s=60)


def parked(*, recompute: bool = True, attempt: int = 1) -> Pairing:
    pairing = machine(recompute=recompute)
    assert pairing.register("r", T, Attempt(attempt), identity=PROMPT, tokens=300, handed=299, lease=Lease(10.0)) == []
    return pairing


def loading(**options: Any) -> Pairing:
    pairing = parked(**options)
    pairing.announce(b"p1", source(), 1.0, ranks=1)
    assert pairing.ask("r", 1.0) is LoadVerdict.LOAD
    assert pairing.on_allocated("r", 300) == [StartLoad("r", source())]
    return pairing


def test_a_leg_waits_until_it_is_announced_and_then_loads() -> None:
    pairing = parked()
    assert pairing.ask("r", 5.0) is LoadVerdict.WAIT
    assert pairing.announce(b"p1", source(), 6.0, ranks=1) == []
    assert pairing.ask("r", 6.0) is pairing.ask("r", 6.0) is LoadVerdict.LOAD
    assert pairing.on_allocated("r", 172) == [StartLoad("r", source())]
    key = source().key
    assert pairing.on_load_finished("r", Outcome.OK, "", [key]) == [DecodeLegEnded("r", key, Outcome.OK, "")]
    assert pairing.open == 0
    assert pairing.ask("r", 7.0) is LoadVerdict.COMPUTE  # after a preemption, or for a 1-token prompt
    assert pairing.end("r") == []


def test_an_announcement_may_come_first() -> None:
    pairing = machine()
    assert pairing.announce(b"p1", source(), 0.0, ranks=1) == []
    pairing.register("r", T, Attempt(1), identity=PROMPT, tokens=300, handed=299, lease=Lease(10.0))
    assert pairing.ask("r", 0.1) is LoadVerdict.LOAD


def test_unclaimed_announcements_run_out_and_are_bounded() -> None:
    pairing = machine()
    pairing.announce(b"p1", source(), 0.0, ranks=1)
    assert pairing.tick(59.9) == []
    assert pairing.tick(60.0) == [DropPeer(b"p1", source().key, Outcome.DEADLINE, "no decode leg claimed it")]
    assert pairing.tick(99.0) == []
    drops = [one for n in range(UNCLAIMED_MAX + 1)
             for one in pairing.announce(b"p1", source(transfer=TransferId(f"{n:032x}")), 0.0, ranks=1)]
    assert [(one.key.transfer, one.outcome) for one in drops] == [("0" * 32, Outcome.OVERFLOW)]  # type: ignore[union-attr]


def test_a_leg_that_comes_after_its_announcement_ran_out_computes_at_once() -> None:
    pairing = machine()
    pairing.announce(b"p1", source(), 0.0, ranks=1)
    pairing.tick(60.0)
    pairing.register("r", T, Attempt(1), identity=PROMPT, tokens=300, handed=299, lease=Lease(99.0))
    assert pairing.ask("r", 60.1) is LoadVerdict.COMPUTE
    assert pairing.open == 0


@pytest.mark.parametrize(("recompute", "verdict"), [(True, LoadVerdict.COMPUTE), (False, LoadVerdict.FAIL)])
def test_the_deadline_ends_the_wait_as_the_policy_says(recompute: bool, verdict: LoadVerdict) -> None:
    pairing = parked(recompute=recompute)
    assert pairing.ask("r", 9.99) is LoadVerdict.WAIT
    assert pairing.ask("r", 10.0) is verdict
    key = Key(T, Attempt(1), 1)
    if recompute:
        assert pairing.on_allocated("r", 0) == [
            DecodeLegEnded("r", key, Outcome.DEADLINE, "prefill did not announce in time")]
    else:
        assert pairing.on_allocated("r", 1) == [FailLoad("r")]
        assert pairing.on_load_finished("r", Outcome.DEADLINE, "x") == [
            DecodeLegEnded("r", key, Outcome.DEADLINE, "prefill did not announce in time")]


def test_an_announcement_between_a_failing_answer_and_its_allocation_does_not_turn_into_a_load_of_one_token() -> None:
    pairing = parked(recompute=False)
    assert pairing.ask("r", 10.0) is LoadVerdict.FAIL
    pairing.announce(b"p1", source(), 10.0, ranks=1)
    assert pairing.on_allocated("r", 1) == [FailLoad("r")]
    late = "prefill did not announce in time"
    assert pairing.on_load_finished("r", Outcome.DEADLINE, "x") == [
        DecodeLegEnded("r", source().key, Outcome.DEADLINE, late),
        DropPeer(b"p1", source().key, Outcome.DEADLINE, late)]  # told, so that it keeps nothing


def test_a_withdrawal_between_answer_and_allocation_fails_the_load() -> None:
    pairing = parked()
    pairing.announce(b"p1", source(), 0.0, ranks=1)
    assert pairing.ask("r", 0.0) is LoadVerdict.LOAD
    pairing.on_gone(TryGone(T, Attempt(1), 1, Outcome.ABORTED, "x", retry=True))
    assert pairing.on_allocated("r", 300) == [FailLoad("r")]


def test_the_greatest_attempt_wins_before_the_load() -> None:
    pairing = parked()
    pairing.announce(b"p2", source(2), 0.0, ranks=1)
    stale = pairing.announce(b"p1", source(1), 0.0, ranks=1)
    assert stale == [DropPeer(b"p1", source(1).key, Outcome.STALE, "a newer try is known")]
    assert pairing.announce(b"p3", source(3), 0.0, ranks=1) == [
        DropPeer(b"p2", source(2).key, Outcome.STALE, "a newer try is known")]
    pairing.ask("r", 0.0)
    assert pairing.on_allocated("r", 300) == [StartLoad("r", source(3))]


def test_a_newer_attempt_takes_a_load_over() -> None:
    pairing = loading()
    assert pairing.newer() == []
    assert pairing.announce(b"p2", source(2), 2.0, ranks=1) == []
    assert pairing.newer() == [StartLoad("r", source(2))]
    assert pairing.newer() == []


@pytest.mark.parametrize("ends", ["loaded", "failed", "end"])
def test_senders_of_tries_that_others_took_over_are_told_when_the_load_is_over(ends: str) -> None:
    pairing = loading()
    for attempt in range(2, LEFT_MAX + 3):
        assert pairing.announce(f"p{attempt}".encode(), source(attempt), 2.0, ranks=1) == [], "not before: it could fail it"
        pairing.newer()
    last = source(LEFT_MAX + 2).key
    over = {"loaded": lambda: pairing.on_load_finished("r", Outcome.OK, "", [last]),
            "failed": lambda: pairing.on_load_finished("r", Outcome.DEADLINE, "late", [last]),
            "end": lambda: pairing.end("r")}[ends]()
    told = [one for one in over if isinstance(one, DropPeer)]
    assert told[:LEFT_MAX] == [DropPeer(f"p{attempt}".encode(), source(attempt).key, Outcome.STALE, "a newer try is known")
                               for attempt in range(2, LEFT_MAX + 2)]
    assert [one.key for one in told[LEFT_MAX:]] == ([] if ends == "loaded" else [last])
    assert not [one for one in pairing.end("r") if isinstance(one, DropPeer)], "and told once"


@pytest.mark.parametrize("ordered", [False, True])
def test_a_newer_try_that_came_when_workers_were_done_is_dropped(ordered: bool) -> None:
    pairing = loading()
    pairing.announce(b"p2", source(2), 2.0, ranks=1)
    if ordered:  # the workers have reported before they hear of it
        pairing.newer()
    assert pairing.on_load_finished("r", Outcome.OK, "", [source(1).key]) == [
        DecodeLegEnded("r", source(1).key, Outcome.OK, ""), DropPeer(b"p2", source(2).key, Outcome.STALE, "")]


def test_sources_that_not_every_rank_has_loaded_from_are_told_to_let_go() -> None:
    pairing = loading()
    pairing.announce(b"p2", source(2), 2.0, ranks=1)
    pairing.newer()
    assert pairing.on_load_finished("r", Outcome.OK, "", [source(1).key, source(2).key]) == [
        DecodeLegEnded("r", source(2).key, Outcome.OK, ""),
        DropPeer(b"p1", source(1).key, Outcome.STALE, "a newer try is known"),
        DropPeer(b"p2", source(2).key, Outcome.STALE, "")]


def test_an_older_try_that_is_announced_again_during_the_load_is_told_when_that_is_over() -> None:
    """Its answer could come to workers that have not heard of the newer one yet."""
    pairing = loading()
    assert pairing.announce(b"p2", source(2), 2.0, ranks=1) == []
    assert pairing.announce(b"p1", source(1), 3.0, ranks=1) == []  # its connection broke, and was made again
    assert pairing.newer() == [StartLoad("r", source(2))]
    stale = DropPeer(b"p1", source(1).key, Outcome.STALE, "a newer try is known")
    ended = DecodeLegEnded("r", source(2).key, Outcome.OK, "")
    assert pairing.on_load_finished("r", Outcome.OK, "", [source(2).key]) == [ended, stale]


def test_what_was_computed_before_a_reset_is_not_loaded_when_it_is_announced_again() -> None:
    """The word that it is not wanted may be lost with the connection; then prefill announces it again."""
    pairing = parked()
    pairing.announce(b"p1", source(1), 1.0, ranks=1)
    assert len(pairing.reset("caches were reset")) == 1
    (drop,) = pairing.announce(b"p1", source(1), 2.0, ranks=1)
    assert isinstance(drop, DropPeer)
    assert (drop.key, drop.outcome) == (source(1).key, Outcome.STALE)
    assert pairing.ask("r", 2.0) is not LoadVerdict.LOAD
    assert pairing.announce(b"p2", source(2), 3.0, ranks=1) == []
    assert pairing.ask("r", 3.0) is LoadVerdict.LOAD


OTHER_WEIGHTS = Outcome.INCOMPATIBLE, "weights: version 'step 7' here, 'step 6' there"


def test_kv_of_other_weights_is_refused_by_their_names_and_the_leg_fails_at_once() -> None:
    pairing = parked()
    assert pairing.weights_are("step 7") == []
    drops = pairing.announce(b"p1", source(weights="step 6"), 1.0, ranks=1)
    assert drops == [DropPeer(b"p1", source().key, *OTHER_WEIGHTS)]
    assert pairing.ask("r", 1.0) is LoadVerdict.COMPUTE
    assert pairing.on_allocated("r", 0) == [DecodeLegEnded("r", Key(T, Attempt(1), 1), *OTHER_WEIGHTS)]


@pytest.mark.parametrize(("here", "there"), [("step 7", "step 7"), ("step 7", ""), ("", "step 6"), ("", "")])
def test_kv_of_the_same_weights_is_taken_and_where_a_side_does_not_say(here: str, there: str) -> None:
    pairing = parked()
    assert pairing.weights_are(here) == []
    assert pairing.announce(b"p1", source(weights=there), 1.0, ranks=1) == []
    assert pairing.ask("r", 1.0) is LoadVerdict.LOAD


def test_what_was_announced_before_weights_changed_is_looked_at_again() -> None:
    pairing = parked()
    pairing.weights_are("step 6")
    pairing.announce(b"p1", source(weights="step 6"), 1.0, ranks=1)
    assert pairing.weights_are("step 7") == [DropPeer(b"p1", source().key, *OTHER_WEIGHTS)]
    assert pairing.weights_are("step 7") == []
    assert pairing.ask("r", 1.0) is LoadVerdict.COMPUTE
    assert pairing.announce(b"p2", source(2, weights="step 7"), 2.0, ranks=1) == []
    assert pairing.ask("r", 2.0) is LoadVerdict.LOAD


def test_what_nobody_had_claimed_is_compared_with_the_weights_of_when_it_is_claimed() -> None:
    pairing = machine()
    pairing.weights_are("step 6")
    assert pairing.announce(b"p1", source(weights="step 7"), 0.0, ranks=1) == []
    pairing.weights_are("step 7")
    assert pairing.register("r", T, Attempt(1), identity=PROMPT, tokens=300, handed=299, lease=Lease(10.0)) == []
    assert pairing.ask("r", 0.0) is LoadVerdict.LOAD


def test_a_load_that_is_under_way_goes_on_when_weights_change_and_takes_no_try_of_others() -> None:
    pairing = loading()
    assert pairing.weights_are("step 7") == []
    drops = pairing.announce(b"p2", source(2, weights="step 6"), 2.0, ranks=1)
    assert drops == [DropPeer(b"p2", source(2).key, *OTHER_WEIGHTS)]
    assert pairing.newer() == []
    key = source().key
    assert pairing.on_load_finished("r", Outcome.OK, "", [key]) == [DecodeLegEnded("r", key, Outcome.OK, "")]


def test_kv_of_one_prompt_by_two_weights_are_two_contents() -> None:
    assert len({source(weights=one).content for one in ("", "step 6", "step 7")}) == 3


def test_attempts_below_the_legs_own_are_stale() -> None:
    pairing = parked(attempt=2)
    assert pairing.announce(b"p1", source(1), 0.0, ranks=1)[0].outcome is Outcome.STALE  # type: ignore[union-attr]
    assert pairing.ask("r", 0.0) is LoadVerdict.WAIT


@pytest.mark.parametrize("changes", [{"identity": b"j" * 32}, {"tokens": 301}])
def test_another_prompt_is_refused_and_the_leg_fails_at_once(changes: dict[str, Any]) -> None:
    pairing = parked()
    (drop,) = pairing.announce(b"p1", source(**changes), 0.0, ranks=1)
    assert isinstance(drop, DropPeer)
    assert drop.outcome is Outcome.IDENTITY
    assert pairing.ask("r", 0.0) is LoadVerdict.COMPUTE


def test_another_number_of_ranks_is_refused_with_both_numbers() -> None:
    (drop,) = parked().announce(b"p1", source(), 0.0, ranks=2)
    assert isinstance(drop, DropPeer)
    assert (drop.outcome, drop.reason) == (Outcome.INCOMPATIBLE, "data: 1 addresses for 2 ranks")


def test_a_refused_peer_fails_the_leg_fast_also_when_it_came_first() -> None:
    refused = (Outcome.INCOMPATIBLE, "dtype")
    for first in (True, False):
        pairing = machine() if first else parked()
        steps = pairing.announce(b"p1", source(), 0.0, ranks=1, refused=refused)
        if first:
            steps = pairing.register("r", T, Attempt(1), identity=PROMPT, tokens=300, handed=299, lease=Lease(10.0))
        assert steps == [DropPeer(b"p1", source().key, *refused)]
        assert pairing.ask("r", 0.1) is LoadVerdict.COMPUTE


def test_a_good_attempt_after_a_refused_one_is_used() -> None:
    pairing = parked()
    pairing.announce(b"p1", source(), 0.0, ranks=1, refused=(Outcome.INCOMPATIBLE, "dtype"))
    pairing.announce(b"p2", source(2), 0.0, ranks=1)
    assert pairing.ask("r", 0.1) is LoadVerdict.LOAD


def test_a_message_of_another_version_fails_the_leg_fast() -> None:
    pairing = parked()
    pairing.refuse(T, Attempt(1), Outcome.INCOMPATIBLE, "wire version")
    assert pairing.ask("r", 0.1) is LoadVerdict.COMPUTE


@pytest.mark.parametrize(("retry", "verdict"), [(True, LoadVerdict.WAIT), (False, LoadVerdict.COMPUTE)])
def test_a_withdrawn_try_is_waited_for_again_only_if_another_may_follow(retry: bool, verdict: LoadVerdict) -> None:
    pairing = parked()
    pairing.announce(b"p1", source(), 0.0, ranks=1)
    pairing.on_gone(TryGone(T, Attempt(1), 1, Outcome.OVERFLOW, "x", retry))
    assert pairing.ask("r", 0.1) is verdict


def test_a_withdrawal_of_an_older_try_changes_nothing() -> None:
    pairing = parked()
    pairing.announce(b"p2", source(2), 0.0, ranks=1)
    pairing.on_gone(TryGone(T, Attempt(1), 1, Outcome.ABORTED, "x", retry=False))
    assert pairing.ask("r", 0.1) is LoadVerdict.LOAD


def test_a_leg_that_ends_is_entombed_whatever_its_state() -> None:
    key = source().key
    waiting = parked()
    assert waiting.end("r") == [DecodeLegEnded("r", key, Outcome.ABORTED, "decode's leg ended")]
    announced = parked()
    announced.announce(b"p1", source(), 0.0, ranks=1)
    assert announced.end("r")[1] == DropPeer(b"p1", key, Outcome.ABORTED, "decode's leg ended")
    busy = loading()
    assert busy.end("r") == [Abandon("r"), DecodeLegEnded("r", key, Outcome.ABORTED, "decode's leg ended"),
                             DropPeer(b"p1", key, Outcome.ABORTED, "decode's leg ended")]
    for pairing in (waiting, announced, busy):
        (late,) = pairing.announce(b"p1", source(), 0.0, ranks=1)
        assert isinstance(late, DropPeer)
        assert pairing.open == 0
        assert pairing.leg("r") is None
        assert pairing.on_load_finished("r", Outcome.OK, "") == []


@pytest.mark.parametrize(("said", "told"), [
    ((Outcome.CHECKSUM, "a sum"), (Outcome.CHECKSUM, "a sum")),
    ((Outcome.ABORTED, "decode's leg ended"), (Outcome.ABORTED, "decode's leg ended")),
    ((Outcome.OK, ""), (Outcome.ABORTED, "decode's leg ended"))])
def test_where_nothing_is_computed_again_the_request_ends_before_its_load_and_workers_say_why(
        said: tuple[Outcome, str], told: tuple[Outcome, str]) -> None:
    pairing, key = loading(recompute=False), source().key
    assert pairing.end("r") == [Abandon("r"), DropPeer(b"p1", key, Outcome.ABORTED, "decode's leg ended")]
    assert pairing.open == 0
    assert pairing.on_load_finished("r", *said, [key]) == [DecodeLegEnded("r", key, *told)]
    assert pairing.on_load_finished("r", *said, [key]) == pairing.end("r") == [], "told once"


def test_a_load_of_what_never_came_ends_of_that() -> None:
    pairing = parked(recompute=False)
    assert pairing.ask("r", 1000.0) is LoadVerdict.FAIL
    assert pairing.on_allocated("r", 299) == [FailLoad("r")]
    assert pairing.end("r") == [Abandon("r")]
    (ended,) = pairing.on_load_finished("r", Outcome.DEADLINE, "prefill did not announce in time")
    assert isinstance(ended, DecodeLegEnded)
    assert (ended.outcome, ended.reason) == (Outcome.DEADLINE, "prefill did not announce in time")


def test_the_same_transfer_may_come_again_with_a_newer_attempt_only() -> None:
    pairing = parked()
    pairing.end("r")
    pairing.register("again", T, Attempt(1), identity=PROMPT, tokens=300, handed=299, lease=Lease(10.0))
    assert pairing.leg("again") is None
    assert pairing.ask("again", 0.0) is LoadVerdict.COMPUTE
    pairing.register("newer", T, Attempt(2), identity=PROMPT, tokens=300, handed=299, lease=Lease(10.0))
    assert pairing.ask("newer", 0.0) is LoadVerdict.WAIT


def test_a_second_request_with_a_living_transfer_is_an_ordinary_one() -> None:
    pairing = parked()
    pairing.register("copy", T, Attempt(5), identity=PROMPT, tokens=300, handed=299, lease=Lease(10.0))
    assert pairing.ask("copy", 0.0) is LoadVerdict.COMPUTE
    assert pairing.end("copy") == []
    assert pairing.ask("r", 0.0) is LoadVerdict.WAIT


def test_a_request_for_which_vllm_loads_nothing_lets_prefill_go() -> None:
    pairing = parked()
    pairing.announce(b"p1", source(), 0.0, ranks=1)
    pairing.ask("r", 0.0)
    ended, drop = pairing.on_allocated("r", 0)
    assert isinstance(ended, DecodeLegEnded)
    assert ended.outcome is Outcome.UNUSED
    assert isinstance(drop, DropPeer)


def test_requests_without_a_leg_are_left_alone() -> None:
    pairing = machine()
    assert pairing.ask("other", 0.0) is LoadVerdict.COMPUTE
    assert pairing.on_allocated("other", 0) == pairing.end("other") == []
    assert pairing.on_load_finished("other", Outcome.OK, "") == []


def test_a_leg_that_was_taken_back_before_it_came_ends_the_announcement() -> None:
    pairing = machine()
    pairing.announce(b"p1", source(), 0.0, ranks=1)
    steps = pairing.register("gone", T, Attempt(1), identity=b"[0]", tokens=1, handed=1, lease=Lease(10.0), withdrawn=True)
    assert steps == [DropPeer(b"p1", source().key, Outcome.ABORTED, "decode's leg was taken back")]
    pairing.end("gone")
    assert pairing.announce(b"p1", source(generation=2), 0.1, ranks=1) == [
        DropPeer(b"p1", source(generation=2).key, Outcome.ABORTED, "decode's leg ended")]
    assert pairing.open == 0


def word(tokens: int, steps: int, attempt: int = 1, generation: int = 1) -> list[WorkDone]:
    return [WorkDone(T, Attempt(attempt), generation, tokens, steps)]


def test_work_that_grows_is_progress_and_a_word_that_says_nothing_new_is_not() -> None:
    pairing = loading()
    key = source().key
    told = [pairing.on_progress(b"p1", word(*each)) for each in ((0, 0), (5, 0), (5, 0), (5, 1), (4, 1), (4, 0), (6, 0))]
    assert told == [[], [LoadProgress(key)], [], [LoadProgress(key)], [], [], [LoadProgress(key)]]


def test_only_who_announced_a_try_speaks_of_it_and_only_while_it_is_loaded() -> None:
    pairing = parked()
    assert pairing.on_progress(b"p1", word(1, 0)) == []
    pairing.announce(b"p1", source(), 1.0, ranks=1)
    assert pairing.on_progress(b"p1", word(2, 0)) == [], "nothing is loaded yet"
    pairing.ask("r", 1.0)
    pairing.on_allocated("r", 300)
    assert pairing.on_progress(b"p1", word(2, 0)) == [], "that was said before"
    assert pairing.on_progress(b"p2", word(3, 0)) == []
    assert pairing.on_progress(b"p1", word(3, 0, attempt=2)) == pairing.on_progress(b"p1", word(3, 0, generation=2)) == []
    assert pairing.on_progress(b"p1", word(3, 0)) == [LoadProgress(source().key)]
    assert pairing.on_load_finished("r", Outcome.OK, "", [source().key])
    assert pairing.on_progress(b"p1", word(4, 0)) == []
    pairing.end("r")
    assert pairing.on_progress(b"p1", word(5, 0)) == []


def test_a_newer_try_begins_with_no_work() -> None:
    pairing = loading()
    pairing.on_progress(b"p1", word(200, 9))
    pairing.announce(b"p2", source(2), 2.0, ranks=1)
    assert pairing.on_progress(b"p1", word(201, 9)) == []
    assert pairing.on_progress(b"p2", word(1, 0, attempt=2)) == [LoadProgress(source(2).key)]
