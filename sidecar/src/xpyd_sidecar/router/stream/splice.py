"""The events of a stream that goes on, made to follow what the client has.

    text, reasoning, tool calls    what the client has is compared by channel and dropped; the first difference ends it
    token ids, log probabilities   the same, by count
    id, created                    those of the first stream
    role                           said once
    usage                          tokens that were generated elsewhere are prompt here: moved back
    text_offset                    goes on from the last one that the client has
    finish reason                  beside it stands how often the stream went on (``xpyd_continued``)

An event of which nothing is left is dropped. This way is for the rare stream that broke: events are decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from xpyd_sidecar.router.stream.continuation import Going
from xpyd_sidecar.router.stream.position import TEXTS, Position, StreamEvent

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
CONTINUED = "xpyd_continued"
"""In the event with the finish reason: how often the stream went on elsewhere."""
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
"""Parallel lists of the log probabilities of /v1/completions."""


class Differs(Exception):
    """The engine gives another answer than the one that the client has begun to read."""


class IdsIgnored(Exception):
    """The engine did not use the token ids that it was given."""


class Splicer:
    """Takes the events of one leg; what it lets through is noted in ``position``."""

    def __init__(self, position: Position, going: Going) -> None:
        self._position = position
        self._going = going
        self._texts = dict(going.texts)
        self._ids: dict[int, Sequence[int]] = dict(going.ids)
        self._logprobs = dict(going.logprobs)
        self._seam = going.seam
        self._counts = going.counts
        self._shift: int | None = None
        self._checked = not going.prompt

    def take(self, payload: bytes) -> bytes:
        """One event, ``data: {…}`` with its empty line; what is left of it for the client, empty where nothing is.

        Raises Differs: it contradicts what the client has; IdsIgnored: it goes on behind another prompt; DecodeError.
        """
        event: dict[str, Any] = _decode(payload[6:])
        self._check_prompt(event)
        position = self._position
        if position.id:
            event["id"], event["created"] = position.id, position.created
        choices = event.get("choices") or []
        left = [self._choice(choice) for choice in choices]
        self._usage(event)
        if not choices:
            self.end()
            if position.usage_sent:
                return b""
        noted = msgspec.convert(event, StreamEvent)
        position.note(noted)
        if choices and not any(left):
            return b""
        if self._counts:
            position.continued += 1
            self._counts = False
        if position.continued and any(choice.get("finish_reason") is not None for choice in choices):
            event[CONTINUED] = position.continued
        self._hide_ids(event)
        return b"data: " + _encode(event) + b"\n\n"

    @property
    def caught_up(self) -> bool:
        """Whether nothing more comes that the client has, and something came that it had not."""
        return (self._checked and not self._counts and self._seam is None and not any(self._texts.values())
                and not any(self._ids.values()))

    def end(self, index: int | None = None) -> None:
        """It ended, or this choice of it. Raises Differs where the client has more than the engine said."""
        for (owner, channel), text in self._texts.items():
            if text and index in {None, owner}:
                raise Differs(f"it ended {len(text)} characters ({channel}) before what the client has")

    def _check_prompt(self, event: dict[str, Any]) -> None:
        if self._checked:
            return
        choices = event.get("choices") or [{}]
        given = event.get("prompt_token_ids") or choices[0].get("prompt_token_ids")
        if given is None or ",".join(map(str, given)).encode() != self._going.prompt:
            raise IdsIgnored("it did not use the token ids that it was given")
        self._checked = True

    def _choice(self, choice: dict[str, Any]) -> bool:
        """Drop what the client has; whether anything is left."""
        index = choice.get("index", 0)
        left = any([self._text(choice, "text", (index, "text")), self._delta(choice.get("delta") or {}, index),
                    self._token_ids(choice, index), self._entries(choice, index)])
        if choice.get("finish_reason") is not None:
            left = left or index not in self._position.finished
            self.end(index)
        return left

    def _text(self, box: dict[str, Any], name: str, channel: tuple[int, str]) -> bool:
        text = box.get(name)
        if not text:
            return False
        if self._seam is not None:
            own = self._seam.own(channel[1], text)
            if own is None:
                raise Differs("it cannot be told which of its text is new, behind a character that was half said")
            self._seam = None
            text = box[name] = own
        again = self._texts.get(channel, "")
        if again:
            size = min(len(again), len(text))
            if text[:size] != again[:size]:
                raise Differs(f"it said {text[:size]!r} where the client has {again[:size]!r}")
            self._texts[channel] = again[size:]
            text = box[name] = text[size:]
        return bool(text)

    def _delta(self, delta: dict[str, Any], index: int) -> bool:
        if delta.get("role") and index in self._position.roles:
            del delta["role"]
        texts = [self._text(delta, name, (index, name)) for name in TEXTS]
        if delta.get("tool_calls"):
            delta["tool_calls"] = [tool for tool in delta["tool_calls"] if self._tool(tool, index)]
        return any(texts) or bool(delta.get("role") or delta.get("tool_calls"))

    def _tool(self, tool: dict[str, Any], index: int) -> bool:
        number = tool.get("index", 0)
        known = (index, number) in self._position.tools
        left = not known
        if known:  # its id was drawn at random when the client got it
            tool.pop("id", None)
            tool.pop("type", None)
        function = tool.get("function") or {}
        for name in ("name", "arguments"):
            had = bool(function.get(name))
            left = self._text(function, name, (index, f"tool {number} {name}")) or left
            if had and not function[name]:
                del function[name]
        return left

    def _token_ids(self, choice: dict[str, Any], index: int) -> bool:
        given = choice.get("token_ids")
        if not given:
            return False
        again = self._ids.get(index) or []
        size = min(len(again), len(given))
        if list(again[:size]) != given[:size]:
            raise Differs(f"it chose tokens {given[:size]} where the client has {list(again[:size])}")
        self._ids[index] = again[size:]
        choice["token_ids"] = given[size:]
        return self._position.asked_ids and len(given) > size

    def _entries(self, choice: dict[str, Any], index: int) -> bool:
        shown = choice.get("logprobs")
        if not shown:
            return False
        names = [name for name in ("content", *_LISTS) if isinstance(shown.get(name), list)]
        size = min(self._logprobs.get(index, 0), max((len(shown[name]) for name in names), default=0))
        self._logprobs[index] = self._logprobs.get(index, 0) - size
        for name in names:
            shown[name] = shown[name][size:]
        offsets = shown.get("text_offset")
        if offsets:
            if self._shift is None:
                after = self._position.next_offset
                self._shift = 0 if after is None else after - offsets[0]
            shown["text_offset"] = [offset + self._shift for offset in offsets]
        return any(shown[name] for name in names)

    def _usage(self, event: dict[str, Any]) -> None:
        usage, keep = event.get("usage"), self._going.keep
        if not usage or not keep:
            return
        usage["prompt_tokens"] -= keep
        usage["completion_tokens"] = (usage.get("completion_tokens") or 0) + keep
        details = usage.get("prompt_tokens_details")
        if details and details.get("cached_tokens"):
            details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])
        if details and details.get("created_cache_tokens"):  # cached or created: both are prompt
            left = usage["prompt_tokens"] - (details.get("cached_tokens") or 0)
            details["created_cache_tokens"] = min(details["created_cache_tokens"], left)
        usage.pop("completion_tokens_details", None)  # counts what this engine generated alone

    def _hide_ids(self, event: dict[str, Any]) -> None:
        for box in [event, *event.get("choices", ())]:
            if box.get("prompt_token_ids") is not None:
                box["prompt_token_ids"] = None
            if box.get("token_ids") is not None and not self._position.asked_ids:
                box["token_ids"] = None
