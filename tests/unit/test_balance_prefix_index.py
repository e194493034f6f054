"""What each instance probably holds: the longest match, what all have in common, and bounded memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from sys import getsizeof

import msgspec
import pytest
from members import member
from msgspec import Raw

from xpyd_sidecar.contract.ids import Incarnation, Role
from xpyd_sidecar.router.api.prompt import PromptPrefix, prefix_of
from xpyd_sidecar.router.balance.candidates import MOST_INSTANCES, MOST_NODES, PrefixCacheIndex
from xpyd_sidecar.router.fleet.member import FleetMember

FLEET = tuple(member(f"e{number}") for number in range(5))


def longest(held: PrefixCacheIndex, candidates: Sequence[FleetMember], prefix: PromptPrefix) -> list[tuple[int, int]]:
    return held.holding(candidates, prefix, 0)


def prompt(*parts: str) -> PromptPrefix:
    """Each part is 1,024 bytes."""
    return PromptPrefix("".join(part.ljust(1024, ".") for part in parts).encode())


def chat(turns: int) -> PromptPrefix:
    messages = [{"role": "assistant" if n % 2 else "user", "content": f"{n} " * 60} for n in range(turns)]
    return prefix_of("chat", {"messages": Raw(msgspec.json.encode(messages))}, b"")


def test_who_holds_the_longest_prefix_comes_first() -> None:
    held = PrefixCacheIndex()
    held.add(FLEET[1], prompt("a", "b"))
    held.add(FLEET[3], prompt("a", "b", "c", "d"))
    assert held.holders(FLEET, prompt("a", "b", "c", "x")) == ([(3072, 3), (2048, 1)], 0)
    assert held.holders(FLEET, prompt("x")) == ([], 0)
    assert longest(held, FLEET, prompt("a", "b", "c", "x")) == [(3072, 3), (2048, 1)]


def test_who_holds_all_but_a_rest_is_found_though_most_do() -> None:
    held = PrefixCacheIndex()
    for each in FLEET[:4]:
        held.add(each, prompt("a", "b"))
    held.add(FLEET[4], prompt("a"))
    assert sorted(held.holding(FLEET, prompt("a", "b", "x"), 2048)) == [(2048, index) for index in range(4)]
    assert held.holding(FLEET, prompt("a", "b", "x"), 2049) == []


def test_what_was_held_when_a_prompt_was_looked_up_counts_and_not_that_it_was_sent_there_since() -> None:
    held, asked = PrefixCacheIndex(), prompt("a", "b")
    held.add(FLEET[1], prompt("a"))
    assert held.held_bytes(FLEET[1], asked) == 1024
    held.add(FLEET[2], asked)
    assert (held.held_bytes(FLEET[2], asked), held.held_bytes(FLEET[2], prompt("a", "b"))) == (0, 2048)


def test_who_was_sent_a_longer_prompt_holds_its_beginning_too() -> None:
    """Whatever cuts the shorter one has: ends of messages are cuts of the last ones alone."""
    held, turn = PrefixCacheIndex(), chat(12)
    held.add(FLEET[1], turn)
    assert held.held_bytes(FLEET[1], chat(13)) == len(turn) - 1, "but for the bracket at its end"
    assert held.held_bytes(FLEET[1], chat(20)) >= len(turn) * 4 / 5


def test_less_than_half_of_the_longest_is_left_out() -> None:
    held = PrefixCacheIndex()
    held.add(FLEET[1], prompt("a"))
    held.add(FLEET[3], prompt("a", "b", "c"))
    assert held.holders(FLEET, prompt("a", "b", "c"))[0] == [(3072, 3)]


def test_what_most_hold_is_told_apart_and_names_nobody() -> None:
    held = PrefixCacheIndex()
    for each in FLEET[:3]:
        held.add(each, prompt("system", str(each.name)))
    assert held.holders(FLEET, prompt("system", "new")) == ([], 1024)
    assert held.holders(FLEET, prompt("system", "e2", "more")) == ([(2048, 2)], 1024)


def test_a_restarted_instance_holds_nothing() -> None:
    held = PrefixCacheIndex()
    one = member("e1")
    held.add(one, prompt("a"))
    assert longest(held, (one,), prompt("a")) == [(1024, 0)]
    one.incarnation = Incarnation("b" * 32)
    assert longest(held, (one,), prompt("a")) == []


def test_candidates_may_be_any_part_of_the_fleet() -> None:
    held = PrefixCacheIndex()
    for each in FLEET:
        held.add(each, prompt(each.name))
    for some in (FLEET, FLEET[2:], list(FLEET[::-1]), FLEET[2:], FLEET):
        for index, each in enumerate(some):
            assert held.holders(some, prompt(each.name)) == ([(1024, index)], 0)


@pytest.mark.parametrize("seed", range(3))
def test_holders_are_those_of_a_plain_search(seed: int) -> None:
    draw, held = random.Random(seed), PrefixCacheIndex()
    sent: list[list[tuple[str, ...]]] = [[] for _ in FLEET]
    for _ in range(60):
        parts = tuple(draw.choice("ab") for _ in range(draw.randrange(1, 6)))
        index = draw.randrange(len(FLEET))
        sent[index].append(parts)
        held.add(FLEET[index], prompt(*parts))
    for _ in range(100):
        asked = tuple(draw.choice("ab") for _ in range(5))
        best = [max((next((n for n, (x, y) in enumerate(zip(one, asked, strict=False)) if x != y), min(len(one), 5))
                     for one in each), default=0) * 1024 for each in sent]
        found = {index: cut for cut, index in longest(held, FLEET, prompt(*asked))}
        for index, length in enumerate(best):
            assert length <= found.get(index, 0) < length + 1024, "a cut may lie inside a part that is common"


@pytest.mark.test_all
def test_a_million_distinct_prompts_take_bounded_memory() -> None:
    held, fleet = PrefixCacheIndex(), tuple(member(f"e{number}") for number in range(8))
    most = 0
    for number in range(1_000_000):
        held.add(fleet[number % 8], PromptPrefix(b"%09d" % number * 10))
        if not number % 1000:
            most = max(most, len(held))
    assert MOST_NODES / 2 < most <= MOST_NODES
    size = sum(getsizeof(nodes) + sum(getsizeof(key) + getsizeof(bits) for key, bits in nodes.items())
               for nodes in (held._young, held._old))
    assert size < 12 << 20
    assert longest(held, fleet, PromptPrefix(b"%09d" % 999_999 * 10)), "what came last is there"


def test_what_is_used_stays() -> None:
    held = PrefixCacheIndex(most=64)
    for number in range(500):
        held.add(FLEET[0], prompt("kept"))
        held.add(FLEET[1], prompt(str(number)))
    assert longest(held, FLEET, prompt("kept")) == [(1024, 0)]
    assert longest(held, FLEET, prompt("1")) == []


def test_instances_that_come_and_go_are_bounded_too() -> None:
    held = PrefixCacheIndex()
    for number in range(2 * MOST_INSTANCES + 10):
        held.add(member(f"e{number}"), prompt(str(number)))
    assert len(held._bits) <= MOST_INSTANCES


def test_how_many_prefixes_an_instance_holds_is_counted_and_forgotten_with_them() -> None:
    def count(each: FleetMember) -> int:
        return held.count(each.name, each.incarnation)

    one, other = FLEET[1], FLEET[2]
    held = PrefixCacheIndex()
    held.add(one, prompt("a", "b"))
    longer = count(one)
    held.add(one, prompt("a", "b"))
    held.add(other, prompt("a"))
    assert count(one) == longer
    assert 0 < count(other) < longer
    assert count(FLEET[3]) == held.count(one.name, Incarnation("restarted")) == 0
    held = PrefixCacheIndex(most=8)
    held.add(one, prompt("a"))
    for number in range(20):
        held.add(other, prompt(f"x{number}"))
    assert count(one) == 0
    assert 0 < count(other) <= 8


def turns(*roles: str, words: int = 90) -> PromptPrefix:
    messages = [{"role": role, "content": f"{at} {role} " * words} for at, role in enumerate(roles)]
    return prefix_of("chat", {"messages": Raw(msgspec.json.encode(messages))}, b"")


def test_decode_holds_what_it_has_answered_to_the_prompt_before() -> None:
    held, decode, prefill = PrefixCacheIndex(), member("d"), member("p", role=Role.PREFILL)
    before, now = turns("user", "assistant", "user"), turns("user", "assistant", "user", "assistant", "user")
    answered = len(turns("user", "assistant", "user", "assistant")) - 1
    for each in (decode, prefill):
        held.add(each, before)
    assert held.held_bytes(prefill, now) == len(before) - 1
    assert held.held_bytes(decode, now) == answered
    assert held.holding((decode,), turns("user", "assistant", "user", "assistant", "user"), answered) == [(answered, 0)]
    assert held.holding((decode,), turns("user", "assistant", "user", "assistant", "user"), answered + 1) == []


ASKED = ("user", "assistant", "user")


@pytest.mark.parametrize("roles", [ASKED, (*ASKED, "assistant"), (*ASKED, "user", "user")])
def test_what_it_has_not_said_decode_is_not_believed_to_hold(roles: tuple[str, ...]) -> None:
    held, decode, before = PrefixCacheIndex(), member("d"), turns(*ASKED)
    held.add(decode, before)
    assert held.held_bytes(decode, turns(*roles)) == len(before) - 1


def test_what_is_told_counts_before_what_is_believed() -> None:
    held, (one, other, *_) = PrefixCacheIndex(), FLEET
    prefix = prompt("a", "b")
    keys = [key for _, key in prefix.keys]
    held.tell(one, keys, [])
    assert longest(held, FLEET, prompt("a", "b")) == [(2048, 0)]
    held.add(other, prompt("a", "b"))
    held.tell(other, [], keys[-1:])
    assert longest(held, FLEET, prompt("a", "b")) == [(2048, 0), (prefix.keys[-2][0], 1)]
    held.tell(one, keys[:2], [], whole=True)
    assert [index for _, index in longest(held, FLEET, prompt("a", "b"))] == [1, 0]
    assert (held.count(one.name, one.incarnation), held.count(other.name, other.incarnation)) == (2, len(keys) - 1)
    held.tell(one, [], keys)
    assert [index for _, index in longest(held, FLEET, prompt("a", "b"))] == [1]
    assert held.count(one.name, one.incarnation) == 0


def test_telling_all_anew_without_end_takes_no_more_memory() -> None:
    held = PrefixCacheIndex(most=1000)
    for number in range(3 * MOST_INSTANCES):
        held.tell(FLEET[0], [number % 7], [], whole=True)
        assert max(held._young.values()).bit_length() <= MOST_INSTANCES
    assert longest(held, FLEET, prompt("a")) == []
