"""The replaying engine answers as the real one did: every recorded stream and continuation, event by event."""

from __future__ import annotations

import json
from typing import Any

import pytest
from judge import judge
from recorded import CORPUS, Line, Request, continued, generated, ids_of, load, seen_of
from replay import APIS, Replay, Unknown, continuable

PATHS = {api: path for path, api in APIS.items()}
LINES = {line.name: line for line in load().lines}
ON_LINES = [one for one in load().requests if one.line]
CONTINUED = [(one, cut, events) for one in ON_LINES for cut, events in one.continued]
NAMES = [f"{one.name} at {cut}" for one, cut, _ in CONTINUED]


def decoded(events: list[Any]) -> list[Any]:
    """Events without what differs between two answers: name and time; logprobs rounded."""
    found = [json.loads(event) if isinstance(event, str | bytes) else event for event in events]
    return [_plain({**event, "id": "", "created": 0}) for event in found]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items() if key != "system_fingerprint"}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return round(value, 2) if isinstance(value, float) else value


def composed(request: Request, line: Line, cut: int, like: list[str]) -> list[Any]:
    sizes = [len(ids) for event in like if (ids := ids_of(json.loads(event)))]
    body = {**continued(request.api, request.body, line, cut), "return_token_ids": True}
    return decoded(list(Replay(load()).composed(line, cut, body, "x", sizes)))


def test_the_corpus_is_small_and_has_every_kind() -> None:
    assert CORPUS.stat().st_size < 500_000
    assert len(load().requests) >= 60
    assert {one.way for one in load().requests} == {"continue", "replay", "error"}
    assert {one.api for one in load().requests} == {"completions", "chat"}
    finished = {seen_of(list(one.plain)).finish[0] for one in load().requests}
    assert {reason for reason, _ in finished} >= {"length", "stop"}
    assert len(continuable(load())) > 50


@pytest.mark.parametrize("request_", ON_LINES, ids=lambda one: one.name)
def test_a_line_tells_every_event_of_its_requests(request_: Request) -> None:
    assert composed(request_, LINES[request_.line], 0, request_.ids) == decoded(list(request_.ids))


@pytest.mark.parametrize(("request_", "cut", "events"), CONTINUED, ids=NAMES)
def test_a_line_tells_every_event_of_its_continuations(request_: Request, cut: int, events: list[str]) -> None:
    assert composed(request_, LINES[request_.line], cut, events) == decoded(list(events))


@pytest.mark.parametrize("request_", load().requests, ids=lambda one: one.name)
def test_with_and_without_token_ids_and_whole_the_answer_is_the_same(request_: Request) -> None:
    plain, ids = seen_of(list(request_.plain)), seen_of(list(request_.ids))
    choices = {choice["index"]: choice for choice in request_.whole["choices"]}
    if request_.way == "error" or request_.body.get("echo"):
        return  # sampled anew each time; with echo and token ids, vLLM leaves the prompt's text out
    assert (ids.texts, ids.finish) == (plain.texts, plain.finish)
    assert {index: (choice["finish_reason"], choice["stop_reason"]) for index, choice in choices.items()} == plain.finish
    if not request_.body.get("tools"):
        texts = {index: choice["text"] if "text" in choice else choice["message"]["content"]
                 for index, choice in choices.items()}
        assert texts == {index: "".join(channels.values()) for index, channels in plain.texts.items()}


def test_what_was_not_recorded_is_unknown() -> None:
    replay = Replay(load())
    line = LINES["short"]
    for prompt in ("never asked", [1, 2, 3], [*line.prompt, line.ids[0], line.ids[1] + 1]):
        with pytest.raises(Unknown):
            replay.stream(PATHS["completions"], {"prompt": prompt, "temperature": 0}, "x")


def test_ids_that_end_inside_a_character_give_the_prompt_as_text() -> None:
    line = LINES["short"]
    cut = next(place for place in range(1, 40) if not line.steps[place - 1].text)
    events = [json.loads(event) for event in Replay(load()).stream(
        PATHS["completions"], {"prompt": line.prompt + line.ids[:cut], "max_tokens": 8, "temperature": 0}, "x")]
    assert events[0]["choices"][0]["text"].startswith("<the prompt as text>")


def test_the_judge_sees_what_is_lost_duplicated_and_wrong() -> None:
    request = next(one for one in ON_LINES if one.name == "short: usage")
    events: list[Any] = [json.loads(event) for event in request.plain]
    assert judge(request, [*events, "[DONE]"], complete=True).finished
    texts = [place for place, event in enumerate(events) if event["choices"] and event["choices"][0]["text"]]

    def changed(place: int, text: str) -> list[Any]:
        choice = events[place]["choices"][0]
        return [*events[:place], {**events[place], "choices": [{**choice, "text": text}]}, *events[place + 1:], "[DONE]"]

    middle = texts[len(texts) // 2]
    assert judge(request, changed(middle, ""), complete=True).fault
    assert judge(request, changed(middle, "XX"), complete=True).fault
    assert judge(request, [*events[:-1], "[DONE]"], complete=True).fault, "usage is missing"
    assert judge(request, events[:9], complete=True).kind == "lost", "no [DONE] and no error event"
    error = {"error": {"message": "gone", "code": "engine_failed"}}
    early = judge(request, [*events[:9], error], complete=True)
    assert (early.finished, early.fault) == (False, "")
    shown = next(place for place in texts if place > 8)
    again = [*events[:shown + 1], events[shown], *events[shown + 1:], "[DONE]"]
    assert judge(request, again, complete=True).fault, "a token twice"
    assert generated(request) == 56
