"""What is read of answers that pass: first output, lengths, failure. The events are vLLM's, shortened."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.router.stream.answers import MAX, TAIL, AnswerReader, lengths, prompt_tokens


def events(*told: dict[str, Any]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (str(one["type"]).encode(), json.dumps(one).encode()) for one in told)


MESSAGE = [{"type": "message_start", "message": {"usage": {"input_tokens": 1, "output_tokens": 0}}},
           {"type": "content_block_delta", "delta": {"text": 'data: {"usage": {"output_tokens": 99}}\n'}},
           {"type": "message_delta", "usage": {"input_tokens": 30, "cache_read_input_tokens": 12, "output_tokens": 7}},
           {"type": "message_stop"}]
RESPONSE = [{"type": "response.created", "response": {"usage": None}}, {"type": "response.in_progress", "response": {}},
            {"type": "response.output_item.added", "item": {"usage": 5}},
            {"type": "response.completed", "response": {"usage": {"input_tokens": 42, "output_tokens": 7}}}]


def follow(*parts: bytes, stream: bool = True) -> AnswerReader:
    answer = AnswerReader(stream=stream)
    for part in parts:
        answer.take(part)
    answer.end()
    return answer


@pytest.mark.parametrize("told", [MESSAGE, RESPONSE])
def test_lengths_of_a_stream(told: list[dict[str, Any]]) -> None:
    answer = follow(events(*told))
    assert (answer.begun, answer.failed, answer.prompt_tokens, answer.tokens) == (True, False, 42, 7)


@given(st.sampled_from([MESSAGE, RESPONSE]), st.lists(st.integers(0, 700)))
def test_in_whatever_pieces_they_come(told: list[dict[str, Any]], cuts: list[int]) -> None:
    whole, at = events(*told), 0
    parts = []
    for cut in sorted(cuts):
        parts.append(whole[at:cut])
        at = max(at, min(cut, len(whole)))
    answer = follow(*parts, whole[at:])
    assert (answer.prompt_tokens, answer.tokens, answer.failed) == (42, 7, False)


def test_output_begins_after_what_says_only_that_the_request_came() -> None:
    answer = AnswerReader(stream=True)
    for part in (events(RESPONSE[0]), b": still here\n\n", events(RESPONSE[1]), events({"type": "ping"})):
        answer.take(part)
        assert not answer.begun
    answer.take(events(RESPONSE[2])[:-2])
    assert not answer.begun, "the event is not whole"
    answer.take(b"\n\n")
    assert answer.begun


@pytest.mark.parametrize("last", [{"type": "error", "error": {}}, {"type": "response.failed", "response": {}}])
def test_an_engine_that_says_that_it_failed(last: dict[str, Any]) -> None:
    answer = follow(events(MESSAGE[0], last))
    assert (answer.failed, answer.tokens) == (True, -1)


def test_lengths_of_a_whole_answer() -> None:
    body = json.dumps({"type": "message", "content": [{"input": {"usage": 3}}],
                       "usage": {"input_tokens": 42, "output_tokens": 7}}).encode()
    answer = follow(body[:20], body[20:], stream=False)
    assert (answer.begun, answer.prompt_tokens, answer.tokens) == (True, 42, 7)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"usage": 5}', b'{"usage": {"input_tokens": "x"}}', b"\xff",
                                  b'{"usage": {"input_tokens": 1}}', b'{"type": 5, "usage": null}'])
@pytest.mark.parametrize("stream", [True, False])
def test_what_cannot_be_read_stays_unknown(body: bytes, stream: bool) -> None:
    answer = follow(b"data: " + body if stream else body, stream=stream)
    assert (answer.prompt_tokens, answer.tokens, answer.failed) == (-1, -1, False)


@pytest.mark.parametrize(("body", "told"), [
    (b'{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}}', (5, 3)),
    (b'{"usage": {"prompt_tokens": 5, "completion_tokens": null}}', (5, -1)), (b'{"usage": null}', (-1, -1)),
    (b"{}", (-1, -1)), (b"[1]", (-1, -1)), (b'{"usage": {"prompt_tokens": "x"}}', (-1, -1)), (b"\xff", (-1, -1))])
def test_lengths_of_whole_completions(body: bytes, told: tuple[int, int]) -> None:
    assert lengths(body) == told


def test_what_is_too_long_is_not_kept_and_the_rest_is_read() -> None:
    answer = AnswerReader(stream=True)
    for _ in range(MAX // 65536 + 2):
        answer.take(b"x" * 65536)
    assert answer.begun, "an event of that size is output"
    assert sum(map(len, answer._rest)) == 0
    answer.take(b"\n\n" + events(*MESSAGE))
    answer.end()
    assert answer.tokens == 7
    assert follow(b" " * MAX + b'{"usage": {"input_tokens": 1, "output_tokens": 1}}', stream=False).tokens == -1


def test_the_length_of_a_prompt_is_read_at_the_end_of_an_answer_alone() -> None:
    assert prompt_tokens(b'{"usage":{"prompt_tokens": 17,"completion_tokens":1}}') == 17
    assert prompt_tokens(b'{"usage":{"input_tokens":17}}') == -1
    assert prompt_tokens(b'{"prompt_tokens":1,"text":"' + b"x" * 2 * TAIL + b'"}') == -1
