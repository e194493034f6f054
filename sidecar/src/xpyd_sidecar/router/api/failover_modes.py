"""The table of ways: how a stream that broke off can go on elsewhere, by the fields of its request.

Theory: a greedy answer is a function of its prompt. So
  * where the next token depends on the tokens before it alone, an engine that is given prompt and generated tokens as its
    prompt goes on with the very next token (CONTINUE);
  * where it also depends on what was generated as such (penalties count output alone, a grammar has a state, a parser has
    read tool calls), the request is run again from its start, and what the client has is compared and dropped (REPLAY). So
    is a sampled answer with a seed;
  * a sampled answer without a seed has no second run (ERROR). It ends with an error event, unless its rest may be drawn
    elsewhere (see below).
The worst way that any field asks for is the way of the request. A field that is not known here asks for REPLAY: whatever it
does, the same request does it again.

**Sampled streams**: which of them another engine can go on with so that nobody can tell, and why. One without a
seed has no second run, so nothing can be compared. What has to be the same is its distribution:

    P(t₁ … tₙ) = Π P(tᵢ | prompt, t₁ … tᵢ₋₁)

An engine that is given ``prompt, t₁ … tₖ`` as its prompt draws tₖ₊₁ … from the right one if P depends on the tokens before
it alone, wherever prompt ends and output begins (EXACT). All other fields need the output's history, unless their value
says that they are not used (``TABLE``):

    counts the output's tokens               presence and frequency penalty, stream_interval
    has a state that follows the output      grammars, tools, reasoning and its budget, repetition detection, watermarks
    may begin before the cut, end behind it  stop strings; bad_words of several tokens, which nobody here can tell
    draws several sequences                  n, best_of, beam search
    makes the prompt more than its ids       prompt_embeds, echo, suffix, media; prompt_logprobs shows what came as prompt
    is read by who knows                     vllm_xargs, and whatever stands in no table
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Literal

import msgspec
from msgspec import Raw

from xpyd_sidecar.contract.membership import Sampling
from xpyd_sidecar.router.api.fields import Api, is_null

Fields = Mapping[str, Raw]
_decode_float = msgspec.json.Decoder(float).decode



def _because(reason: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, reason)


EXACT: dict[str, str] = {
    **_because("shapes the prompt, whose token ids the other engine is given", "model", "prompt", "messages",
               "add_special_tokens", "truncate_prompt_tokens", "truncation_side", "cache_salt", "chat_template",
               "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents", "reasoning_effort"),
    **_because("says whose request it is, and when it runs", "user", "priority", "session_id", "request_id"),
    **_because("changes how one token is drawn, by the logits of that token alone", "temperature", "top_p", "top_k",
               "min_p", "logit_bias", "allowed_token_ids"),
    **_because("counts prompt and output alike", "repetition_penalty"),
    **_because("is asked for less what came", "max_tokens", "max_completion_tokens", "min_tokens"),
    **_because("looks at one token", "stop_token_ids", "ignore_eos"),
    **_because("changes what is shown of the tokens, not which they are", "stream", "stream_options", "logprobs",
               "top_logprobs", "logprob_token_ids", "skip_special_tokens", "return_tokens_as_token_ids",
               "return_token_ids"),
    **_because("means nothing without stop strings", "include_stop_str_in_output"),
    **_because("means nothing without a beam search", "length_penalty"),
    **_because("means nothing without tools", "tool_choice", "parallel_tool_calls"),
    **_because("is null: a request with a seed is run again", "seed"),
}
"""Fields whatever their value is, and why."""


class EngineDefaults(msgspec.Struct, frozen=True):
    """What the decode engines of a fleet add to requests, taken together."""

    alike: bool = False
    """All have told it, and the same."""
    known: tuple[Sampling, ...] = ()
    """What was told, each once."""

    def with_defaults(self, fields: Fields) -> list[Fields]:
        """The fields as each kind of engine has them: with what it adds, as if that stood in the request."""
        found = [_with(fields, one) for one in self.known if one.defaults or one.own]
        return found if found and self.alike else [*found, fields]

    @property
    def bound(self) -> int:
        """Most tokens for any request; 0: none."""
        return min((one.max_tokens for one in self.known if one.max_tokens), default=0)

    def default(self, name: str) -> float | None:
        """What a field is where the request has none; None: not told, or not by all alike."""
        return dict(self.known[0].defaults).get(name) if self.alike else None


UNTOLD = EngineDefaults()


class SamplingTerms(msgspec.Struct, frozen=True):
    """On which terms streams go on elsewhere."""

    sampled: bool = False
    """Sampled ones too, where they keep their distribution."""
    told: EngineDefaults = UNTOLD


EXACT_ALONE = SamplingTerms()
"""Those alone whose every token is determined."""


def told_of(engines: Iterable[Sampling | None]) -> EngineDefaults:
    """What engines add, taken together."""
    given = list(engines)
    known: list[Sampling] = []
    for one in given:
        if one is not None and one not in known:
            known.append(one)
    return EngineDefaults(len(known) == 1 and None not in given, tuple(known))


def _with(fields: Fields, added: Sampling) -> Fields:
    """A field of the request counts before an engine's; null is as good as absent."""
    out = dict(fields)
    for name, value in added.defaults:
        if name not in out or is_null(out[name]):
            out[name] = Raw(msgspec.json.encode(value))
    for name in added.own:
        out[f"the engine's own {name}"] = Raw(b"true")  # no table knows it
    return out


def keeps_distribution(fields: Fields) -> bool:
    """Whether a sampled stream may go on from its ids, where a greedy one may (``way_if_greedy``)."""
    return all(is_null(raw) or (name in TABLE and (name != "stop" or bytes(raw) == b"[]")) for name, raw in fields.items())


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

    Only such messages have these words as keys; of others that have them costs a replay what is no ``text_messages``, and
    ids that were ignored are noticed.
    """
    if _PARTS.search(raw) is None:
        return False
    try:
        text_messages(raw)
    except _BAD_JSON:
        return True
    return False


class _TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class _TextMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[_TextPart] | None = None
    name: str | None = None


text_messages = msgspec.json.Decoder(list[_TextMessage]).decode
"""Messages of text and nothing else, as most are; fails with any other."""
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
    return max(_way_of(api, counted) for counted in told.with_defaults(fields))


def goes_on_sampled(api: Api, fields: Fields, told: EngineDefaults) -> bool:
    """Whether a request that ``way_of`` has no way for may go on from its ids, with the same distribution."""
    return told.alike and all(way_if_greedy(api, counted) is FailoverMode.CONTINUE and keeps_distribution(counted)
                              for counted in told.with_defaults(fields))


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
