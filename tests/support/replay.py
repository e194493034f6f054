"""How a real engine answers, from what was recorded of one: any request of the corpus, and any continuation of its lines.

    replay = Replay(load())
    replay.stream("/v1/completions", body, "req-1")    → events as bytes, without [DONE]; raises Unknown
    replay.whole("/v1/completions", body, "req-1")

A request of the corpus is answered with what was recorded. One that gives a line's token ids, and any number of its
generated ones, is answered with the rest of the line, written as vLLM 0.32 writes it: text held back for stop strings,
lengths, stop ids, log probabilities, usage. ``test_support_replay`` compares that with what the real engine answered.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engines import MODEL_NAME
from recorded import DEFAULT_MAX_TOKENS, REQUEST_ID, SAMPLE, Corpus, Line, Request, Step

APIS = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}
PREFIXES = {"completions": "cmpl", "chat": "chatcmpl"}
OBJECTS = {"completions": "text_completion", "chat": "chat.completion.chunk"}
CHOOSING = ("repetition_penalty", "logit_bias", "temperature")
"""Fields that make another line of the same prompt."""
IDLE = ("length_penalty",)
"""Fields that mean nothing without a beam search: tests tell equal requests apart by them."""
UNCLEAN = "<the prompt as text>"
"""A real engine writes the whole prompt as text when the ids it was given end inside a character (vllm#48853)."""


class Unknown(Exception):
    """Nothing was recorded for this request."""


@dataclass
class _Delta:
    """What one step adds to an answer."""

    steps: list[Step]
    text: str
    finish: str | None = None
    reason: Any = None


class Replay:
    """Answers like the engine that was recorded."""

    def __init__(self, corpus: Corpus) -> None:
        self._lines = corpus.lines
        self._requests = {_key(one.api, one.body): one for one in corpus.requests}
        assert len(self._requests) == len(corpus.requests), "two recorded requests are alike"
        self._samples = 0
        self.created = int(time.time())

    def stream(self, path: str, body: dict[str, Any], request_id: str) -> list[bytes]:
        """The events of a stream. Raises Unknown."""
        api = APIS[path]
        known = self._requests.get(_key(api, body))
        if known is not None and not (body.get("kv_transfer_params") or {}).get("prompt_token_ids"):
            events = known.ids if body.get("return_token_ids") else known.plain
            return self._named(self._sampled(events) if known.way == "error" else events, request_id)
        line, cut = self._place(api, body)
        return [json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
                for event in self.composed(line, cut, body, request_id)]

    def _sampled(self, events: Sequence[str]) -> list[str]:
        # What is sampled comes out differently each time: every text says which time it was (``judge`` knows).
        self._samples += 1
        mark = f"{SAMPLE}{self._samples}{SAMPLE}"
        return [event.replace('"text":"', f'"text":"{mark}').replace('"content":"', f'"content":"{mark}')
                for event in events]

    def whole(self, path: str, body: dict[str, Any], request_id: str) -> bytes:
        """A whole answer. Raises Unknown."""
        known = self._requests.get(_key(APIS[path], body))
        if known is None:
            raise Unknown(f"{path} {str(body)[:500]}")
        [named] = self._named([json.dumps(known.whole, ensure_ascii=False, separators=(",", ":"))], request_id)
        return named

    def _named(self, events: Sequence[str], request_id: str) -> list[bytes]:
        found = []
        for event in events:
            start = event.find('"created":') + len('"created":')
            end = event.find(",", start)
            mine = f"{event[:start]}{self.created}{event[end:]}".replace(f"-{REQUEST_ID}", f"-{request_id}", 1)
            found.append(mine.encode())
        return found

    def _place(self, api: str, body: dict[str, Any]) -> tuple[Line, int]:
        given = _given(body)
        for line in self._lines:
            start = len(line.prompt)
            if (line.api == api and given[:start] == line.prompt and line.ids[:len(given) - start] == given[start:]
                    and all(line.body.get(name) == body.get(name) for name in CHOOSING)
                    and line.body.get("messages") == body.get("messages")):
                return line, len(given) - start
        raise Unknown(f"{len(given)} given ids that are no line's: {str({**body, 'prompt': given[-8:]})[:1500]}")

    def composed(self, line: Line, cut: int, body: dict[str, Any], request_id: str,
                 sizes: Sequence[int] = ()) -> Iterator[dict[str, Any]]:
        """The events of a line from ``cut`` on. ``sizes``: tokens of each chunk, one where it says nothing."""
        chat = line.api == "chat"
        ids = bool(body.get("return_token_ids"))
        options = body.get("stream_options") or {}
        usage, always = options.get("include_usage"), options.get("continuous_usage_stats")
        prompt = line.prompt + line.ids[:cut]
        head = {"id": f"{PREFIXES[line.api]}-{request_id}", "object": OBJECTS[line.api], "created": self.created,
                "model": MODEL_NAME}

        def counted(tokens: int, *, last: bool = False) -> dict[str, Any]:
            found = {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + tokens, "completion_tokens": tokens}
            return {**found, "completion_tokens_details": None} if chat and not last else found

        if chat:
            first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            event = {**head, "choices": [first], "prompt_token_ids": prompt if ids else None, "prompt_text": None}
            yield {**event, "usage": counted(0)} if always else event
        tokens = 0
        offset = 0
        for delta in _grouped(_deltas(line, cut, body), sizes):
            tokens += len(delta.steps)
            given = [step.id for step in delta.steps] if ids else None
            logprobs = None
            if body.get("logprobs"):
                logprobs, offset = _logprobs(delta.steps, chat=chat, offset=offset)
            choice: dict[str, Any] = {"index": 0}
            if chat and not (delta.text or delta.finish or logprobs or ids):
                continue  # a parser was on when the streams were recorded: it says nothing where there is no text
            choice |= {"delta": {"content": delta.text} if delta.text else {}} if chat else {"text": delta.text}
            choice |= {"logprobs": logprobs, "finish_reason": delta.finish}
            if not chat:
                only_first = prompt if ids and tokens == len(delta.steps) else None
                choice |= {"stop_reason": delta.reason, "prompt_token_ids": only_first}
            elif delta.finish is not None:
                choice |= {"stop_reason": delta.reason}
            event = {**head, "choices": [{**choice, "token_ids": given}]}
            yield {**event, "usage": counted(tokens)} if always else event
        if usage:
            yield {**head, "choices": [], "usage": counted(tokens, last=True)}


def _key(api: str, body: dict[str, Any]) -> str:
    left = {name: value for name, value in body.items()
            if name not in {"stream", "stream_options", "return_token_ids", "kv_transfer_params", "model", *IDLE}}
    return json.dumps([api, left, bool((body.get("stream_options") or {}).get("continuous_usage_stats"))], sort_keys=True)


def _given(body: dict[str, Any]) -> list[int]:
    """The token ids that a request gives in the place of its prompt."""
    ids = (body.get("kv_transfer_params") or {}).get("prompt_token_ids") if "messages" in body else body.get("prompt")
    return ids if isinstance(ids, list) and all(isinstance(one, int) for one in ids) else []


def _deltas(line: Line, cut: int, body: dict[str, Any]) -> Iterator[_Delta]:
    # vllm/v1/engine/detokenizer.py and vllm/v1/core/sched/utils.py, one token a step.
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_MAX_TOKENS
    stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
    kept = bool(body.get("include_stop_str_in_output"))
    held = max((len(stop) for stop in stops), default=1) - 1 if not kept else 0
    least = body.get("min_tokens") or 0
    text, sent = "", 0
    if cut and not line.steps[cut - 1].text:
        text = UNCLEAN
    for number, step in enumerate(line.steps[cut:], 1):
        delta = _Delta([step], "")
        if step.id in (body.get("stop_token_ids") or ()):
            delta.finish, delta.reason = "stop", step.id
        elif number >= limit:
            delta.finish = "length"
        new = "" if delta.reason is not None and not kept else step.text
        text += new
        if new and number > least:
            found = [(place + len(stop), stop) for stop in stops
                     if (place := text.find(stop, max(0, len(text) + 1 - len(new) - len(stop)))) >= 0]
            if found:
                end, stop = min(found, key=lambda one: one[0])
                delta.finish, delta.reason = "stop", stop
                text = text[:end if kept else end - len(stop)]
        until = len(text) - (0 if delta.finish else held)
        if until > sent:
            delta.text, sent = text[sent:until], until
        yield delta
        if delta.finish:
            return
    raise Unknown(f"line {line.name} is shorter than {limit} tokens")


def _grouped(deltas: Iterator[_Delta], sizes: Sequence[int]) -> Iterator[_Delta]:
    """Several steps in one chunk, as a server that lags behind its engine sends them."""
    left = iter(sizes)
    group: _Delta | None = None
    size = next(left, 1)
    for delta in deltas:
        if group is None:
            group = delta
        else:
            group = _Delta(group.steps + delta.steps, group.text + delta.text, delta.finish, delta.reason)
        if len(group.steps) >= size or delta.finish:
            yield group
            group, size = None, next(left, 1)


def _logprobs(steps: list[Step], *, chat: bool, offset: int) -> tuple[dict[str, Any], int]:
    """Log probabilities of several tokens as one object; where the next token's text begins."""
    if chat:
        return {"content": [entry for step in steps for entry in step.logprobs["content"]]}, 0
    merged: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for step in steps:
        merged["text_offset"].append(offset)
        for name in ("token_logprobs", "tokens", "top_logprobs"):
            merged[name] += step.logprobs[name]
        offset += len(step.logprobs["tokens"][0])
    return merged, offset


def continuable(corpus: Corpus) -> list[Request]:
    """Requests whose answer another engine can give the rest of, or all of."""
    return [one for one in corpus.requests if one.way != "error"]
