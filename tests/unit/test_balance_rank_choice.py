"""Which data-parallel rank of an instance a request goes to."""

from __future__ import annotations

from collections import Counter
from random import Random

from xpyd_sidecar.contract.ids import HostPort, Incarnation, InstanceName
from xpyd_sidecar.router.api.prompt import PromptPrefix, key_of
from xpyd_sidecar.router.balance import picker
from xpyd_sidecar.router.balance.picker import RankChoice
from xpyd_sidecar.router.fleet.member import FleetMember


def member(ranks: int, *, name: str = "p0", incarnation: str = "i") -> FleetMember:
    control = tuple(HostPort(f"10.0.0.1:{rank + 1}") for rank in range(ranks))
    return FleetMember(InstanceName(name), incarnation=Incarnation(incarnation), http=(HostPort("10.0.0.1:8000"),),
                       control=control)


def prompt(text: str) -> PromptPrefix:
    return PromptPrefix(text.encode())


def test_ranks_take_turns_and_one_alone_has_all() -> None:
    choice = RankChoice()
    assert [choice.choose(member(4), None) for _ in range(9)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert [choice.choose(member(1), None) for _ in range(3)] == [0, 0, 0]


def test_instances_take_turns_each_for_itself_and_a_new_life_begins_anew() -> None:
    choice = RankChoice()
    assert [choice.choose(one, None) for one in (member(2), member(2, name="p1"), member(2))] == [0, 0, 1]
    choice.choose(member(2), None)
    assert choice.choose(member(2, incarnation="j"), None) == 0


def test_a_conversation_stays_where_its_beginning_is() -> None:
    choice, one = RankChoice(), member(4)
    texts = [f"{number}" * 900 for number in range(4)]
    homes = [choice.choose(one, prompt(text)) for text in texts]
    assert homes == [0, 1, 2, 3]
    for turn in range(6):
        texts = [text + f"{turn}" * 300 for text in texts]
        assert [choice.choose(one, prompt(text)) for text in texts] == homes
    assert choice.choose(member(4, incarnation="j"), prompt(texts[3])) == 0, "who was restarted holds nothing"


def test_a_beginning_that_all_share_does_not_bring_all_to_one_rank() -> None:
    choice, one, shared = RankChoice(), member(4), "system prompt " * 100
    found = Counter(choice.choose(one, prompt(f"{shared}{number}" * 2)) for number in range(400))
    assert set(found) == {0, 1, 2, 3}
    assert max(found.values()) <= picker.RANK_OVERLOADED * 100 + picker.RANK_ALWAYS + picker.RANK_LATELY


def test_a_session_has_a_rank_and_many_sessions_have_all_of_them() -> None:
    choice, one = RankChoice(), member(8)
    sessions = [key_of(f"session {number}".encode()) for number in range(400)]
    homes = [choice.choose(one, None, session) for session in sessions]
    assert set(homes) == set(range(8)), "keys of sessions are odd"
    again = [choice.choose(one, None, session) for session in sessions]
    assert sum(left == right for left, right in zip(homes, again, strict=True)) > 380
    assert RankChoice().choose(one, None, sessions[0]) == homes[0], "the same for every router"


def test_one_session_alone_is_spread_when_it_is_too_much_for_a_rank() -> None:
    choice, one = RankChoice(), member(4)
    found = Counter(choice.choose(one, None, key_of(b"busy")) for _ in range(400))
    assert len(found) == 4
    assert max(found.values()) < 250


def test_what_is_remembered_is_bounded_and_what_is_used_lately_stays() -> None:
    rng, choice, one = Random(1), RankChoice(200), member(4)
    home = choice.choose(one, prompt("kept" * 100))
    for number in range(300):
        choice.choose(one, prompt(f"{number} {rng.random()}" * 40))
        assert len(choice) <= 200
        if number % 7 == 6:
            assert choice.choose(one, prompt("kept" * 100)) == home


def test_instances_that_are_counted_are_bounded() -> None:
    choice = RankChoice()
    for number in range(picker.MOST_INSTANCES + 10):
        choice.choose(member(2, name=f"p{number}"), None)
    assert len(choice._given) <= picker.MOST_INSTANCES
