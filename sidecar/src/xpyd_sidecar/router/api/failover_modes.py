"""The table of ways: how a stream that broke off can go on elsewhere, by the fields of its request.

Theory: a greedy answer is a function of its prompt. So
  * where the next token depends on the tokens before it alone, an engine that is given prompt and generated tokens as its
    prompt goes on with the very next token (CONTINUE);
  * where it also depends on what was generated as such (penalties count output alone, a grammar has a state, a parser has
    read tool calls), the request is run again from its start, and what the client has is compared and dropped (REPLAY). So
    is a sampled answer with a seed;
  * a sampled answer without a seed has no second run (ERROR). It ends with an error event, unless its rest may be drawn
    elsewhere (``sampled``).
The worst way that any field asks for is the way of the request. A field that is not known here asks for REPLAY: whatever it
does, the same request does it again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import IntEnum

import msgspec
from msgspec import Raw

from xpyd_sidecar.router.api.fields import Api, is_null
from xpyd_sidecar.router.api.sampled import EXACT, UNTOLD, EngineDefaults, keeps_distribution

Fields = Mapping[str, Raw]
_decode_float = msgspec.json.Decoder(float).decode


class FailoverMode(IntEnum):
    """From best to worst."""

    CONTINUE = 0
    REPLAY = 1
    ERROR = 2


Continues = Callable[[Raw, Fields], bool]
"""Whether a field's value, among all fields, lets the stream go on from its ids."""
_BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_GREEDY_BELOW = 1e-5
"""Temperatures below it are greedy (vLLM ``sampling_params._SAMPLING_EPS``)."""


class _Format(msgspec.Struct):
    type: Raw = Raw(b"")


_decode_format = msgspec.json.Decoder(_Format).decode


def _number(raw: Raw) -> float | None:
    try:
        return _decode_float(raw)
    except _BAD_JSON:
        return None


def _is(plain: bytes) -> Continues:
    return lambda raw, _: bytes(raw) == plain


def _zero(raw: Raw, _: Fields) -> bool:
    return _number(raw) == 0


def _one_prompt(raw: Raw, _: Fields) -> bool:
    # Text, or the token ids of one prompt. Its ids come back with the stream, so a long list is not read.
    head = bytes(memoryview(raw)[:64]).lstrip()
    return head.startswith(b'"') or (head.startswith(b"[") and head[1:].lstrip()[:1].isdigit())


def _text_format(raw: Raw, _: Fields) -> bool:
    try:
        return bytes(_decode_format(raw).type) == b'"text"'
    except _BAD_JSON:
        return False


def _unused(raw: Raw, fields: Fields) -> bool:
    # With tool_choice "none" the engine reads no tool calls; the tools only shape the prompt.
    return bytes(raw) == b"[]" or bytes(fields.get("tool_choice", b"")) == b'"none"'


def has_parts(raw: Raw | bytes) -> bool:
    """Whether messages may have parts that are not text: engines ignore given prompt ids then.

    Only such messages have these words as keys; text that has them costs a replay, and ids that were ignored are noticed.
    """
    return _PARTS.search(raw) is not None


_PARTS = re.compile(rb'"(?:image_|input_|audio|video|file"|thinking"|refusal")')


def _continues(*_: object) -> bool:
    return True


TABLE: dict[str, Continues] = dict.fromkeys((EXACT.keys() - {"prompt", "messages"}) | {"stop"}, _continues) | {
    "prompt": _one_prompt,
    "messages": lambda raw, _: not has_parts(raw),
    "tools": _unused,
    "response_format": _text_format,
    "presence_penalty": _zero,
    "frequency_penalty": _zero,
    "n": _is(b"1"),
    "best_of": _is(b"1"),
    "echo": _is(b"false"),
    "use_beam_search": _is(b"false"),
    "include_reasoning": _is(b"true"),
    "bad_words": _is(b"[]"),
    "spaces_between_special_tokens": _is(b"true"),
    "return_prompt_text": _is(b"false"),
}
"""What lets a stream go on from its ids: whatever keeps the distribution of sampled ones, stop strings (text is held back
for them), and others by their values. A value of null is as good as absent.
"""
_ALWAYS_CONTINUE = frozenset(name for name, ask in TABLE.items() if ask is _continues)


def way_of(api: Api, fields: Fields, told: EngineDefaults = UNTOLD) -> FailoverMode:
    """The way of a request whose answer is determined; ERROR for others. Never raises: what cannot be read is the engine's
    to refuse. ``told``: what engines add to it.
    """
    return max(_way_of(api, counted) for counted in told.counted(fields))


def goes_on_sampled(api: Api, fields: Fields, told: EngineDefaults) -> bool:
    """Whether a request that ``way_of`` has no way for may go on from its ids, with the same distribution."""
    return told.alike and all(way_if_greedy(api, counted) is FailoverMode.CONTINUE and keeps_distribution(counted)
                              for counted in told.counted(fields))


def _way_of(api: Api, fields: Fields) -> FailoverMode:
    sampling = _sampling(fields)
    return sampling if sampling is FailoverMode.ERROR else max(sampling, way_if_greedy(api, fields))


def way_if_greedy(api: Api, fields: Fields) -> FailoverMode:
    """The way by all fields but those of sampling: CONTINUE where each event's ids are those of its text."""
    if ("prompt" if api == "completions" else "messages") not in fields:
        return FailoverMode.REPLAY  # prompt_embeds
    for name, raw in fields.items():
        if name in _ALWAYS_CONTINUE:
            continue
        ask = TABLE.get(name)
        if not is_null(raw) and (ask is None or not ask(raw, fields)):
            return FailoverMode.REPLAY
    return FailoverMode.CONTINUE


def _sampling(fields: Fields) -> FailoverMode:
    # An absent temperature is 1.0, unless the model's generation config says otherwise and engines have told it.
    temperature = fields.get("temperature")
    if temperature is not None and not is_null(temperature):
        value = _number(temperature)
        if value is not None and value < _GREEDY_BELOW:
            return FailoverMode.CONTINUE
    seed = fields.get("seed")
    return FailoverMode.ERROR if seed is None or is_null(seed) else FailoverMode.REPLAY


def one_choice(fields: Fields) -> bool:
    """Whether the answer has one choice, as far as the request tells."""
    return all(name not in fields or is_null(fields[name]) or TABLE[name](fields[name], fields)
               for name in ("n", "best_of", "prompt"))
