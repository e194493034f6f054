"""Labels that end engines: the laws by cases, what hypothesis thinks of, and a fleet under three kinds of attack."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw
from poison_world import Asked, World

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.router.api.bodies import RequestHash, hash_of
from xpyd_sidecar.router.api.labels import Label, Labels, labels_of
from xpyd_sidecar.router.serving import likeness as li
from xpyd_sidecar.router.serving.likeness import Engine, LabelVerdict, Traffic
from xpyd_sidecar.router.serving.poison_ledger import Conviction, Ledger, Word


def engine(number: int) -> Engine:
    return InstanceName(f"d{number}"), Incarnation("i0")


def request(name: str) -> RequestHash:
    return RequestHash(name.encode().ljust(16, b"."))


def label(name: str) -> Label:
    return Label(name.encode().ljust(8, b"."))


A, B, C, H = map(request, "ABCH")
G, P = label("grammar"), label("Prefix")
BAD: Labels = {G: "a grammar"}
USUAL: Labels = {label("usual"): "usual"}


def served(ledger: Ledger, requests: int = 200, *, each: Labels = USUAL, now: float = 0.0) -> None:
    """So many ended well."""
    for _ in range(requests):
        ledger.alike.traffic.add(each)
    ledger.tick(now)


def death(ledger: Ledger, now: float, number: int, *present: tuple[RequestHash, Labels],
          ) -> Conviction | LabelVerdict | None:
    for one, labels in present:
        assert ledger.on_break(now, engine(number), one, labels) is None
    return ledger.on_death(now, engine(number))


def convict(ledger: Ledger, one: RequestHash, labels: Labels, *, at: int = 0, now: float = 0.0) -> None:
    """Two engines die of it alone."""
    death(ledger, now, at, (one, labels))
    assert isinstance(death(ledger, now, at + 1, (one, labels)), Conviction)


def test_what_a_convicted_request_has_is_quarantined_and_the_next_death_of_one_that_has_it_refuses_it() -> None:
    ledger = Ledger()
    served(ledger)
    convict(ledger, A, BAD)
    assert ledger.judge_request(1.0, B, BAD) is Word.QUARANTINE
    assert ledger.judge_request(1.0, B, {P: "another"}) is Word.GO
    verdict = death(ledger, 2.0, 5, (B, BAD), (H, {}))
    assert isinstance(verdict, LabelVerdict)
    assert (verdict.what, verdict.engines) == ("a grammar", ("d0", "d1", "d5"))
    assert verdict.words.startswith("3 engines have died of requests that have this in common: a grammar")
    assert ledger.judge_request(3.0, C, BAD) is verdict
    assert ledger.judge_request(3.0, H, {}) is Word.GO
    assert not ledger._cases, "what it explains accuses nobody else"


def test_it_is_refused_twice_as_long_each_time_and_quarantined_between() -> None:
    ledger, now = Ledger(), 0.0
    served(ledger)
    convict(ledger, A, BAD)
    for turn, refused_s in enumerate((60.0, 120.0, 240.0, 480.0, 600.0, 600.0)):
        assert isinstance(death(ledger, now, 5 + turn, (request(f"b{turn}"), BAD)), LabelVerdict)
        assert isinstance(ledger.judge_request(now + refused_s - 0.1, C, BAD), LabelVerdict)
        now += refused_s
        assert ledger.judge_request(now, C, BAD) is Word.QUARANTINE
    ledger.tick(now + li.KNOWN_S)
    assert ledger.judge_request(now + li.KNOWN_S, C, BAD) is Word.QUARANTINE
    ledger.tick(now + li.KNOWN_S + 0.1)
    assert ledger.judge_request(now + li.KNOWN_S + 0.1, C, BAD) is Word.GO


def test_a_success_clears_a_label_in_quarantine_and_one_that_is_refused() -> None:
    ledger = Ledger()
    served(ledger)
    convict(ledger, A, BAD)
    ledger.on_ended_well(BAD)
    assert ledger.judge_request(1.0, B, BAD) is Word.GO
    convict(ledger, B, BAD, at=2)
    assert isinstance(death(ledger, 1.0, 5, (C, BAD)), LabelVerdict)
    ledger.on_ended_well(BAD)
    assert ledger.judge_request(1.0, H, BAD) is Word.GO


def test_a_success_before_the_deaths_speaks_for_a_label_of_a_convicted_request() -> None:
    ledger = Ledger()
    served(ledger, each=BAD, requests=1)
    served(ledger)
    convict(ledger, A, BAD)
    assert ledger.judge_request(1.0, B, BAD) is Word.GO


def test_a_label_that_more_than_a_twentieth_carries_never_quarantines() -> None:
    ledger = Ledger()
    served(ledger, 188)
    served(ledger, 12, each=BAD)
    convict(ledger, A, BAD)
    for number in range(30):
        death(ledger, 1.0, 10 + number, (request(str(number)), BAD), (request(f"beside {number}"), {}))
        assert ledger.judge_request(1.0, B, BAD) is Word.GO
    ledger.take_refusals(2.0, [G])
    assert ledger.judge_request(2.0, B, BAD) is Word.GO, "nor if another router refuses it"


def test_a_router_that_knows_of_few_requests_takes_no_label_for_rare() -> None:
    ledger = Ledger()
    served(ledger, 59)
    convict(ledger, A, BAD)
    assert ledger.judge_request(1.0, B, BAD) is Word.GO
    served(ledger, 1)
    convict(ledger, B, BAD, at=2)
    assert ledger.judge_request(1.0, C, BAD) is Word.QUARANTINE


def test_deaths_of_different_requests_that_end_one_engine_each_quarantine_what_they_have() -> None:
    ledger, others = Ledger(), [(request(f"h{number}"), {label(f"own{number}"): "own"}) for number in range(9)]
    served(ledger)
    for number in range(3):
        assert ledger.judge_request(0.0, request("new"), BAD) is Word.GO, number
        assert death(ledger, 0.0, number, (request(f"b{number}"), BAD), *others[3 * number:3 * number + 3]) is None
    assert ledger.judge_request(1.0, request("new"), BAD) is Word.QUARANTINE
    assert all(ledger.judge_request(1.0, *one) is Word.GO for one in others)
    assert isinstance(death(ledger, 1.0, 9, (request("new"), BAD)), LabelVerdict)


def test_one_that_is_carried_from_death_to_death_brings_its_labels_once() -> None:
    ledger = Ledger()
    served(ledger)
    for number in range(6):
        death(ledger, 0.0, number, (A, {P: "its prompt"}), (request(f"h{number}"), {}), (request(f"i{number}"), {}))
        ledger.on_ended(0.0, A)
    assert ledger.alike._chance(P, list(ledger.alike._deaths.values())) == float("inf")
    assert ledger.judge_request(0.0, B, {P: "its prompt"}) is Word.GO


def test_what_is_at_deaths_as_often_as_chance_has_it_is_not_quarantined() -> None:
    """A label of one request in thirty, at three deaths among forty others each."""
    ledger = Ledger()
    served(ledger, 290)
    served(ledger, 10, each=BAD)
    for number in range(3):
        crowd: list[tuple[RequestHash, Labels]] = [(request(f"h{number}.{at}"), {}) for at in range(40)]
        death(ledger, 0.0, number, (request(f"b{number}"), BAD), *crowd)
    assert ledger.judge_request(0.0, request("new"), BAD) is Word.GO


def test_who_was_at_a_death_waits_where_others_like_it_were_at_another() -> None:
    ledger = Ledger()
    served(ledger)
    assert death(ledger, 0.0, 0, (A, BAD)) is None
    ledger.on_break(0.1, engine(1), B, BAD)
    assert ledger.judge_request(0.1, B, BAD) is Word.WAIT
    assert ledger.judge_request(0.1, C, BAD) is Word.GO, "who was at none does not"
    ledger.on_death(0.2, engine(1))
    assert ledger.judge_request(0.2, B, BAD) is Word.QUARANTINE
    ledger.on_ended_well(BAD)
    assert ledger.judge_request(0.3, B, BAD) is Word.GO


def test_a_convicted_requests_label_is_refused_at_once_where_another_that_has_it_was_at_another_death() -> None:
    ledger = Ledger()
    served(ledger)
    death(ledger, 0.0, 0, (A, BAD))
    death(ledger, 0.0, 1, (B, BAD), (H, {}))
    verdict = death(ledger, 0.0, 2, (A, BAD))
    assert isinstance(verdict, LabelVerdict)
    assert set(verdict.engines) == {"d0", "d1", "d2"}
    assert isinstance(ledger.judge_request(0.0, A, BAD), Conviction)
    assert isinstance(ledger.judge_request(0.0, B, BAD), LabelVerdict)
    assert ledger.judge_request(0.0, H, {}) is Word.GO


def test_of_what_suspects_have_in_common_the_label_that_fewest_requests_have_is_refused() -> None:
    ledger, prefix = Ledger(), Label(b"\x20" * 8)
    served(ledger)
    convict(ledger, A, {prefix: "the first 4096 bytes", Label(b"\x70" * 8): "a field", Label(b"\x10" * 8): "its own"})
    verdict = death(ledger, 1.0, 5, (B, {prefix: "the first 4096 bytes", Label(b"\x70" * 8): "a field"}))
    assert isinstance(verdict, LabelVerdict)
    assert verdict.what == "the first 4096 bytes"
    assert ledger.judge_request(1.0, C, {Label(b"\x70" * 8): "a field"}) is Word.QUARANTINE, "the others stay"


def test_two_suspects_with_nothing_in_common_convict_neither() -> None:
    ledger = Ledger()
    served(ledger)
    convict(ledger, A, BAD)
    convict(ledger, B, {P: "a prefix"}, at=2)
    assert death(ledger, 1.0, 5, (C, BAD), (H, {P: "a prefix"})) is None
    assert isinstance(death(ledger, 1.0, 6, (C, BAD)), LabelVerdict)


def test_a_death_while_its_label_is_refused_is_explained_by_it() -> None:
    ledger = Ledger()
    served(ledger)
    convict(ledger, A, BAD)
    ledger.on_break(0.9, engine(7), C, BAD)
    ledger.on_break(0.9, engine(7), H, {})
    assert isinstance(death(ledger, 1.0, 5, (B, BAD)), LabelVerdict)
    assert ledger.on_death(1.1, engine(7)) is None
    assert engine(7) not in ledger._cases


@pytest.mark.parametrize("end", ["lives", "on_lost"])
def test_an_engine_that_left_in_order_or_with_its_machine_accuses_no_label(end: str) -> None:
    ledger = Ledger()
    served(ledger)
    for number in range(6):
        ledger.on_break(0.0, engine(number), request(f"b{number}"), BAD)
        getattr(ledger, end)(engine(number))
    assert ledger.judge_request(0.0, request("b0"), BAD) is Word.GO
    assert not ledger.alike._deaths


# ---- among routers


def test_what_one_router_refuses_others_refuse_until_it_does_no_longer_and_then_quarantine() -> None:
    one, other = Ledger(), Ledger()
    served(one)
    served(other)
    convict(one, A, BAD)
    death(one, 1.0, 5, (B, BAD))
    assert set(one.refusals(1.0)) == {A, G}
    other.take_refusals(1.0, one.refusals(1.0))
    assert isinstance(other.judge_request(1.0, A), Conviction)
    assert isinstance(other.judge_request(1.0, C, BAD), LabelVerdict)
    assert other.refusals(1.0) == [], "hearsay is not told on"
    other.take_refusals(300.0, one.refusals(1.0))
    assert isinstance(other.judge_request(300.0, C, BAD), LabelVerdict), "as long as it is told"
    assert isinstance(other.judge_request(300.0, A), Conviction)
    other.take_refusals(301.0, [])
    assert other.judge_request(301.0, C, BAD) is Word.QUARANTINE
    assert other.judge_request(301.0, A) is Word.ALONE
    other.tick(301.0 + li.KNOWN_S)
    assert other.judge_request(301.0 + li.KNOWN_S, A) is Word.GO
    assert other.quiet


def test_a_success_here_stands_against_another_routers_word() -> None:
    ledger = Ledger()
    served(ledger)
    ledger.take_refusals(1.0, [G])
    ledger.on_ended_well(BAD)
    ledger.take_refusals(2.0, [G])
    assert ledger.judge_request(2.0, B, BAD) is Word.GO


# ---- bounds


def test_deaths_labels_carriers_and_verdicts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, bound in (("EVIDENCE", 3), ("LABELS", 4), ("CARRIERS", 2), ("VERDICTS", 5)):
        monkeypatch.setattr(li, name, bound)
    ledger = Ledger()
    for number in range(6):
        death(ledger, 0.0, number, *((request(f"h{number}.{at}"), {label(f"{number}.{at}"): "own", G: "a grammar"})
                                     for at in range(6)))
    alike = ledger.alike
    assert [name for name, _ in alike._deaths] == ["d3", "d4", "d5"]
    for one in alike._deaths.values():
        assert len(one.labels) == 4
        assert len(one.labels[G].requests) == 2
        assert one.present == 6
    served(ledger)
    for number in range(4):
        many = {label(f"{number}+{at}"): "own" for at in range(3)}
        convict(ledger, request(f"p{number}"), many, at=10 + 2 * number)
        assert len(alike._verdicts) <= 5
    assert ledger.judge_request(0.0, H, {label("3+0"): "own"}) is Word.QUARANTINE, "the oldest went"
    assert ledger.judge_request(0.0, H, {label("0+0"): "own"}) is Word.GO


def test_the_sample_of_traffic_is_bounded_and_the_latest_stay() -> None:
    traffic = Traffic()
    for number in range(3 * li.SAMPLE):
        traffic.add([G] if number < 2 * li.SAMPLE else [P])
    assert len(traffic) == li.SAMPLE
    assert (traffic.is_unseen(G), traffic.common(P)) == (True, True)


# ---- whatever happens

EVENTS = st.lists(st.tuples(
    st.sampled_from(["broke", "broke", "died", "lives", "lost", "ended", "well", "tick", "hear"]), st.integers(0, 4),
    st.integers(0, 5), st.sampled_from([0.0, 0.1, 5.0, 70.0, 700.0])), max_size=50)
OF = [{G: "g"}, {G: "g", P: "p"}, {P: "p"}, {}, {label("rare"): "r", G: "g"}, {label("usual"): "usual"}]


@settings(max_examples=300, deadline=None)
@given(EVENTS, st.integers(0, 300))
def test_its_words_follow_from_its_tables(events: list[tuple[str, int, int, float]], sample: int) -> None:
    ledger, now, alike = Ledger(), 0.0, None
    served(ledger, sample)
    alike = ledger.alike
    for what, number, who, passes in events:
        now += passes
        one, labels = request(str(who)), OF[who]
        known = set(alike._verdicts)
        said: Any = None
        match what:
            case "broke":
                said = ledger.on_break(now, engine(number), one, labels)
            case "died":
                said = ledger.on_death(now, engine(number))
            case "lives":
                ledger.lives(engine(number))
            case "lost":
                ledger.on_lost(engine(number))
            case "ended":
                ledger.on_ended(now, one)
            case "well":
                ledger.on_ended_well(labels)
                assert not alike._verdicts.keys() & labels.keys(), "law 5"
            case "hear":
                ledger.take_refusals(now, [*labels, *([one] if number else [])])
            case _:
                ledger.tick(now)
        assert label("usual") not in alike._verdicts or sample < 60, "law 1"
        if isinstance(said, LabelVerdict):
            assert said.holds(now)
            assert said.engines
            assert not any(said.label in death.labels for death in alike._deaths.values()), "law 3 of the ledger"
        if sample < 19 and what != "hear":
            assert set(alike._verdicts) <= known, "nothing is known to be rare"
        for death in alike._deaths.values():
            assert all(0 < len(carriers.requests) <= min(death.present, li.CARRIERS) for carriers in death.labels.values())
        assert alike._deaths.keys() <= ledger._cases.keys()
        for at, labels_of_it in enumerate(OF):
            word = ledger.judge_request(now, request(str(at)), labels_of_it)
            if alike.refusal(now, labels_of_it) is not None:
                assert not isinstance(word, Word)
            elif alike.is_quarantined(labels_of_it):
                assert word is not Word.GO
            there = any(request(str(at)) in case.present for case in ledger._cases.values())
            assert ledger.alert or there or word is Word.GO


# ---- a fleet: three kinds of poison, 15 requests each, among 150 honest ones

SYSTEMS = (("You are a helpful assistant. " * 20, 60), ("You are the support desk of a bank. " * 15, 30),
           ("Translate what follows. ", 7), ("You write SQL. " * 30, 3))
KINDS = ("a grammar", "a prefix", "nothing in common")
WARM, HONEST, POISONS = 200, 150, 15


def chat(system: str, text: str, **more: Any) -> tuple[RequestHash, Labels]:
    body = {"model": "tiny", "messages": [{"role": "system", "content": system}, {"role": "user", "content": text}],
            "max_tokens": 64, "temperature": 0.7, **more}
    raw = {name: Raw(json.dumps(value).encode()) for name, value in body.items()}
    return hash_of("chat", raw), labels_of("chat", "tiny", raw, raw["messages"])


def honest(draw: random.Random, number: int) -> Asked:
    more: dict[str, Any] = {}
    if draw.random() < 0.1:
        more["tools"] = [{"type": "function", "function": {"name": "search"}}]
    if draw.random() < 0.04:
        more["response_format"] = {"type": "json_object"}
    if draw.random() < 0.03:
        more["seed"] = draw.randrange(1000)
    [system] = draw.choices([text for text, _ in SYSTEMS], [weight for _, weight in SYSTEMS])
    return Asked(*chat(system, f"{draw.random()} tell me of {number}", **more), draw.uniform(0.1, 1.0), family="honest")


def poison(draw: random.Random, kind: str, number: int) -> Asked:
    text = f"{draw.random()} {number}"
    match kind:
        case "a grammar":
            made = chat(draw.choice(SYSTEMS)[0], text, structured_outputs={"grammar": "root ::= (a)*"})
        case "a prefix":
            made = chat("Agent 7: mend the parser. " * 8, text)
        case _:
            made = chat("".join(draw.choice("abcdefgh ") for _ in range(200)), text)
    return Asked(*made, 0.3, kills=True, family=kind)


def under_attack(seed: int, kinds: tuple[str, ...], every_s: float) -> tuple[World, list[Asked]]:
    """What became of it, and the honest requests: ten a second, from 20 s before the first poison on. Kinds begin 4 s after
    each other.
    """
    draw, now, asked = random.Random(seed), 0.0, []
    world = World(draw, engines=8)
    for number in range(WARM + HONEST):
        now += draw.expovariate(10.0)
        asked.append(honest(draw, number))
        world.ask(now, asked[-1])
    begin = asked[WARM].came
    for at, kind in enumerate(kinds):
        for number in range(POISONS):
            world.ask(begin + 4.0 * at + every_s * number + draw.uniform(0.0, 0.2), poison(draw, kind, number))
    world.run()
    return world, asked


def check_honest(world: World, asked: list[Asked], seed: int) -> None:
    assert set(asked) <= set(world.answered), seed
    assert max(one.held_s for one in asked) < 1.0, (seed, "nobody waits for another one's answer")


@pytest.mark.parametrize("kind", KINDS[:2])
def test_poisons_that_have_something_in_common_end_four_engines_in_all(kind: str) -> None:
    for seed in range(25):
        world, asked = under_attack(seed, (kind,), 1.0)
        assert world.deaths[kind] <= 4, seed
        check_honest(world, asked, seed)
        assert not world.quarantined & set(asked), (seed, "honest ones go where they like")
        assert sum(one.family == kind for one in world.refused) == POISONS


def test_poisons_that_have_nothing_in_common_end_three_engines_each() -> None:
    for seed in range(25):
        world, asked = under_attack(seed, (KINDS[2],), 1.5)
        assert max(world.ended_by.values()) <= 3, seed
        check_honest(world, asked, seed)
        assert not world.quarantined & set(asked), seed


def test_all_three_in_one_run_end_no_more() -> None:
    for seed in range(15):
        world, asked = under_attack(seed, KINDS, 2.0)
        assert max(world.deaths[kind] for kind in KINDS[:2]) <= 4, (seed, world.deaths)
        assert max(world.ended_by.values()) <= 3, seed
        check_honest(world, asked, seed)
        assert not world.quarantined & set(asked), seed
