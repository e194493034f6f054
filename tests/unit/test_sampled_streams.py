"""Sampled streams that go on elsewhere have the distribution of whole ones, and the judge of that sees errors."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from chi_square import p_of, upper_gamma
from more_cases import more
from sampled_streams import MAX_TOKENS, PLANTS, run
from seam_judge import Sample, judge
from toy_model import LONGER, PROMPT, DecodeStream, chances, decode, encode

CAMPAIGN = 2000


@pytest.mark.parametrize(("a", "x", "right"), [
    # a = 1: exp(-x); a = 1/2: erfc(√x)
    (1.0, 3.0, 0.049787068367863944), (1.0, 0.5, 0.6065306597126334), (0.5, 4.0, 0.004677734981047266),
    (0.5, 0.01, 0.8875370839817152), (1.0, 60.0, 8.75651076269652e-27), (5.0, 0.0, 1.0)])
def test_the_upper_gamma_function(a: float, x: float, right: float) -> None:
    assert upper_gamma(a, x) == pytest.approx(right, rel=1e-9)


def test_the_p_value_of_a_table_known_from_books() -> None:
    # 2 x 2: 30, 70 against 45, 55: χ² = 4.8, one degree of freedom.
    assert p_of({"a": 30, "b": 70}, {"a": 45, "b": 55}) == pytest.approx(0.02846, abs=1e-5)
    assert p_of({"a": 5}, {}) == p_of({"a": 50}, {"a": 40}) == 1.0
    assert p_of({"a": 100, "b": 1}, {"a": 100, "c": 1}) == 1.0, "what is rare is taken together"


def test_p_values_of_equal_distributions_are_spread_evenly() -> None:
    draw = random.Random(3)
    found = [p_of(*(Counter(draw.choices("abcde", (5, 4, 3, 2, 1), k=200)) for _ in "12")) for _ in range(2000)]
    shares = [sum(low <= p < low + 0.1 for p in found) / len(found) for low in (0.0, 0.2, 0.4, 0.6, 0.8)]
    assert max(abs(share - 0.1) for share in shares) < 0.03, shares


def test_a_third_of_the_characters_take_several_tokens() -> None:
    text = "".join(decode(one.tokens) for one in run(200, 5))
    assert 0.27 < sum(char in LONGER for char in text) / len(text) < 0.4


def test_the_toy_tokenizer_gives_a_prompt_that_ends_inside_a_character_again() -> None:
    tokens = encode("ab日c")
    whole, late = DecodeStream(encode(PROMPT)), DecodeStream([*encode(PROMPT), *tokens[:3]])
    assert [whole.step(one) for one in tokens] == ["a", "b", "", "", "日", "c"]
    assert [late.step(one) for one in tokens[3:]] == ["", PROMPT + "ab日", "c"]


def test_the_toy_model_has_what_requests_ask_for() -> None:
    prompt, output = encode("a"), encode("bb")
    plain = chances(prompt, output, {"temperature": 1.0})
    assert sum(plain.values()) == pytest.approx(1)
    assert 0 not in chances(prompt, output, {"min_tokens": 3})
    assert chances(prompt, output, {"presence_penalty": 2.0})[ord("b")] < plain[ord("b")]
    assert chances([*prompt, *output], [], {"presence_penalty": 2.0}) == pytest.approx(plain), "counts output alone"
    both = [chances(encode("a"), encode("bb"), {"repetition_penalty": 1.4}),
            chances(encode("abb"), [], {"repetition_penalty": 1.4})]
    assert both[0] == both[1] != plain


@pytest.mark.parametrize(("streams", "fields"), [
    *more([(CAMPAIGN, {})]), (200, {}), (200, {"min_tokens": MAX_TOKENS}), (200, {"temperature": 0.3})])
def test_streams_that_go_on_have_the_distribution_of_whole_ones(streams: int, fields: dict[str, Any]) -> None:
    samples = run(streams, 1, fields=fields)
    assert sum(one.cut and one.seam is not None for one in samples) > streams / 4
    verdict = judge(samples, MAX_TOKENS)
    assert not verdict.rejects, verdict.worst
    assert len(verdict.p) == MAX_TOKENS + 1


@pytest.mark.test_all
@pytest.mark.parametrize("plant", PLANTS)
def test_the_judge_rejects_an_error_that_is_planted_where_streams_go_on(plant: str) -> None:
    verdict = judge(run(CAMPAIGN, 1, PLANTS[plant]), MAX_TOKENS)
    assert verdict.rejects, verdict.worst


def test_a_seam_before_the_first_token_and_behind_the_last_one_are_places_as_well() -> None:
    tokens = (1, 2)
    cut = [Sample(tokens, seam, True) for seam in (0, 1, 2, None) for _ in range(20)]
    whole = [Sample(tokens, seam, False) for seam in (0, 1, 2, None) for _ in range(20)]
    assert set(judge([*cut, *whole], 3).p.values()) == {1.0}
    assert judge([*cut[:60], *whole[20:]], 3).p["around the seam"] < 1e-6
