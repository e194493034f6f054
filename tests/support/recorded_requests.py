"""The requests that are recorded from a real engine: which fields, on which prompts.

A line is a prompt with the fields that choose its tokens. A request belongs to a line if its tokens are those of the line;
what it says of stop strings, lengths, log probabilities or usage only cuts and shows them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from recorded import Line

LINE_TOKENS = 72
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
Way = Literal["continue", "replay", "error"]
GREEDY = {"temperature": 0}
USAGE = {"stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Wanted:
    """A request to record."""

    api: str
    body: dict[str, Any]
    line: str = ""
    way: Way = "continue"
    """What can be done for its stream when an engine dies."""
    more: Callable[[Line], dict[str, Any]] | None = None
    """Fields that depend on what the line generates."""

    def made(self, line: Line | None) -> dict[str, Any]:
        """The body."""
        if self.more is None:
            return self.body
        assert line is not None
        return self.body | self.more(line)


PROMPTS: dict[str, Any] = {
    "short": "Hello wörld",
    "long": "A block is what a lease is for. " * 24,
    "ids": [7, 40, 250, 33, 91, 12, 64, 130, 131, 132, 9],
    "unicode": "日本語 and ☃ — naïve 😀",
}
CHATS: dict[str, Any] = {
    "question": [{"role": "user", "content": "Hi, tell me € about 日本"}],
    "system": [{"role": "system", "content": "Answer briefly. " * 8}, {"role": "user", "content": "What is a block?"},
               {"role": "assistant", "content": "A page."}, {"role": "user", "content": "And a lease?"}],
}
BIAS = {"65": 6, "97": 5, "105": 4, "40": 3}


def lines() -> dict[str, Wanted]:
    """By name."""
    found = {name: Wanted("completions", {"prompt": prompt, **GREEDY}) for name, prompt in PROMPTS.items()}
    found |= {name: Wanted("chat", {"messages": messages, **GREEDY}) for name, messages in CHATS.items()}
    for name in ("short", "question"):
        base = found[name]
        found[f"{name} repetition"] = Wanted(base.api, {**base.body, "repetition_penalty": 1.3})
        found[f"{name} bias"] = Wanted(base.api, {**base.body, "logit_bias": BIAS})
    return found


def text_of(line: Line) -> str:
    """What the line generates."""
    return "".join(step.text for step in line.steps)


def _stop(at: float, length: int) -> Callable[[Line], dict[str, Any]]:
    def made(line: Line) -> dict[str, Any]:
        text = text_of(line)
        start = int(len(text) * at)
        return {"stop": text[start:start + length]}
    return made


def _stop_id(line: Line) -> dict[str, Any]:
    ids = [step.id for step in line.steps]
    return {"stop_token_ids": [next(one for place, one in enumerate(ids) if place > 20 and one not in ids[:place])]}


NEVER = "\u0001never comes\u0001"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 12}},
          "required": ["a", "b"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}}


def requests() -> dict[str, Wanted]:
    """By name."""
    found: dict[str, Wanted] = {}
    for name, line in lines().items():
        api = line.api
        body = {**line.body, "ignore_eos": True}
        found[f"{name}: plain"] = Wanted(api, {**body, "max_tokens": 48}, name)
        found[f"{name}: usage"] = Wanted(api, {**body, "max_tokens": 56, **USAGE}, name)
        found[f"{name}: stop"] = Wanted(api, {**body, "max_tokens": 64, **USAGE}, name, more=_stop(0.6, 3))
        found[f"{name}: stop held back"] = Wanted(api, {**body, "max_tokens": 40, "stop": [NEVER, "\u0002"]}, name)
        if " " in name:
            continue
        logprobs = {"logprobs": 2} if api == "completions" else {"logprobs": True, "top_logprobs": 2}
        found[f"{name}: logprobs"] = Wanted(api, {**body, "max_tokens": 32, **logprobs}, name)
        found[f"{name}: token ids"] = Wanted(api, {**body, "max_tokens": 32, "return_token_ids": True, **USAGE}, name)
        found[f"{name}: stop kept"] = Wanted(api, {**body, "max_tokens": 64, "include_stop_str_in_output": True}, name,
                                             more=_stop(0.7, 4))
        found[f"{name}: stop id"] = Wanted(api, {**body, "max_tokens": 64, **USAGE}, name, more=_stop_id)
        found[f"{name}: min tokens"] = Wanted(api, {**body, "max_tokens": 64, "min_tokens": 30, **USAGE}, name,
                                              more=_stop(0.1, 1))
        always = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        found[f"{name}: usage all along"] = Wanted(api, {**body, "max_tokens": 32, **always}, name)
        found[f"{name}: no length"] = Wanted(api, body if api == "completions" else {**body, "max_completion_tokens": 24},
                                             name)
        _replayed(found, name, api, body)
    return found


def _replayed(found: dict[str, Wanted], name: str, api: str, body: dict[str, Any]) -> None:
    def add(what: str, fields: dict[str, Any], way: Way = "replay") -> None:
        found[f"{name}: {what}"] = Wanted(api, {**body, "max_tokens": 40, **fields}, way=way)

    add("presence", {"presence_penalty": 0.7})
    add("frequency", {"frequency_penalty": 0.4, **USAGE})
    add("seed", {"temperature": 0.9, "seed": 11})
    add("sampled", {"temperature": 0.9}, "error")
    add("bad words", {"bad_words": ["a", "b"]})
    add("regex", {"structured_outputs": {"regex": "[a-f]{6}-[0-9]{4}"}, "ignore_eos": False})
    add("json", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
                 "ignore_eos": False})
    if api == "completions":
        add("echo", {"echo": True})
        if name == "short":
            add("two prompts", {"prompt": ["one", "and two"], **USAGE})
    else:
        add("tool", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}},
                     "ignore_eos": False})
