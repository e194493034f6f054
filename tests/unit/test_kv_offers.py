"""Offers on the prefill side, rule by rule."""

from __future__ import annotations

from msgspec.structs import replace

from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, TransferId
from xpyd_sidecar.contract.legs import Peer
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.messages import WORK_MAX, WorkDone
from xpyd_sidecar.kv.offers import Offers, PrefillLegEnded, Push, Release, SendAnnounce, SendGone, SendWork
from xpyd_sidecar.kv.reach import CacheGroup, Reach

D = Peer(InstanceName("d"), Incarnation("d" * 32), HostPort("d:1"))
KEY = Key(TransferId("a" * 32), Attempt(1), 1)
PROMPT = b"i" * 32
GROUPS = (CacheGroup(Reach("all", 128), 128),)


def opened(tokens: int = 300, ranks: int = 1) -> Offers:
    offers = Offers(groups=GROUPS, ranks=ranks)
    offers.register("r", KEY, D, PROMPT, (tokens + 1, tokens))
    assert offers.open == 0
    assert offers.on_allocated("r", 128) == [SendAnnounce(D, KEY, PROMPT, tokens + 1, tokens, 128)]
    return offers


def test_chunks_are_pushed_in_whole_blocks_and_the_tail_comes_last() -> None:
    offers = opened()
    assert offers.step("r", [[7, 8]], computed=200) == [Push(KEY, 0, (7,), D.instance)]
    assert offers.tracks("r")
    assert offers.step("r", [[7, 8, 9]], computed=300) == [Push(KEY, 1, (8, 9), D.instance)]
    assert not offers.tracks("r")
    assert offers.end("r") == []
    assert offers.open == 1
    assert offers.rank_ended(0, KEY, Outcome.OK, "", 4096) == [PrefillLegEnded(D, KEY, Outcome.OK, "", 300, 4096)]
    assert offers.open == 0


def test_blocks_found_in_the_prefix_cache_are_pushed_too() -> None:
    assert opened().step("r", [[1, 2, 3]], computed=300) == [Push(KEY, 0, (1, 2, 3), D.instance)]


def test_a_chunk_that_completes_no_block_pushes_nothing() -> None:
    offers = opened()
    assert offers.step("r", [[1]], computed=127) == []
    assert offers.step("r", [[1]], computed=128) == [Push(KEY, 0, (1,), D.instance)]


def test_after_a_preemption_only_what_was_not_pushed_follows_from_the_new_blocks() -> None:
    offers = opened()
    offers.step("r", [[1, 2]], computed=256)
    assert offers.step("r", [[11, 12]], computed=256) == []
    assert offers.step("r", [[11, 12, 13]], computed=300) == [Push(KEY, 2, (13,), D.instance)]


def test_a_prompt_is_announced_with_the_weights_by_which_it_is_computed_and_by_no_two() -> None:
    offers = Offers(groups=GROUPS, ranks=1)
    assert offers.weights_are("step 6") == []
    for name, number in (("r", 1), ("whole", 2), ("queued", 3)):
        offers.register(name, Key(KEY.transfer, KEY.attempt, number), D, PROMPT, (301, 300))
    (said,) = offers.on_allocated("r", 0)
    offers.on_allocated("whole", 0)
    offers.step("whole", [[1, 2, 3]], computed=300)
    assert isinstance(said, SendAnnounce)
    assert said.weights == "step 6"
    reason = "weights changed from version 'step 6' to 'step 7' while the prompt was computed"
    assert offers.weights_are("step 7") == [SendGone(D, KEY, Outcome.STALE, reason, retry=False),
                                            Release(KEY, Outcome.STALE, reason, with_step=True)]
    assert offers.weights_are("step 7") == []
    assert offers.step("r", [[1, 2, 3]], computed=300) == []
    again = [one for one in offers.announce_again(D) if isinstance(one, SendAnnounce)]
    assert [(one.key.generation, one.weights) for one in again] == [(2, "step 6")], "its KV is what it was"
    (said,) = offers.on_allocated("queued", 0)
    assert isinstance(said, SendAnnounce)
    assert said.weights == "step 7"


def test_it_is_announced_once() -> None:
    assert opened().on_allocated("r", 0) == []


def test_what_decode_may_have_lost_is_announced_again_while_it_is_open() -> None:
    offers = opened()
    assert offers.announce_again(D) == [SendAnnounce(D, KEY, PROMPT, 301, 300, 128)]
    assert offers.announce_again(replace(D, instance=InstanceName("e"))) == []
    offers.step("r", [[7, 8, 9]], computed=300)
    assert offers.announce_again(D) == [SendAnnounce(D, KEY, PROMPT, 301, 300, 128)]
    offers.drop(KEY, Outcome.UNUSED, "x")
    assert offers.announce_again(D) == []


def test_a_leg_that_ends_early_is_withdrawn() -> None:
    offers = opened()
    offers.step("r", [[1, 2]], computed=200)
    gone, release = offers.end("r")
    assert isinstance(gone, SendGone)
    assert (gone.outcome, gone.retry) == (Outcome.ABORTED, True)
    assert isinstance(release, Release)
    (ended,) = offers.rank_ended(0, KEY, Outcome.ABORTED, "x", 0)
    assert isinstance(ended, PrefillLegEnded)
    assert ended.outcome is Outcome.ABORTED


