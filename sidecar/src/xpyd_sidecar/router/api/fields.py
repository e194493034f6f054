r"""The table of request fields: what happens to each of them on the way to prefill.

Theory: a prefill leg computes the KV of the prompt and one token that nobody sees. So
  * what changes the tokens of the PROMPT must be equal on both legs (KEEP);
  * what shapes the output alone is dropped (DROP) or made cheapest (SET): it would cost time, or contradict one token;
  * what needs more of the prompt than its KV (prompt_logprobs), or several sequences (n, lists of prompts), is served by
    decode alone: the leg to prefill is skipped;
  * what only the router may say (kv_transfer_params) is refused.
A field that is not in the table is kept: the engine ignores it, or it is newer than this table. Dialects (``/v1/messages``,
``/v1/responses``) have a table of what is not kept: their answers pass through, but their prompts are prompts.

Values are read as vLLM takes them, whose request classes (pydantic) are lax:

    "stream": true   1   1.0   "true"   "Yes"   "on"        all are true
    "max_tokens": 16   16.0   "16"                          all are 16
    EF BB BF { … }                                          a byte order mark before the body is no fault
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Literal

import msgspec
from msgspec import Raw

from xpyd_sidecar.contract import legs

Api = Literal["completions", "chat", "messages", "responses"]
DIALECTS: frozenset[Api] = frozenset({"messages", "responses"})
"""APIs that the engine alone knows: what is answered passes through."""
MAX_TOOLS = 1 << 20
"""Bytes of a dialect's tools that are read, since every one of them is built; decode does all of a request with more."""
_BOM = b"\xef\xbb\xbf"
_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
_FALSE = frozenset({"0", "false", "f", "no", "n", "off"})
_MOST = 1 << 63
_scalar = msgspec.json.Decoder(bool | float | str | None).decode
_USUAL = {b"true": True, b"false": False, b"null": None}


def strip_mark(body: bytes) -> bytes:
    """A body without its byte order mark."""
    return body.removeprefix(_BOM)


def truth(raw: Raw) -> bool | None:
    """A value as a field for ``bool | None`` takes it. Raises ValueError: it takes none such."""
    plain = bytes(raw)
    if plain in _USUAL:
        return _USUAL[plain]
    value = _scalar(raw)
    if isinstance(value, str):
        word = value.lower() if value.isascii() else ""
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
    elif value in (0, 1):
        return bool(value)
    raise ValueError("a boolean is expected")


def is_true(raw: Raw | None) -> bool:
    """Whether a value is true; not where it is none such."""
    try:
        return raw is not None and truth(raw) is True
    except (ValueError, RecursionError):
        return False


def integer_of(raw: Raw) -> int | None:
    """A value as a field for ``int`` takes it; None where it takes none such."""
    try:
        value = msgspec.json.decode(raw, type=bool | int | float | str)
        if isinstance(value, str):
            number, _, rest = value.strip().partition(".")
            return int(number) if value.isascii() and len(value) < 20 and not rest.strip("0") else None
        return int(value) if value == int(value) and abs(value) < _MOST else None
    except (ValueError, OverflowError, RecursionError):
        return None


class OnPrefill(Enum):
    """What the prefill leg does with a field."""

    KEEP = "keep"
    DROP = "drop"
    SET = "set"
    """Give it ``FieldRule.value``, if the client sent the field or ``FieldRule.always``."""


class FieldRule(msgspec.Struct, frozen=True):
    """One row of the table."""

    leg: OnPrefill
    value: bytes = b""
    always: bool = False
    skips: Callable[[Mapping[str, Raw]], bool] | None = None
    """Given all fields: does this one make the request skip prefill? Asked only where the client sent it, not null."""
    refused: str = ""
    """Not empty: a client must not send it, and why."""


_NULL = b"null"


def is_null(raw: Raw) -> bool:
    """Whether a value is ``null``, without decoding it."""
    return len(raw) == len(_NULL) and bytes(raw) == _NULL


def _raw(fields: Mapping[str, Raw], name: str) -> bytes:
    value = fields.get(name)
    return _NULL if value is None else bytes(value)


def _is_true(name: str) -> Callable[[Mapping[str, Raw]], bool]:
    return lambda fields: is_true(fields.get(name))


def _above_one(name: str) -> Callable[[Mapping[str, Raw]], bool]:
    return lambda fields: _raw(fields, name) not in {b"0", b"1"}


def _given(_: Mapping[str, Raw]) -> bool:
    return True


def _negative(name: str) -> Callable[[Mapping[str, Raw]], bool]:
    return lambda fields: _raw(fields, name).startswith((b"-", b'"'))  # "-1" is taken as well


class _Few(msgspec.Struct, array_like=True):
    """The beginning of a list. What follows is skipped, however many there are: nothing is built of it."""

    first: Raw = Raw(b"")
    second: Raw = Raw(b"")


_decode_few = msgspec.json.Decoder(_Few).decode


def _several_prompts(fields: Mapping[str, Raw]) -> bool:
    # A list of numbers is one prompt (token ids) and may be long: look at its first character only.
    raw = fields["prompt"]
    head = bytes(memoryview(raw)[:64]).lstrip()
    if not head.startswith(b"["):
        return False
    first = head[1:].lstrip()[:1]
    if first.isdigit():
        return False
    few = _decode_few(raw)
    return not len(few.first) or len(few.second) > 0


def _echo_with_logprobs(fields: Mapping[str, Raw]) -> bool:
    return is_true(fields.get("echo")) and _raw(fields, "logprobs") != _NULL


class _DialectTool(msgspec.Struct):
    type: str = "function"


