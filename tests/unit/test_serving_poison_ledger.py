"""The ledger of requests that end engines: its laws by cases, by a simulated fleet, by what hypothesis thinks of."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.router.api.bodies import RequestHash
from xpyd_sidecar.router.serving import poison_ledger as po
from xpyd_sidecar.router.serving.poison_ledger import Conviction, Engine, Ledger, Word


def engine(number: int) -> Engine:
    return InstanceName(f"d{number}"), Incarnation("i0")


def request(name: str) -> RequestHash:
    return RequestHash(name.encode().ljust(16, b"."))


A, B, C = map(request, "ABC")


def death(ledger: Ledger, now: float, number: int, *present: RequestHash) -> Conviction | None:
    for one in present:
        assert ledger.on_break(now, engine(number), one) is None
    return ledger.on_death(now, engine(number))


def test_without_a_death_everybody_goes() -> None:
    ledger = Ledger()
    assert (ledger.quiet, ledger.alert, ledger.judge_request(0.0, A)) == (True, False, Word.GO)


def test_the_first_break_holds_nobody_and_the_second_holds_until_both_verdicts_are_there() -> None:
    ledger = Ledger()
    ledger.on_break(0.0, engine(1), A)
    assert (ledger.judge_request(0.0, A), ledger.alert, ledger.quiet) == (Word.GO, False, False)
    ledger.on_break(0.1, engine(2), A)
    ledger.on_break(0.1, engine(2), B)
    assert (ledger.judge_request(0.1, A), ledger.judge_request(0.1, B), ledger.alert) == (Word.WAIT, Word.GO, True)
    assert ledger.on_death(0.2, engine(1)) is None
    assert ledger.judge_request(0.2, A) is Word.WAIT
    assert ledger.on_death(0.3, engine(2)) is None
    assert (ledger.judge_request(0.3, A), ledger.judge_request(0.3, B), ledger.suspects) == (Word.ALONE, Word.GO, 1)


def test_who_was_alone_at_two_deaths_is_convicted() -> None:
    ledger = Ledger()
    assert death(ledger, 0.0, 1, A) is None
    conviction = death(ledger, 1.0, 2, A)
    assert conviction is not None
    assert (conviction.request, conviction.engines) == (A, ("d1", "d2"))
    assert conviction.words.startswith("2 engines have died of this request")
    assert ledger.judge_request(1.0, A) == conviction
    assert [ledger.judge_request(1.0, one) for one in (B, C)] == [Word.GO] * 2
    assert not ledger._cases, "what it explains accuses nobody else"


@pytest.mark.parametrize("first", [(A, B, C), (A,)])
def test_who_was_beside_others_at_one_of_two_deaths_has_a_third_try_alone(first: tuple[RequestHash, ...]) -> None:
    ledger, second = Ledger(), (A,) if len(first) > 1 else (C, A)
    assert death(ledger, 0.0, 1, *first) is None
    for other in (B, C):
        ledger.on_ended(0.5, other)
    assert death(ledger, 1.0, 2, *second) is None, "an unlucky one, as far as anybody knows"
    ledger.on_ended(1.5, C)
    assert ledger.judge_request(2.0, A) is Word.ALONE
    conviction = death(ledger, 3.0, 3, A, B)
    assert conviction is not None
    assert (conviction.request, conviction.engines) == (A, ("d1", "d2", "d3"))
    assert not ledger._cases, "what it explains accuses nobody else"


def test_a_first_death_convicts_nobody_even_who_was_alone() -> None:
    ledger = Ledger()
    assert death(ledger, 0.0, 1, A) is None
    assert ledger.judge_request(0.0, A) is Word.GO


def test_who_is_alone_at_a_first_death_waits_for_the_word_on_another_engine() -> None:
    ledger = Ledger()
    ledger.on_break(0.0, engine(1), A)
    assert death(ledger, 0.1, 2, A) is None
    assert ledger.judge_request(0.1, A) is Word.WAIT
    ledger.lives(engine(1))
    assert ledger.judge_request(0.2, A) is Word.GO


def test_the_sole_suspect_at_a_third_death_is_convicted_among_as_many_as_there_are() -> None:
    ledger, others = Ledger(), [request(f"h{number}") for number in range(100)]
    assert death(ledger, 0.0, 1, A, B, *others[:50]) is None
    assert death(ledger, 1.0, 2, A, B, *others[50:]) is None
    assert (ledger.judge_request(1.0, A), ledger.judge_request(1.0, B), ledger.suspects) == (Word.ALONE, Word.ALONE, 2)
    conviction = death(ledger, 2.0, 3, A, *others)
    assert conviction is not None
    assert (conviction.request, conviction.engines) == (A, ("d1", "d2", "d3"))
    assert all(ledger.judge_request(2.0, one) is Word.GO for one in (B, *others)), "twice at a death that is explained"


def test_two_suspects_at_one_death_convict_neither() -> None:
    ledger = Ledger()
    for number in range(3):
        assert death(ledger, float(number), number, A, B) is None
    assert death(ledger, 3.0, 3, A) is not None
    assert ledger.judge_request(3.0, B) is Word.GO


def test_an_engine_that_lives_accuses_nobody() -> None:
    ledger = Ledger()
    for number in (1, 2):
        ledger.on_break(0.0, engine(number), A)
    ledger.lives(engine(1))
    assert ledger.judge_request(0.0, A) is Word.GO
    ledger.on_death(0.0, engine(2))
    ledger.lives(engine(2))
    assert ledger.judge_request(0.0, A) is Word.GO
    assert death(ledger, 1.0, 3, A) is not None, "one that had died stays dead, whatever answers at its address now"


def test_an_engine_that_is_lost_with_its_machine_accuses_nobody_though_it_looked_dead() -> None:
    ledger = Ledger()
    death(ledger, 0.0, 1, A)
    ledger.on_lost(engine(1))
    assert ledger.quiet
    assert death(ledger, 1.0, 2, A) is None


def test_an_incarnation_dies_once_and_one_that_nobody_was_at_accuses_nobody() -> None:
    ledger = Ledger()
    assert ledger.on_death(0.0, engine(1)) is None
    assert (ledger.deaths, ledger.quiet) == (0, True)
    death(ledger, 0.0, 1, A)
    assert ledger.on_death(0.1, engine(1)) is None
    assert ledger.deaths == 1


def test_who_is_noted_after_the_verdict_was_there_as_well() -> None:
    ledger = Ledger()
    death(ledger, 0.0, 1, A)
    death(ledger, 0.5, 2, A, B)
    death(ledger, 1.0, 3, C)
    conviction = ledger.on_break(1.1, engine(3), A)
    assert conviction is not None
    assert (conviction.request, conviction.engines) == (A, ("d1", "d2", "d3"))


def test_no_verdict_in_time_is_no_death() -> None:
    ledger = Ledger()
    for number in (1, 2):
        ledger.on_break(0.0, engine(number), A)
    ledger.tick(po.VERDICT_S)
    assert ledger.judge_request(po.VERDICT_S, A) is Word.WAIT
    ledger.tick(po.VERDICT_S + 0.1)
    assert ledger.judge_request(po.VERDICT_S + 0.1, A) is Word.GO
    assert ledger.quiet


def test_a_suspect_that_ends_whole_is_cleared() -> None:
    ledger = Ledger()
    for number in (1, 2):
        death(ledger, 0.0, number, A, B)
    ledger.on_ended(1.0, A)
    assert (ledger.judge_request(1.0, A), ledger.judge_request(1.0, B)) == (Word.GO, Word.ALONE)
    assert death(ledger, 2.0, 3, A) is None, "its past is forgotten"


def test_a_refusal_holds_for_a_minute_then_it_is_a_suspect_whose_next_death_convicts_it_again() -> None:
    ledger = Ledger()
    death(ledger, 0.0, 1, A)
    death(ledger, 0.0, 2, A)
    ledger.on_ended(59.9, A)
    assert isinstance(ledger.judge_request(59.9, A), Conviction), "also where one that still ran ends well"
    assert ledger.judge_request(60.0, A) is Word.ALONE
    ledger.on_break(61.0, engine(3), A)
    assert ledger.judge_request(61.0, A) is Word.WAIT
    again = ledger.on_death(61.1, engine(3))
    assert again is not None
    assert again.words.startswith("an engine has died of this request")
    assert isinstance(ledger.judge_request(120.0, A), Conviction)
    ledger.on_ended(125.0, A)
    assert ledger.judge_request(125.0, A) is Word.GO, "one that ends well after its minute is cleared"


def test_what_is_old_is_forgotten() -> None:
    ledger = Ledger()
    for number in (1, 2):
        death(ledger, float(number), number, A, B)
    ledger.tick(601.0)
    assert ledger.judge_request(601.0, A) is Word.ALONE
    ledger.tick(601.1)
    assert (ledger.judge_request(601.1, A), ledger.quiet) == (Word.GO, False)
    assert death(ledger, 601.1, 3, A, B) is None
    assert ledger.judge_request(601.1, A) is Word.ALONE, "the second death still counts"
    ledger.tick(1201.2)
    assert (ledger.judge_request(1201.2, A), ledger.quiet) == (Word.GO, True)


def test_a_death_while_it_is_refused_is_explained_by_it() -> None:
    """It was in flight on two engines when it was convicted for a third."""
    ledger = Ledger()
    death(ledger, 0.0, 1, A)
    ledger.on_break(0.0, engine(4), A)
    ledger.on_break(0.0, engine(4), B)
    death(ledger, 0.0, 2, A)
    assert isinstance(ledger.judge_request(0.0, A), Conviction)
    assert ledger.on_death(1.0, engine(4)) is None
    assert not ledger._cases
    assert ledger.judge_request(1.0, B) is Word.GO


# ---- bounds


def test_no_more_than_so_many_convictions_are_kept_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(po, "CONVICTED", 3)
    ledger, those = Ledger(), [request(f"p{number}") for number in range(5)]
    for number, one in enumerate(those):
        death(ledger, float(number), 2 * number, one)
        death(ledger, float(number), 2 * number + 1, one)
    assert [isinstance(ledger.judge_request(5.0, one), Conviction) for one in those] == [False, False, True, True, True]
    assert len(ledger.convictions(5.0)) == 3


def test_no_more_than_so_many_cases_are_kept_and_open_ones_go_before_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(po, "CASES", 3)
    ledger = Ledger()
    death(ledger, 0.0, 0, A)
    for number in range(1, 5):
        ledger.on_break(float(number), engine(number), B)
    assert list(ledger._cases) == [engine(0), engine(3), engine(4)]
    for number in range(5, 8):
        death(ledger, float(number), number, request(f"x{number}"), request(f"y{number}"))
    assert list(ledger._cases) == [engine(5), engine(6), engine(7)]


def test_no_more_than_so_many_requests_are_noted_of_one_engine_but_those_that_were_at_others(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(po, "PRESENT", 3)
    ledger, others = Ledger(), [request(f"h{number}") for number in range(8)]
    for one in others:
        ledger.on_break(0.0, engine(1), one)
    assert ledger._cases[engine(1)].present == set(others[:3])
    for one in (A, B, C, *others):
        ledger.on_break(0.0, engine(2), one)
    assert ledger._cases[engine(2)].present == {A, B, C, *others[:3]}
    for one in others[5:]:
        ledger.on_break(0.0, engine(3), one)
    for one in (A, B, C, *others):
        ledger.on_break(0.0, engine(4), one)
    assert ledger._cases[engine(4)].present == {A, B, C, *others[:3]}, "nine were at others"


# ---- laws, whatever happens

EVENTS = st.lists(st.tuples(
    st.sampled_from(["broke", "died", "lives", "lost", "ended", "tick"]), st.integers(0, 4), st.integers(0, 3),
    st.sampled_from([0.0, 0.1, 5.0, 70.0, 700.0])), max_size=40)


@settings(max_examples=400)
@given(EVENTS)
def test_its_tables_agree_and_its_words_follow_from_them(events: list[tuple[str, int, int, float]]) -> None:
    ledger, now = Ledger(), 0.0
    requests = [request(str(number)) for number in range(4)]
    for what, number, who, passes in events:
        now += passes
        one, where = requests[who], engine(number)
        deaths_of = {each: sum(1 for case in ledger._cases.values() if case.dead and each in case.present)
                     for each in requests}
        known = {each for each in requests if each in ledger._convicted}
        said = None
        match what:
            case "broke":
                said = ledger.on_break(now, where, one)
            case "died":
                said = ledger.on_death(now, where)
            case "lives":
                ledger.lives(where)
            case "lost":
                ledger.on_lost(where)
            case "ended":
                ledger.on_ended(now, one)
            case _:
                ledger.tick(now)
        if said is not None:  # law 2
            assert deaths_of[said.request] >= 1 or said.request in known, "one death convicts nobody who is not known"
            assert all(said.request not in case.present or not case.dead for case in ledger._cases.values()), "law 3"
        check(ledger, now, requests)


def check(ledger: Ledger, now: float, requests: list[RequestHash]) -> None:
    cases = ledger._cases.values()
    for one in requests:
        there = [case for case in cases if one in case.present]
        assert (one in ledger._several) == (len(there) > 1)
        conviction = ledger._convicted.get(one)
        said = ledger.judge_request(now, one)
        if conviction is not None and now < conviction.at + 60:
            assert said == conviction
        elif conviction is None and len(there) < 2:
            assert said is Word.GO
        elif any(not case.dead for case in there):
            assert said is Word.WAIT
        else:
            assert said is Word.ALONE
        assert ledger.alert or said is Word.GO, "nobody is asked where there is nobody to be stopped"
    assert ledger.quiet == (not ledger._cases and not ledger._convicted)


# ---- a fleet


class World:
    """Engines, requests that run on them, and a router that does as the ledger says. Poisons kill where they are."""

    def __init__(self, draw: random.Random, engines: int, honest: int, poisons: int) -> None:
        self.draw = draw
        self.ledger = Ledger()
        self.engines = list(range(engines))
        self.poisons = [request(f"P{number}") for number in range(poisons)]
        self.honest = [request(f"h{number}") for number in range(honest)]
        self.where: dict[RequestHash, int] = {}
        self.held: list[RequestHash] = []
        self.alone: set[RequestHash] = set()
        self.refused: list[RequestHash] = []
        self.dead: list[int] = []
        self.unjudged: list[int] = []
        self.now = 0.0

    def send(self, one: RequestHash) -> None:
        self.held = [other for other in self.held if other != one]
        self.alone.discard(one)
        said = self.ledger.judge_request(self.now, one)
        if isinstance(said, Conviction):
            self.refused.append(one)
        elif said is Word.WAIT:
            self.held.append(one)
        else:
            taken = {self.where[other] for other in self.alone if other in self.where} if said is Word.ALONE else set()
            free = [engine for engine in self.engines if engine not in taken]
            if free:
                self.where[one] = self.draw.choice(free)
                if said is Word.ALONE:
                    self.alone.add(one)
            else:
                self.held.append(one)

    def kill(self, number: int) -> None:
        """It breaks what it serves; the word on it may come now or later."""
        self.engines.remove(number)
        self.dead.append(number)
        self.unjudged.append(number)
        broken = [one for one, there in self.where.items() if there == number]
        self.draw.shuffle(broken)
        for one in broken:
            del self.where[one]
            self.ledger.on_break(self.now, engine(number), one)
        for one in broken:
            self.send(one)

    def step(self) -> bool:
        self.now += 0.01
        here = [self.where[one] for one in self.poisons if one in self.where]
        acts: list[Callable[[], None]] = [partial(self.kill, number) for number in set(here)]
        acts += [self.judge] * (3 if self.unjudged else 0)
        if acts:
            self.draw.choice(acts)()
            self.look()
        if (self.draw.random() < 0.3 or not acts) and (honest := [one for one in self.honest if one in self.where]):
            done = self.draw.choice(honest)
            del self.where[done]
            self.alone.discard(done)
            self.ledger.on_ended(self.now, done)
            self.look()
        return bool(acts or self.held) or any(one in self.where for one in self.poisons)

    def look(self) -> None:
        """Held ones may go on, or are refused."""
        for one in list(self.held):
            self.send(one)

    def judge(self) -> None:
        self.ledger.on_death(self.now, engine(self.unjudged.pop(self.draw.randrange(len(self.unjudged)))))


@pytest.mark.parametrize("honest", [0, 1, 5, 100])
def test_one_that_kills_ends_two_engines_alone_and_three_among_others(honest: int) -> None:
    for number in range(300):
        world = World(random.Random(number), 8, honest, 1)
        for one in (*world.honest, *world.poisons):
            world.send(one)
        while world.step():
            pass
        assert world.refused == world.poisons, number
        assert len(world.dead) <= (3 if honest else 2), (number, world.dead)
        assert not world.held, number


def test_of_two_at_once_both_are_found_and_nearly_always_nobody_else() -> None:
    """Where a suspect is beside the other one, which is not known yet, it is taken for it: the ledger's known weakness."""
    ends, wrongly = [], 0
    for number in range(300):
        world = World(random.Random(number), 16, 100, 2)
        for one in (*world.honest, *world.poisons):
            world.send(one)
        while world.step():
            pass
        assert set(world.poisons) <= set(world.refused), number
        assert not world.held, number
        ends.append(len(world.dead))
        wrongly += len(set(world.refused) - set(world.poisons))
    assert sum(count <= 6 for count in ends) >= 0.95 * len(ends)
    assert max(ends) <= 12
    assert wrongly <= 0.05 * len(ends), "honest ones that were refused, of 100 in each run"