def test_a_leg_that_never_ran_leaves_nothing() -> None:
    offers = Offers(groups=GROUPS, ranks=1)
    offers.register("r", KEY, D, PROMPT, (301, 300))
    assert offers.end("r") == []
    assert offers.open == 0


def test_a_repeated_key_is_an_ordinary_request() -> None:
    offers = opened()
    offers.register("twin", KEY, D, PROMPT, (301, 300))
    assert offers.on_allocated("twin", 0) == offers.end("twin") == []
    assert offers.open == 1


def test_what_decode_does_not_want_is_pushed_no_further() -> None:
    offers = opened()
    offers.step("r", [[1, 2]], computed=200)
    assert offers.drop(KEY, Outcome.UNUSED, "x") == [Release(KEY, Outcome.UNUSED, "x")]
    assert offers.drop(KEY, Outcome.UNUSED, "x") == []
    assert offers.step("r", [[1, 2, 3]], computed=300) == []
    assert offers.end("r") == []
    offers.rank_ended(0, KEY, Outcome.UNUSED, "x", 0)
    assert offers.drop(KEY, Outcome.UNUSED, "x") == []


def test_losing_a_peer_releases_its_transfers_and_no_others() -> None:
    offers = opened()
    other = Peer(InstanceName("e"), Incarnation("e" * 32), HostPort("e:1"))
    offers.register("s", Key(TransferId("b" * 32), Attempt(1), 1), other, PROMPT, (301, 300))
    offers.on_allocated("s", 0)
    assert offers.peers() == {D, other}
    assert offers.peer_lost(D, Outcome.PEER_LOST, "x") == [Release(KEY, Outcome.PEER_LOST, "x")]


def test_a_transfer_ends_when_every_rank_has_ended_it_and_fails_if_one_failed() -> None:
    offers = opened(ranks=3)
    offers.step("r", [[1, 2, 3]], computed=300)
    assert offers.rank_ended(0, KEY, Outcome.OK, "", 10) == []
    assert offers.rank_ended(0, KEY, Outcome.OK, "", 10) == []  # twice from one rank counts once
    assert offers.rank_ended(1, KEY, Outcome.PEER_LOST, "gone", 0) == []
    assert offers.rank_ended(2, KEY, Outcome.OK, "", 10) == [PrefillLegEnded(D, KEY, Outcome.PEER_LOST, "gone", 300, 20)]


def test_a_rank_that_fails_early_stops_the_others() -> None:
    offers = opened(ranks=2)
    offers.step("r", [[1, 2]], computed=200)
    assert offers.rank_ended(0, KEY, Outcome.OVERFLOW, "full", 0) == [
        SendGone(D, KEY, Outcome.OVERFLOW, "full", retry=False), Release(KEY, Outcome.OVERFLOW, "full")]
    assert not offers.tracks("r")
    (ended,) = offers.rank_ended(1, KEY, Outcome.OVERFLOW, "full", 0)
    assert isinstance(ended, PrefillLegEnded)


def test_unknown_requests_and_keys_change_nothing() -> None:
    offers = Offers(groups=GROUPS, ranks=1)
    assert offers.on_allocated("x", 0) == offers.step("x", [[1]], computed=9) == offers.end("x") == []
    assert offers.rank_ended(0, KEY, Outcome.OK, "", 1) == offers.drop(KEY, Outcome.OK, "") == []


def test_copies_that_one_rank_has_lost_are_let_go_by_the_others_even_when_all_was_pushed() -> None:
    offers = opened(ranks=2)
    offers.step("r", [[1, 2, 3]], computed=300)
    assert offers.rank_ended(1, KEY, Outcome.OVERFLOW, "full", 0) == [
        SendGone(D, KEY, Outcome.OVERFLOW, "full", retry=False), Release(KEY, Outcome.OVERFLOW, "full")]
    assert offers.rank_ended(0, KEY, Outcome.OVERFLOW, "full", 0) == [
        PrefillLegEnded(D, KEY, Outcome.OVERFLOW, "full", 300, 0)]


def work(tokens: int, steps: int) -> list[SendWork]:
    return [SendWork(D, (WorkDone(*KEY, tokens, steps),))]


def test_decode_is_told_of_steps_that_have_ended_and_once_of_each() -> None:
    offers = opened()
    offers.on_step({"r": 100})
    assert offers.take_progress() == [], "the step has only begun, and may hang"
    offers.on_step({"r": 50, "other": 9})
    assert offers.take_progress() == work(100, 0)
    assert offers.take_progress() == []
    offers.on_step({"other": 9})
    assert offers.take_progress() == work(150, 0)
    offers.on_step({})
    assert offers.take_progress() == work(150, 1), "it waited while others were served"


def test_steps_without_work_for_anybody_are_no_progress() -> None:
    offers = opened()
    for _ in range(9):
        offers.on_step({})
        assert offers.take_progress() == []


