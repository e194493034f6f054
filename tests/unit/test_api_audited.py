"""What an audit asks, what it reads of an answer, and how far two answers are from each other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Attempt, Role, TransferId
from xpyd_sidecar.router.api import audited, bodies
from xpyd_sidecar.router.api.audited import TokenProbabilities, difference, odds_of

LEG = legs.Leg(legs.VERSION, Role.DECODE, TransferId("0" * 32), Attempt(1), 60.0)


def request(api: bodies.Api = "completions", **fields: Any) -> bodies.GenerationRequest:
    prompt = {"prompt": "hi"} if api == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    return bodies.parse(api, json.dumps({"model": "tiny", **prompt, **fields}).encode())


def asked(one: bodies.GenerationRequest, leg: legs.Leg | None = None) -> dict[str, Any]:
    made = json.loads(audited.body_of(bodies.one_token(one) | audited.SHOWN[one.api], "salt", leg))
    assert isinstance(made, dict)
    return made


def test_one_greedy_token_is_asked_for_with_its_log_probabilities_and_a_salt() -> None:
    one = request(max_tokens=500, stream=True, temperature=0.7, top_p=0.5, stop=["x"], cache_salt="theirs", user="u")
    assert asked(one) == {
        "model": "tiny", "prompt": "hi", "user": "u", "max_tokens": 1, "stream": False, "temperature": 0, "logprobs": 5,
        "return_tokens_as_token_ids": True, "cache_salt": "salt"}


def test_a_chat_keeps_what_its_prompt_is_made_of() -> None:
    one = request("chat", tools=[], chat_template_kwargs={"a": 1}, max_completion_tokens=9, logprobs=False, n=1)
    found = asked(one, LEG)
    assert found.pop(legs.FIELD) == legs.encode(LEG)
    assert found == {
        "model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": [], "chat_template_kwargs": {"a": 1},
        "max_completion_tokens": 1, "max_tokens": 1, "stream": False, "temperature": 0, "logprobs": True, "top_logprobs": 5,
        "return_tokens_as_token_ids": True, "cache_salt": "salt"}


@pytest.mark.parametrize(("one", "why"), [
    (request(), ""),
    (request("chat"), ""),
    (request(prompt="x" * audited.MAX_BYTES), "large"),
    (request("chat", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]), "unfit"),
])
def test_what_is_too_large_to_keep_or_is_more_than_text_is_not_audited(one: bodies.GenerationRequest, why: str) -> None:
    assert audited.unfit(one) == why


COMPLETION = {"choices": [{"text": "", "logprobs": {
    "tokens": ["token_id:5"], "token_logprobs": [-0.5], "top_logprobs": [{"token_id:5": -0.5, "token_id:7": -1.5}]}}]}
LISTED = [{"token": "token_id:5", "logprob": -0.5}, {"token": "token_id:7", "logprob": -1.5}]
CHAT = {"choices": [{"message": {}, "logprobs": {"content": [{**LISTED[0], "bytes": [], "top_logprobs": LISTED}]}}]}


@pytest.mark.parametrize("answer", [COMPLETION, CHAT])
def test_both_kinds_of_answers_say_the_same(answer: dict[str, Any]) -> None:
    expected = TokenProbabilities("token_id:5", {"token_id:5": -0.5, "token_id:7": -1.5})
    assert odds_of(json.dumps(answer).encode()) == expected


@pytest.mark.parametrize("answer", [
    b"", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"logprobs": null}]}',
    b'{"choices": [{"logprobs": {"content": []}}]}',
    b'{"choices": [{"logprobs": {"tokens": [], "token_logprobs": [], "top_logprobs": []}}]}', b'\xff{"choices": []}',
    b'{"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": [null], "top_logprobs": [null]}}]}'])
def test_an_answer_without_log_probabilities_says_nothing(answer: bytes) -> None:
    assert odds_of(answer) is None


def odds(token: str, **top: float) -> TokenProbabilities:
    return TokenProbabilities(token, top)


@pytest.mark.parametrize(("one", "other", "apart"), [
    (odds("a", a=-0.5, b=-2.0), odds("a", a=-0.5, b=-9.0), 0.0),
    (odds("a", a=-0.5, b=-2.0), odds("a", a=-0.75, b=-2.0), 0.25),
    (odds("a", a=-0.70, b=-0.71), odds("b", a=-0.71, b=-0.70), 0.01),  # a near tie
    (odds("a", a=-0.5, b=-1.0), odds("b", a=-3.0, b=-0.25), 2.5),
    (odds("a", a=-0.5, b=-1.0), odds("c", c=-0.5, d=-4.0), 3.5),  # at least that
    (odds("a", a=-6.0, b=-6.0), odds("c", c=-5.0, d=-5.5), 1.0),
])
def test_the_difference_is_the_larger_one_of_both_chosen_tokens(
    one: TokenProbabilities, other: TokenProbabilities, apart: float
) -> None:
    assert difference(one, other) == pytest.approx(apart)
    assert difference(other, one) == pytest.approx(apart)
