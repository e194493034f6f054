"""What a request counts for in its key's share, before it is served and after."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import Raw

from xpyd_sidecar.router.api import spending
from xpyd_sidecar.router.api.bodies import split
from xpyd_sidecar.router.api.spending import AnswerLengths, ExpectedTokens, may_generate, of_form, taken_tokens

USUAL = 300.0
CHAT, COMPLETION, EMBED = ("chat", "/v1/chat/completions"), ("completions", "/v1/completions"), ("", "/v1/embeddings")
RAW = ("", "/inference/v1/generate")


def fields(**said: Any) -> dict[str, Raw]:
    return split(json.dumps(said).encode())


@pytest.mark.parametrize(("of", "said", "tokens"), [
    (CHAT, {}, 300),
    (CHAT, {"max_tokens": 50}, 50),
    (CHAT, {"max_tokens": None}, 300),
    (CHAT, {"max_tokens": 50, "max_completion_tokens": 70}, 70),
    (CHAT, {"max_tokens": 50, "n": 4}, 200),
    (CHAT, {"max_tokens": "50", "n": "4"}, 200),
    (CHAT, {"max_tokens": 50, "n": 2, "best_of": 8}, 400),
    (CHAT, {"max_tokens": -3, "n": -8}, 300),
    (CHAT, {"max_tokens": "many", "n": []}, 300),
    (CHAT, {"max_tokens": 10**30}, 300),
    (CHAT, {"max_tokens": 10**12}, spending.MOST),
    (CHAT, {"max_tokens": 1, "n": 10**12}, spending.MOST_ANSWERS),
    (COMPLETION, {"prompt": "x"}, 16),
    (COMPLETION, {"prompt": ["x", "y", "z"], "max_tokens": 10}, 30),
    (COMPLETION, {"prompt": [[1, 2], [3, 4]], "max_tokens": 10}, 20),
    (COMPLETION, {"prompt": [1, 2, 3, 4], "max_tokens": 10}, 10),
    (("responses", "/v1/responses"), {"max_output_tokens": 9}, 9),
    (("messages", "/v1/messages"), {"max_tokens": 9}, 9),
    (EMBED, {"input": "x", "max_tokens": 50}, 0),
    (("", "/tokenize"), {"prompt": ["x", "y"]}, 0),
    (RAW, {"token_ids": [1], "sampling_params": {"max_tokens": 40, "n": 3}}, 120),
    (RAW, {"token_ids": [1], "sampling_params": "none"}, 300),
    (RAW, {"token_ids": [1], "sampling_params": None}, 300),
    (("", "/invocations"), {"messages": []}, 300),
])
def test_what_may_be_generated_counts(of: tuple[str, str], said: dict[str, Any], tokens: int) -> None:
    assert may_generate(*of, fields(**said), USUAL) == tokens


def test_a_list_of_prompts_of_any_length_is_bounded_and_read_in_part() -> None:
    raw = Raw(b'["x"' + b',"x"' * 2_000_000 + b"]")
    assert may_generate("completions", "", {"prompt": raw, "max_tokens": Raw(b"5")}, USUAL) == 5 * spending.MOST_ANSWERS
    deep = Raw(b"[" * 100_000)
    assert may_generate(*RAW, {"sampling_params": deep}, USUAL) == USUAL, "it is not read"


@pytest.mark.parametrize(("prompt", "generated", "whole", "sent", "tokens"), [
    (90, 20, True, True, 110),
    (-1, 20, True, True, 120),
    (0, 20, True, True, 120),
    (-1, -1, True, True, 600),
    (90, -1, True, True, 590),
    (-1, -1, False, True, 100),
    (-1, 20, False, True, 120),
    (-1, -1, False, False, 0),
])
def test_what_was_not_used_does_not_count(prompt: int, generated: int, whole: bool, sent: bool, tokens: int) -> None:
    assert taken_tokens(ExpectedTokens(100, 500), prompt, generated, whole=whole, sent=sent) == tokens


def test_forms_count_by_their_bytes() -> None:
    assert (of_form(None).total, of_form(0).total, of_form(1 << 20).total) == (4096, 1, 4096)


def test_answers_are_known_by_those_that_were_given_lately() -> None:
    known = AnswerLengths()
    for _ in range(1000):
        known.learn(10)
    assert known.usual == pytest.approx(10, rel=0.01)
    known.learn(10**15)
    assert known.usual < spending.MOST
    for _ in range(10_000):
        known.learn(0)
    assert known.usual == 1.0
