"""What an audit asks of engines, and how far two of their answers are from each other.

Belongs here: bodies and answers of one token with its log probabilities. Does not belong here: which requests are audited
and when (``serving.audits``).

Theory: a prompt's next token has one distribution, whoever has computed the prompt's KV. An audit has the prompt computed
twice, with prefix caches out of the way (each computing has a ``cache_salt`` of its own): on prefill, from where decode
loads it as it loads any, and on decode alone. Float arithmetic in another order changes log probabilities a little (1e-5 in
float32, some hundredths in bfloat16); KV that is wrong, cut or another prompt's changes them by more, mostly by far.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from xpyd_sidecar.contract import legs
from xpyd_sidecar.router.api import bodies
from xpyd_sidecar.router.api.failover_modes import has_parts

TOP: Final = 5
"""Tokens whose log probabilities are asked for."""
NEAR_TIE: Final = 0.1
"""A larger difference is more than arithmetic in another order."""
MAX_BYTES: Final = 256 << 10
"""Of the fields of a request that is audited: it is kept until its turn."""
_encode = msgspec.json.Encoder().encode
_BY_ID: Final[dict[str, Any]] = {"return_tokens_as_token_ids": True}
SHOWN: Final[dict[str, dict[str, Any]]] = {
    "completions": {"logprobs": TOP} | _BY_ID, "chat": {"logprobs": True, "top_logprobs": TOP} | _BY_ID,
}
"""What asks for log probabilities. Prefill is not asked: its answer is not compared, and it would compile for it."""


class TokenProbabilities(msgspec.Struct, frozen=True):
    """What an engine says of the first token."""

    token: str
    top: Mapping[str, float]
    """Log probabilities of the likeliest tokens, the chosen one among them."""


def unfit(request: bodies.GenerationRequest) -> str:
    """Why a request is not audited, as a metric says it; empty where it may be."""
    if request.prompt_ids is not None or has_parts(request.prompt):
        return "unfit"
    return "large" if sum(len(raw) for raw in request.fields.values()) > MAX_BYTES else ""


def body_of(fields: Mapping[str, Any], salt: str, leg: legs.Leg | None) -> bytes:
    """One of the three. Two with the same salt have the same KV. ``fields``: for one token, and what is ``SHOWN``."""
    return _encode({**fields, "cache_salt": salt} | ({} if leg is None else {legs.FIELD: legs.encode(leg)}))


class _Top(msgspec.Struct):
    token: str
    logprob: float


class _Position(_Top):
    top_logprobs: list[_Top]


class _Shown(msgspec.Struct):
    """Of a completion (the three lists) or of a chat (``content``)."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    content: list[_Position] | None = None


class _Choice(msgspec.Struct):
    logprobs: _Shown | None = None


class _FirstTokenAnswer(msgspec.Struct):
    choices: list[_Choice]


_decode = msgspec.json.Decoder(_FirstTokenAnswer).decode


def odds_of(answer: bytes) -> TokenProbabilities | None:
    """What an answer says of the first token; None where it says nothing of it."""
    try:
        choices = _decode(answer).choices
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    shown = choices[0].logprobs if choices else None
    if shown is None:
        return None
    if shown.content:
        first = shown.content[0]
        top = {one.token: one.logprob for one in first.top_logprobs}
        return TokenProbabilities(first.token, top | {first.token: first.logprob})
    if not (shown.tokens and shown.token_logprobs and shown.top_logprobs) or shown.token_logprobs[0] is None:
        return None
    token = shown.tokens[0]
    return TokenProbabilities(token, {**(shown.top_logprobs[0] or {}), token: shown.token_logprobs[0]})


def difference(one: TokenProbabilities, other: TokenProbabilities) -> float:
    """The largest difference of the log probability of a token that either has chosen.

    One that is not among the other's likeliest is less likely there than all of them: the difference is at least that.
    """
    return max(_apart(one.token, one, other), _apart(other.token, one, other))


def _apart(token: str, one: TokenProbabilities, other: TokenProbabilities) -> float:
    if token in one.top and token in other.top:
        return abs(one.top[token] - other.top[token])
    has, lacks = (one, other) if token in one.top else (other, one)
    return max(0.0, has.top[token] - min(lacks.top.values()))

