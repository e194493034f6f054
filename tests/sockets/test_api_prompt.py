"""Keys of prefixes, and how many tokens a prompt has."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from xpyd_sidecar.router.api.fields import Api
from xpyd_sidecar.router.api.prompt import (
    BLOCK_BYTES,
    BYTES_PER_TOKEN,
    CUTS,
    ENDS,
    HOME_BYTES,
    MAX_BYTES,
    STEP,
    TAIL,
    PromptLengths,
    PromptPrefix,
    key_of,
    prefix_of,
)


def test_cuts_grow_with_the_prompt() -> None:
    assert CUTS[:12] == (256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096)
    assert CUTS[-1] == MAX_BYTES
    assert all(b - a <= max(BLOCK_BYTES, min(STEP, a / 4)) for a, b in itertools.pairwise(CUTS))
    assert len(CUTS) < 100


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_equal_keys_mean_an_equal_prefix(common: int, one: int, two: int) -> None:
    a, b = b"x" * common + b"a" * one, b"x" * common + b"b" * two
    found = {cut for cut, key in PromptPrefix(a).keys if (cut, key) in PromptPrefix(b).keys}
    assert found == {cut for cut in CUTS if cut <= common} | ({common} if one == two == 0 and common else set())


def test_the_whole_prompt_is_the_last_key_unless_it_is_too_long() -> None:
    assert [cut for cut, _ in PromptPrefix(b"x" * 300).keys] == [256, 300]
    assert [cut for cut, _ in PromptPrefix(b"x" * 256).keys] == [256]
    assert PromptPrefix(b"").keys == []
    assert PromptPrefix(b"x" * (MAX_BYTES + 1)).keys[-1][0] == MAX_BYTES


def test_raw_fields_of_a_body_are_taken_as_they_are() -> None:
    raw = msgspec.json.decode(b'{"prompt": "' + b"y" * 600 + b'"}', type=dict[str, msgspec.Raw])["prompt"]
    assert (len(PromptPrefix(raw)), [cut for cut, _ in PromptPrefix(raw).keys]) == (602, [256, 512, 602])


def test_the_home_is_the_same_in_another_process() -> None:
    code = "from xpyd_sidecar.router.api.prompt import PromptPrefix; print(PromptPrefix(b'abc' * 99).conversation_key(90))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(said) == PromptPrefix(b"abc" * 99).conversation_key(90) == key_of((b"abc" * 99)[90:])


def fields(**values: object) -> dict[str, Raw]:
    return {name: Raw(msgspec.json.encode(value)) for name, value in values.items()}


def messages(turns: int, *, role_last: bool = False, size: int = 300) -> list[dict[str, object]]:
    made: list[dict[str, object]] = [{"role": "system", "content": "be brief " * 9}]
    for turn in range(turns):
        text = f"{turn} says \"}}, {{\" and `}},{{` ".ljust(size, "x")
        parts: dict[str, object] = {"role": "assistant" if turn % 2 else "user"}
        parts["content"] = [{"type": "text", "text": text}, {"type": "text", "text": "."}] if turn % 3 == 1 else text
        made.append(dict(reversed(parts.items())) if role_last else parts)
    return made


def shared(one: PromptPrefix, other: PromptPrefix) -> int:
    """Bytes of the longest prefix that both have a key of."""
    return max((cut for cut, key in one.keys if (cut, key) in other.keys), default=0)


@pytest.mark.parametrize("role_last", [False, True])
@pytest.mark.parametrize("layout", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("turns", [1, 2, 5, 30, 200])
def test_a_turn_is_a_prefix_of_the_next_one_to_its_last_byte(turns: int, layout: tuple[str, str], role_last: bool) -> None:
    raws = [json.dumps(messages(count, role_last=role_last), separators=layout).encode() for count in (turns, turns + 2)]
    one, two = (prefix_of("chat", {"messages": Raw(raw)}, b"") for raw in raws)
    assert shared(one, two) == len(one) - 1, "but for the bracket"
    assert [cut for cut, _ in two.keys] == sorted({cut for cut, _ in two.keys})
    assert len(two.keys) <= len(CUTS) + ENDS
    assert one.conversation_key(0) == two.conversation_key(0)


def test_messages_are_told_apart_where_they_differ_and_not_before() -> None:
    said = messages(6)
    one, two = prefix_of("chat", fields(messages=said), b""), prefix_of("chat", fields(
        messages=[*said[:-1], {"role": "assistant", "content": "else"}]), b"")
    assert len(msgspec.json.encode(said[:-1])) - 1 <= shared(one, two) < len(one) - 1


@pytest.mark.parametrize("beside", ["model", "tools", "cache_salt", "documents", "chat_template", "chat_template_kwargs",
                                    "reasoning_effort"])
def test_kv_that_cannot_be_shared_has_no_key_in_common(beside: str) -> None:
    one, two = (prefix_of("chat", fields(messages=messages(3), **{beside: value}), b"") for value in ("a", "b"))
    assert shared(one, two) == 0
    assert shared(one, prefix_of("chat", fields(messages=messages(5), **{beside: "a"}), b"")) == len(one) - 1


@pytest.mark.parametrize(("api", "body", "before"), [
    ("messages", "messages", "system"), ("responses", "input", "instructions"), ("responses", "input", "tools")])
def test_dialects_have_their_own_names_for_it(api: Api, body: str, before: str) -> None:
    one, longer, other = (prefix_of(api, fields(**{body: messages(turns), before: words}), b"")
                          for turns, words in ((3, "a"), (5, "a"), (3, "b")))
    assert shared(one, longer) == len(one) - 1
    assert shared(one, other) == 0


@pytest.mark.parametrize("named", [
    {"prompt_cache_key": "s"}, {"session_id": "s"}, {"metadata": {"user_id": "s"}}, {"user": "s"},
    {"prompt_cache_key": "s", "user": "another"}, {"session_id": "s", "metadata": {"user_id": "another"}}])
def test_a_conversation_that_has_a_name_is_known_by_it(named: dict[str, object]) -> None:
    one, two = (prefix_of("chat", fields(messages=messages(turns), **named), b"k\0m") for turns in (1, 4))
    assert one.named == two.named == one.conversation_key(0) == two.conversation_key(99) == key_of(b'k\0m\0"s"')
    assert prefix_of("chat", fields(messages=messages(1), **named), b"another's").named != one.named
    assert prefix_of("chat", fields(messages=messages(1), **named), b"", b"s").named == key_of(b"\0s"), "the header"


@pytest.mark.parametrize("named", [
    {}, {"user": None}, {"metadata": None}, {"metadata": {"user_id": None}}, {"metadata": "no object"},
    {"prompt_cache_key": None}, {"metadata": {"user_id": "x" * 5000}}])
def test_one_without_a_name_is_known_by_its_first_user_message(named: dict[str, object]) -> None:
    said = [*messages(1), {"role": "assistant", "content": "yes"}]
    one, two = (prefix_of("chat", fields(messages=[{"role": "system", "content": system}, *said[1:]], **named), b"k")
                for system in ("a", "b" * 9000))
    assert one.named == 0
    assert one.conversation_key(0) == two.conversation_key(0)
    assert one.conversation_key(0) != prefix_of("chat", fields(messages=messages(1)), b"another's").conversation_key(0)


def test_a_text_is_known_by_what_comes_behind_what_all_have() -> None:
    raws = [b"s" * 9000 + tail for tail in (b"a" * HOME_BYTES, b"b" * HOME_BYTES, b"a" * HOME_BYTES + b"more")]
    a, b, longer = (PromptPrefix(raw).conversation_key(9000) for raw in raws)
    assert a == longer != b
    assert PromptPrefix(raws[0]).conversation_key(0) == PromptPrefix(raws[1]).conversation_key(0)


@pytest.mark.parametrize("raw", [
    b"[]", b"[ ]", b"[1]", b"null", b'"text"', b"[{}]", b'[{"role":"user"}]', b'[{"role":"user"', b"  ", b"]", b"[",
    b"[" + b",".join([b"{}"] * 9000) + b"]", b'[{"role":"user","content":"' + b"x" * 2 * TAIL + b'"}]'])
def test_whatever_stands_in_its_place_has_keys_and_a_home(raw: bytes) -> None:
    prefix = prefix_of("chat", {"messages": Raw(raw)}, b"")
    assert len(prefix.keys) <= len(CUTS) + ENDS
    assert all(0 <= cut <= len(raw) for cut, _ in prefix.keys)
    assert prefix.conversation_key(0) & 1


def test_a_million_tokens_are_cut_within_one_turn_of_the_loop() -> None:
    said = messages(4000, size=1000)
    raw = msgspec.json.encode(said)
    assert len(raw) > MAX_BYTES
    spent = []
    for _ in range(5):
        prefix = prefix_of("chat", {"messages": Raw(raw)}, b"")
        began = time.process_time()
        assert len(prefix.keys) >= len(CUTS)
        assert prefix.conversation_key(0)
        spent.append(time.process_time() - began)
    assert min(spent) < 0.04, spent  # a sixth of it on a machine that does nothing else; a look at each byte takes longer


@pytest.mark.parametrize(("prompt", "expected"), [
    ([5, 6, 7], 3),
    (list(range(1000)), 1000),
    ("x" * 398, 100),  # and two quotes
    ("", 1),
    ([{"role": "user", "content": "hi"}], 9),
])
def test_tokens_are_counted_for_ids_and_estimated_for_text(prompt: object, expected: int) -> None:
    assert PromptLengths().tokens(json.dumps(prompt).encode()) == expected


def test_ids_are_counted_however_they_are_laid_out() -> None:
    for indent in (None, 1, 4):
        assert PromptLengths().tokens(json.dumps([5, 6, 7], indent=indent).encode()) == 3


def test_no_prompt_has_no_tokens() -> None:
    assert PromptLengths().tokens(b"") == 0


def test_bytes_of_a_token_are_learned_from_what_engines_say() -> None:
    lengths = PromptLengths()
    for _ in range(2000):
        lengths.learn(b"x" * 3000, 1000)
    assert lengths.bytes_per_token == pytest.approx(3.0, abs=0.01)
    assert lengths.tokens(b"x" * 3000) == pytest.approx(1000, abs=4)
    for _ in range(2000):
        lengths.learn(b"x" * 10_000, 1000)
    assert lengths.bytes_per_token == pytest.approx(10.0, abs=0.05), "traffic changes"


@pytest.mark.parametrize(("raw", "tokens"), [(b"x" * 100, -1), (b"x" * 100, 0), (b"x" * 100, 1), (b"x" * 100, 1000),
                                             (b"[1,2,3]", 3), (b"", 5)])
def test_what_is_no_text_teaches_nothing(raw: bytes, tokens: int) -> None:
    lengths = PromptLengths()
    for _ in range(100):
        lengths.learn(raw, tokens)
    assert lengths.bytes_per_token == BYTES_PER_TOKEN
