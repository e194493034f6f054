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
from xpyd_sidecar.router.api.sampled import UNTOLD, EngineDefaults, keeps_distribution

Fields = Mapping[str, Raw]
_decode_float = msgspec.json.Decoder(float).decode


class FailoverMode(IntEnum):
    """From best to worst."""

    CONTINUE = 0
    REPLAY = 1
    ERROR = 2


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


def _unless(*plain: bytes) -> Callable[[Raw, Fields], FailoverMode]:
    """CONTINUE where the value is one of these, as JSON."""
    return lambda raw, _: FailoverMode.CONTINUE if bytes(raw) in plain else FailoverMode.REPLAY


def _unless_zero(raw: Raw, _: Fields) -> FailoverMode:
    return FailoverMode.CONTINUE if _number(raw) == 0 else FailoverMode.REPLAY


def _always(way: FailoverMode) -> Callable[[Raw, Fields], FailoverMode]:
    return lambda *_: way


def _unless_one_prompt(raw: Raw, _: Fields) -> FailoverMode:
    # Text, or the token ids of one prompt. Its ids come back with the stream, so a long list is not read.
    head = bytes(memoryview(raw)[:64]).lstrip()
    one = head.startswith(b'"') or (head.startswith(b"[") and head[1:].lstrip()[:1].isdigit())
    return FailoverMode.CONTINUE if one else FailoverMode.REPLAY


def _unless_text_format(raw: Raw, _: Fields) -> FailoverMode:
    try:
        kind = _decode_format(raw).type
    except _BAD_JSON:
        return FailoverMode.REPLAY
    return FailoverMode.CONTINUE if bytes(kind) == b'"text"' else FailoverMode.REPLAY


def _unless_unused(raw: Raw, fields: Fields) -> FailoverMode:
    # With tool_choice "none" the engine reads no tool calls; the tools only shape the prompt.
    choice = fields.get("tool_choice")
    unused = bytes(raw) == b"[]" or (choice is not None and bytes(choice) == b'"none"')
    return FailoverMode.CONTINUE if unused else FailoverMode.REPLAY


def _unless_text_parts(raw: Raw, _: Fields) -> FailoverMode:
    # Engines ignore given prompt ids where a message has a part that is not text. Only such messages have these words as
    # keys; text that happens to contain them costs a replay, and ids that were ignored are noticed.
    return FailoverMode.REPLAY if has_parts(raw) else FailoverMode.CONTINUE


def has_parts(raw: Raw | bytes) -> bool:
    """Whether messages may have parts that are not text."""
    return _PARTS.search(raw) is not None


_PARTS = re.compile(rb'"(?:image_|input_|audio|video|file"|thinking"|refusal")')
_CONTINUES = _always(FailoverMode.CONTINUE)

TABLE: dict[str, Callable[[Raw, Fields], FailoverMode]] = dict.fromkeys((
    # the prompt and its text: with token ids, rendered already
    "model", "add_special_tokens", "truncate_prompt_tokens", "truncation_side", "cache_salt", "chat_template",
    "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents", "reasoning_effort",
    # whose request it is
    "user", "priority", "session_id", "request_id",
    # when it ends: counted on, or a matter of single tokens and of text that is held back
    "max_tokens", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output",
    # what a token is chosen from: each token for itself, or by prompt and output alike
    "temperature", "seed", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids", "repetition_penalty",
    "length_penalty",
    # what is shown
    "stream", "stream_options", "logprobs", "top_logprobs", "logprob_token_ids", "skip_special_tokens",
    "return_tokens_as_token_ids", "return_token_ids", "tool_choice", "parallel_tool_calls"), _CONTINUES) | {
    "prompt": _unless_one_prompt,
    "messages": _unless_text_parts,
    "tools": _unless_unused,
    "response_format": _unless_text_format,
    "presence_penalty": _unless_zero,
    "frequency_penalty": _unless_zero,
    "n": _unless(b"1"),
    "best_of": _unless(b"1"),
    "echo": _unless(b"false"),
    "use_beam_search": _unless(b"false"),
    "include_reasoning": _unless(b"true"),
    "bad_words": _unless(b"[]"),
    "spaces_between_special_tokens": _unless(b"true"),
    "return_prompt_text": _unless(b"false"),
}
"""What each field asks for, given its value and all fields. A value of null is as good as absent."""
_ALWAYS_CONTINUE = frozenset(name for name, ask in TABLE.items() if ask is _CONTINUES)


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
        if not is_null(raw) and (ask is None or ask(raw, fields) is not FailoverMode.CONTINUE):
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
    return all(name not in fields or is_null(fields[name]) or TABLE[name](fields[name], fields) is FailoverMode.CONTINUE
               for name in ("n", "best_of", "prompt"))
