"""Streams recorded from a real engine, and what they say about how it answers.

    corpus = load()
    corpus.requests[3].body / .plain / .ids / .whole        what was asked, and every answer to it
    request.seen(events)                                    what a client has of a stream, to compare

Belongs here: the file and its shape. Does not belong here: recording (``record_streams``), answering (``replay``).
"""

from __future__ import annotations

import functools
import json
import lzma
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

CORPUS = Path(__file__).parent / "corpora" / "tiny-llama-1.json.xz"
REQUEST_ID = "RECORDED"
SAMPLE = "\ue000"
"""In replayed texts that were sampled, around the number of the sample (a private character of Unicode)."""
DEFAULT_MAX_TOKENS = 16
"""Of /v1/completions without max_tokens."""


class Step(NamedTuple):
    """One generated token."""

    id: int
    text: str
    """What it adds; empty inside a character, and for tokens without text."""
    logprobs: dict[str, Any]
    """As the engine wrote it for this token alone."""


@dataclass
class Line:
    """A greedy run: whoever continues it from any of its places gets the rest."""

    name: str
    api: str
    body: dict[str, Any]
    """The fields that choose its tokens."""
    prompt: list[int]
    steps: list[Step]

    @property
    def ids(self) -> list[int]:
        return [step.id for step in self.steps]


@dataclass
class Request:
    """One request and every answer to it. Events are JSON texts, without [DONE]."""

    name: str
    api: str
    line: str
    """Empty: its tokens are no line's."""
    way: str
    """``continue``, ``replay``, or ``error`` where another engine cannot give the same answer."""
    body: dict[str, Any]
    plain: list[str]
    ids: list[str]
    """With ``return_token_ids``."""
    whole: Any
    continued: list[tuple[int, list[str]]]
    """What the engine answered when so many tokens were given, with ``return_token_ids``."""


@dataclass
class Corpus:
    """Everything that was recorded."""

    lines: list[Line]
    requests: list[Request]

    def encode(self) -> bytes:
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":")).encode()

    @staticmethod
    def decode(raw: bytes) -> Corpus:
        read = json.loads(raw)
        lines = [Line(**{**one, "steps": [Step(*step) for step in one["steps"]]}) for one in read["lines"]]
        requests = [Request(**{**one, "continued": [(cut, events) for cut, events in one["continued"]]})
                    for one in read["requests"]]
        return Corpus(lines, requests)


@functools.cache
def load() -> Corpus:
    """The corpus in the repository."""
    return Corpus.decode(lzma.decompress(CORPUS.read_bytes()))


@dataclass
class Seen:
    """What a client has of an answer, however it was cut into events."""

    texts: dict[int, dict[str, str]] = field(default_factory=dict)
    """Per choice and channel (text, content, reasoning, the arguments of each tool call)."""
    finish: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    prompt: list[int] | None = None
    logprobs: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    usage: dict[str, int] | None = None
    usages: list[dict[str, int]] = field(default_factory=list)
    """Of the chunks before the last one."""
    names: set[str] = field(default_factory=set)
    created: set[int] = field(default_factory=set)
    roles: dict[int, int] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    after_finish: int = 0
    """Tokens or text behind a finish reason: must be none."""

    def take(self, event: dict[str, Any]) -> None:
        """One event of a stream."""
        if "error" in event:
            assert self.error is None, "two error events"
            self.error = event["error"]
            return
        assert self.error is None, "an event after the error event"
        self.names.add(event["id"])
        self.created.add(event["created"])
        if event.get("prompt_token_ids"):
            self.prompt = event["prompt_token_ids"]
        if event.get("usage"):
            if event["choices"]:
                self.usages.append(event["usage"])
            else:
                assert self.usage is None, "usage twice"
                self.usage = event["usage"]
        for choice in event["choices"]:
            self._choice(choice)

    def _choice(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        delta = choice.get("delta", choice)
        if delta.get("role"):
            self.roles[index] = self.roles.get(index, 0) + 1
        channels = self.texts.setdefault(index, {})
        new = 0
        for channel in ("text", "content", "reasoning"):
            if delta.get(channel):
                channels[channel] = channels.get(channel, "") + delta[channel]
                new += len(delta[channel])
        for call in delta.get("tool_calls") or ():
            place = f"tool {call.get('index', 0)}"
            function = call.get("function") or {}
            channels[place] = channels.get(place, "") + (function.get("arguments") or "")
            if function.get("name"):
                channels[f"{place} name"] = channels.get(f"{place} name", "") + function["name"]
            new += len(function.get("arguments") or "")
        if choice.get("prompt_token_ids"):
            self.prompt = choice["prompt_token_ids"]
        self.tokens.setdefault(index, []).extend(choice.get("token_ids") or ())
        for name, values in (choice.get("logprobs") or {}).items():
            self.logprobs.setdefault(index, {}).setdefault(name, []).extend(values or ())
        if index in self.finish:
            self.after_finish += new + len(choice.get("token_ids") or ())
        if choice.get("finish_reason"):
            assert index not in self.finish, "finished twice"
            self.finish[index] = (choice["finish_reason"], choice.get("stop_reason"))


def seen_of(events: list[Any]) -> Seen:
    """What a client has of these events (JSON texts or decoded; [DONE] is left out)."""
    seen = Seen()
    for event in events:
        if event != "[DONE]":
            seen.take(json.loads(event) if isinstance(event, str) else event)
    return seen


def ids_of(event: dict[str, Any]) -> list[int]:
    """Token ids of an event with one choice."""
    return (event["choices"][0].get("token_ids") or []) if event["choices"] else []


def texts_of(choice: dict[str, Any]) -> str:
    """The text of a chunk."""
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""


def generated(request: Request) -> int:
    """Tokens that a request's answer has."""
    return sum(len(ids_of(json.loads(event))) for event in request.ids)


def clean_cuts(line: Line, request: Request) -> list[int]:
    """Places between the first and the last token behind which no character is half done."""
    return [place for place in range(1, generated(request)) if line.steps[place - 1].text]


def continued(api: str, body: dict[str, Any], line: Line, cut: int) -> dict[str, Any]:
    """The request for what comes behind the first ``cut`` tokens of ``body``'s answer."""
    ids = line.prompt + line.ids[:cut]
    asked = dict(body)
    if api == "chat":
        asked["kv_transfer_params"] = {"prompt_token_ids": ids}
    else:
        asked["prompt"] = ids
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    if name in body or api == "completions":
        asked[name] = body.get(name, DEFAULT_MAX_TOKENS) - cut
    if body.get("min_tokens"):
        asked["min_tokens"] = max(0, body["min_tokens"] - cut)
    return asked