def _run_by_the_engine(fields: Mapping[str, Raw]) -> bool:
    """Tools that the engine runs itself make several prompts of one request. What cannot be read is its to refuse."""
    if len(fields["tools"]) > MAX_TOOLS:
        return True
    try:
        return any(tool.type != "function" for tool in msgspec.json.decode(fields["tools"], type=list[_DialectTool]))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return True


def _cut_to_room(fields: Mapping[str, Raw]) -> bool:
    """A prompt that is cut to the room which its answer leaves is another one on each leg."""
    return _raw(fields, "truncation") != b'"disabled"'


KEEP = FieldRule(OnPrefill.KEEP)
DROP = FieldRule(OnPrefill.DROP)
ONLY_ROUTER = "it is set by the router"


def _all(rule: FieldRule, *names: str) -> dict[str, FieldRule]:
    return dict.fromkeys(names, rule)


_COMMON: dict[str, FieldRule] = {
    # what the prompt's tokens and their KV depend on; chat templates can show response_format to the model
    **_all(KEEP, "model", "add_special_tokens", "truncation_side", "cache_salt", "response_format"),
    # -1 cuts to what the context leaves beside max_tokens, which differs between the legs.
    "truncate_prompt_tokens": FieldRule(OnPrefill.KEEP, skips=_negative("truncate_prompt_tokens")),
    # whose request it is and when it runs; custom extensions may read vllm_xargs on either side
    **_all(KEEP, "user", "priority", "session_id", "vllm_xargs"),
    "request_id": DROP,  # X-Request-Id says it
    # one token, not streamed, and the cheapest one, since it is thrown away
    "max_tokens": FieldRule(OnPrefill.SET, b"1", always=True),
    "stream": FieldRule(OnPrefill.SET, b"false", always=True),
    "temperature": FieldRule(OnPrefill.SET, b"0", always=True),
    **_all(DROP, "stream_options", "stream_interval", "min_tokens", "ignore_eos", "stop", "stop_token_ids",
           "include_stop_str_in_output", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
           "repetition_penalty", "length_penalty", "logit_bias", "allowed_token_ids", "bad_words", "watermarking",
           "structured_outputs", "repetition_detection", "thinking_token_budget"),
    # what the answer shows
    **_all(DROP, "top_logprobs", "logprobs", "logprob_token_ids", "skip_special_tokens", "spaces_between_special_tokens",
           "return_tokens_as_token_ids", "return_weight_versions", "return_token_ids", "return_token_offsets", "mm_payload",
           "return_mm_kwargs"),  # return_weight_versions: since vLLM 0.33
    # needs the logits, or the experts, of every prompt token where the answer is made
    **_all(FieldRule(OnPrefill.DROP, skips=_given), "prompt_logprobs", "routed_experts_prompt_start"),
    # several sequences share one prompt
    "n": FieldRule(OnPrefill.DROP, skips=_above_one("n")),
    "best_of": FieldRule(OnPrefill.DROP, skips=_above_one("best_of")),
    "use_beam_search": FieldRule(OnPrefill.DROP, skips=_is_true("use_beam_search")),
    # not for clients
    legs.FIELD: FieldRule(OnPrefill.SET, refused=ONLY_ROUTER),
    "ec_transfer_params": FieldRule(OnPrefill.DROP, refused="encoder disaggregation is not served here"),
}
_IN_DIALECT: dict[str, FieldRule] = {
    "stream": FieldRule(OnPrefill.SET, b"false", always=True),
    "temperature": FieldRule(OnPrefill.SET, b"0", always=True),
    **_all(DROP, "top_k", "top_p", "watermarking"),
}

TABLE: dict[Api, dict[str, FieldRule]] = {
    "completions": _COMMON | {
        "prompt": FieldRule(OnPrefill.KEEP, skips=_several_prompts),
        "suffix": KEEP,
        "prompt_embeds": FieldRule(OnPrefill.KEEP, skips=_given),
        "echo": FieldRule(OnPrefill.DROP, skips=_echo_with_logprobs),
    },
    "chat": _COMMON | {
        # tool_choice is rendered into the prompt by some templates, and decides whether tools are
        **_all(KEEP, "messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template", "chat_template_kwargs",
               "add_generation_prompt", "continue_final_message", "documents", "reasoning_effort", "include_reasoning",
               "media_io_kwargs", "mm_processor_kwargs"),
        "max_completion_tokens": FieldRule(OnPrefill.SET, b"1"),
        "echo": FieldRule(OnPrefill.DROP, skips=_is_true("echo")),  # asks the engine for prompt logprobs
        "return_prompt_text": DROP,
    },
    "messages": _IN_DIALECT | {
        "max_tokens": FieldRule(OnPrefill.SET, b"1", always=True),
        "stop_sequences": DROP,
    },
    "responses": _IN_DIALECT | {
        "max_output_tokens": FieldRule(OnPrefill.SET, b"1", always=True),
        "store": FieldRule(OnPrefill.SET, b"false", always=True),
        **_all(DROP, "enable_response_messages", "frequency_penalty", "ignore_eos", "include", "include_stop_str_in_output",
               "logit_bias", "min_p", "presence_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids",
               "structured_outputs", "top_logprobs"),
        "tools": FieldRule(OnPrefill.KEEP, skips=_run_by_the_engine),
        "truncation": FieldRule(OnPrefill.KEEP, skips=_cut_to_room),
    },
}

FORCED: dict[Api, dict[str, Raw]] = {
    api: {name: Raw(rule.value) for name, rule in table.items() if rule.leg is OnPrefill.SET and rule.always}
    for api, table in TABLE.items()
}
