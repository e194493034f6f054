"""The table of request fields: what happens to each of them on the way to prefill.

Belongs here: for every field of /v1/completions and /v1/chat/completions, what the prefill leg does with it and whether it
keeps the request from being split. Does not belong here: checks that the engine makes anyway.

Theory: a prefill leg computes the KV of the prompt and one token that nobody sees. So
  * what changes the tokens of the PROMPT must be equal on both legs (KEEP);
  * what shapes the output alone is dropped (DROP) or made cheapest (SET): it would cost time, or contradict one token;
  * what needs more of the prompt than its KV (prompt_logprobs), or several sequences (n, lists of prompts), is served by
    decode alone: the leg to prefill is skipped;
  * what only the router may say (kv_transfer_params) is refused.
A field that is not in the table is kept: the engine ignores it, or it is newer than this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Literal

import msgspec
from msgspec import Raw

from xpyd_sidecar.contract import legs
from xpyd_sidecar.router.api.lax import is_true

Api = Literal["completions", "chat"]


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


KEEP = FieldRule(OnPrefill.KEEP)
DROP = FieldRule(OnPrefill.DROP)
ONLY_ROUTER = "it is set by the router"

_COMMON: dict[str, FieldRule] = {
    # what the prompt's tokens and their KV depend on
    "model": KEEP,
    "add_special_tokens": KEEP,
    # -1 cuts to what the context leaves beside max_tokens, which differs between the legs.
    "truncate_prompt_tokens": FieldRule(OnPrefill.KEEP, skips=_negative("truncate_prompt_tokens")),
    "truncation_side": KEEP,
    "cache_salt": KEEP,
    "response_format": KEEP,  # chat templates can show it to the model; FIM and plain prompts do not care
    # whose request it is and when it runs
    "user": KEEP,
    "priority": KEEP,
    "session_id": KEEP,
    "vllm_xargs": KEEP,  # custom extensions may read it on either side
    "request_id": DROP,  # X-Request-Id says it
    # one token, not streamed
    "max_tokens": FieldRule(OnPrefill.SET, b"1", always=True),
    "stream": FieldRule(OnPrefill.SET, b"false", always=True),
    "stream_options": DROP,
    "stream_interval": DROP,
    "min_tokens": DROP,
    "ignore_eos": DROP,
    "stop": DROP,
    "stop_token_ids": DROP,
    "include_stop_str_in_output": DROP,
    # how tokens are chosen: the one token is thrown away, so the cheapest way is right
    "temperature": FieldRule(OnPrefill.SET, b"0", always=True),
    "top_p": DROP,
    "top_k": DROP,
    "min_p": DROP,
    "seed": DROP,
    "frequency_penalty": DROP,
    "presence_penalty": DROP,
    "repetition_penalty": DROP,
    "length_penalty": DROP,
    "logit_bias": DROP,
    "allowed_token_ids": DROP,
    "bad_words": DROP,
    "watermarking": DROP,
    "structured_outputs": DROP,
    "repetition_detection": DROP,
    "thinking_token_budget": DROP,
    # what the answer shows
    "top_logprobs": DROP,
    "logprobs": DROP,
    "logprob_token_ids": DROP,
    "skip_special_tokens": DROP,
    "spaces_between_special_tokens": DROP,
    "return_tokens_as_token_ids": DROP,
    "return_weight_versions": DROP,  # since vLLM 0.33
    "return_token_ids": DROP,
    "return_token_offsets": DROP,
    "mm_payload": DROP,
    "return_mm_kwargs": DROP,
    # needs the logits, or the experts, of every prompt token where the answer is made
    "prompt_logprobs": FieldRule(OnPrefill.DROP, skips=_given),
    "routed_experts_prompt_start": FieldRule(OnPrefill.DROP, skips=_given),
    # several sequences share one prompt
    "n": FieldRule(OnPrefill.DROP, skips=_above_one("n")),
    "best_of": FieldRule(OnPrefill.DROP, skips=_above_one("best_of")),
    "use_beam_search": FieldRule(OnPrefill.DROP, skips=_is_true("use_beam_search")),
    # not for clients
    legs.FIELD: FieldRule(OnPrefill.SET, refused=ONLY_ROUTER),
    "ec_transfer_params": FieldRule(OnPrefill.DROP, refused="encoder disaggregation is not served here"),
}

TABLE: dict[Api, dict[str, FieldRule]] = {
    "completions": _COMMON | {
        "prompt": FieldRule(OnPrefill.KEEP, skips=_several_prompts),
        "suffix": KEEP,
        "prompt_embeds": FieldRule(OnPrefill.KEEP, skips=_given),
        "echo": FieldRule(OnPrefill.DROP, skips=_echo_with_logprobs),
    },
    "chat": _COMMON | {
        "messages": KEEP,
        "tools": KEEP,
        "tool_choice": KEEP,  # rendered into the prompt by some templates, and decides whether tools are
        "parallel_tool_calls": KEEP,
        "chat_template": KEEP,
        "chat_template_kwargs": KEEP,
        "add_generation_prompt": KEEP,
        "continue_final_message": KEEP,
        "documents": KEEP,
        "reasoning_effort": KEEP,
        "include_reasoning": KEEP,
        "media_io_kwargs": KEEP,
        "mm_processor_kwargs": KEEP,
        "max_completion_tokens": FieldRule(OnPrefill.SET, b"1"),
        "echo": FieldRule(OnPrefill.DROP, skips=_is_true("echo")),  # asks the engine for prompt logprobs
        "return_prompt_text": DROP,
    },
}

FORCED: dict[Api, dict[str, Raw]] = {
    api: {name: Raw(rule.value) for name, rule in table.items() if rule.leg is OnPrefill.SET and rule.always}
    for api, table in TABLE.items()
}