def test_tokens_that_are_computed_again_after_a_preemption_are_work() -> None:
    offers = opened()
    for _ in range(3):
        offers.on_step({"r": 200})
        offers.on_step({"other": 1})
    offers.on_step({})
    assert offers.take_progress() == work(600, 3)


def test_nothing_is_told_of_a_transfer_that_is_pushed_whole_or_not_wanted() -> None:
    offers = opened()
    offers.step("r", [[1, 2, 3]], computed=300)
    offers.on_step({"r": 300})
    offers.on_step({"other": 1})
    assert offers.take_progress() == []
    offers = opened()
    offers.on_step({"r": 100})
    offers.drop(KEY, Outcome.UNUSED, "x")
    offers.on_step({"other": 1})
    assert offers.take_progress() == []


def test_a_word_of_work_fits_into_a_message_however_many_transfers_there_are() -> None:
    offers = Offers(groups=GROUPS, ranks=1)
    for n in range(WORK_MAX + 1):
        offers.register(f"r{n}", Key(TransferId(f"{n:032x}"), Attempt(1), 1), D, PROMPT, (301, 300))
        offers.on_allocated(f"r{n}", 0)
    offers.on_step({"other": 1})
    offers.on_step({})
    assert [len(one.work) for one in offers.take_progress()] == [WORK_MAX, 1]


SEVERAL = (CacheGroup(Reach("all", 128), 128), CacheGroup(Reach("window", 128, 200), 128),
           CacheGroup(Reach("state", 0), 2048))


def several(tokens: int = 500) -> Offers:
    offers = Offers(groups=SEVERAL, ranks=1, blocks=400)
    assert offers.register("r", KEY, D, PROMPT, (tokens + 1, tokens))
    offers.on_allocated("r", 0)
    return offers


def test_each_group_is_pushed_when_its_blocks_are_final_and_a_state_with_the_last_chunk() -> None:
    offers = several()
    assert offers.step("r", [[1, 2, 3], [4, 5, 6], [7]], computed=300) == [Push(KEY, 0, (1, 2), D.instance)]
    assert offers.step("r", [[1, 2, 3, 8], [0, 5, 6, 9], [7]], computed=400) == [
        Push(KEY, 2, (3,), D.instance), Push(KEY, 2, (6,), D.instance, 1)]
    assert offers.step("r", [[1, 2, 3, 8], [0, 0, 6, 9], [7]], computed=500) == [
        Push(KEY, 3, (8,), D.instance), Push(KEY, 3, (9,), D.instance, 1), Push(KEY, 0, (7,), D.instance, 2)]
    assert not offers.tracks("r")
    assert offers.end("r") == []


def test_a_block_that_is_not_there_when_it_is_final_withdraws_the_leg_and_nothing_is_sent_for_it() -> None:
    for lacking in ([[1, 0, 3, 8], [0, 0, 6, 9], [7]], [[1, 2, 3, 8], [0, 0, 0, 9], [7]], [[1, 2, 3, 8], [0, 0, 6, 9], [0]],
                    [[1, 2, 3], [0, 0, 6, 9], [7]]):
        offers = several()
        gone, release = offers.step("r", lacking, computed=500)
        assert isinstance(gone, SendGone)
        assert (gone.outcome, gone.retry) == (Outcome.PROTOCOL, False)
        assert "prefill has no block for one of" in gone.reason
        assert isinstance(release, Release)
        assert not offers.tracks("r")
        (ended,) = offers.rank_ended(0, KEY, Outcome.PROTOCOL, "x", 0)
        assert isinstance(ended, PrefillLegEnded)


def test_blocks_of_all_groups_that_ranks_have_not_copied_out_are_held() -> None:
    offers = several()
    offers.step("r", [[1, 2, 3, 8], [0, 0, 6, 9], [7]], computed=500)
    offers.end("r")
    assert offers.holds("r")
    offers.on_copied(0, KEY, 4)
    offers.on_copied(0, KEY, 2)
    assert offers.holds("r"), "the state is not copied yet"
    offers.on_copied(0, KEY, 1)
    assert offers.take_copied() == {"r"}


def test_blocks_of_a_leg_that_was_ended_are_held_until_every_rank_has_let_go_whenever_its_request_ends() -> None:
    for request_first in (True, False):
        offers = opened(ranks=2)
        offers.step("r", [[1, 2, 3]], computed=300)
        if request_first:
            offers.end("r")
        offers.peer_lost(D, Outcome.PEER_LOST, "it is silent")
        offers.end("r")
        offers.on_copied(0, KEY, 3)
        assert (offers.holds("r"), offers.take_copied()) == (True, set()), "rank 1 may still copy them out"
        offers.rank_ended(1, KEY, Outcome.PEER_LOST, "it is silent", 0)
        assert offers.take_copied() == {"r"}


def test_a_leg_that_was_aborted_in_the_middle_holds_nothing_since_decode_cannot_take_it() -> None:
    offers = opened()
    offers.step("r", [[1]], computed=128)
    assert [type(one) for one in offers.end("r")] == [SendGone, Release]
    assert not offers.holds("r")
