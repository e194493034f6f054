"""Generation in dialects of its own (``/v1/messages``, ``/v1/responses``): what its two legs are asked.

The answer passes through, whatever it is: the engine alone knows its dialect. But the prompt is a prompt, which prefill
computes as it does those of ``fields``. So

    prefill   the same prompt, one token that nobody sees     what shapes the output alone is dropped, or made cheapest
    decode    what the client sent, and where the KV is
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from msgspec import Raw

from xpyd_sidecar.contract import legs
from xpyd_sidecar.router.api.fields import is_true

MAX_TOOLS = 1 << 20
"""Bytes of tools that are read, since every one of them is built; decode does all of a request that has more."""
_EMPTY = Raw(b"")
_ONE, _ZERO, _FALSE = Raw(b"1"), Raw(b"0"), Raw(b"false")
_encode = msgspec.json.Encoder().encode


class Dialect(msgspec.Struct, frozen=True):
    """One API."""

    name: str
    """Of requests in metrics and logs, as ``completions`` and ``chat`` are."""
    prompt: tuple[str, ...]
    """Fields that hold most of the prompt, in the order in which it is made of them."""
    dropped: frozenset[str]
    """Fields of the client that the prefill leg does without: they shape the output, or contradict one token."""
    forced: dict[str, Raw]
    """What the prefill leg says in any case."""
    alone: Callable[[Mapping[str, Raw]], str] = lambda _: ""
    """The field for which decode must do all of a request; none where it need not."""


class _DialectTool(msgspec.Struct):
    type: str = "function"


def _many_prompts(fields: Mapping[str, Raw]) -> str:
    """Tools that the engine itself runs make several prompts of one request; and a prompt that is cut to the room which its
    answer leaves is another one on each leg.
    """
    if bytes(fields.get("truncation", _EMPTY)) not in {b"", b"null", b'"disabled"'}:
        return "truncation"
    raw = fields.get("tools", Raw(b"null"))
    if len(raw) > MAX_TOOLS:
        return "tools"
    try:
        tools = msgspec.json.decode(raw, type=list[_DialectTool] | None)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "tools"  # the engine's to refuse
    return "tools" if any(tool.type != "function" for tool in tools or ()) else ""


_SAMPLING = frozenset({"temperature", "top_k", "top_p", "watermarking"})
DIALECTS: Final[dict[str, Dialect]] = {
    "/v1/messages": Dialect(
        "messages", ("system", "tools", "messages"), _SAMPLING | {"stop_sequences"},
        {"max_tokens": _ONE, "stream": _FALSE, "temperature": _ZERO}),
    "/v1/responses": Dialect(
        "responses", ("instructions", "tools", "input"), _SAMPLING | {
            "enable_response_messages", "frequency_penalty", "ignore_eos", "include", "include_stop_str_in_output",
            "logit_bias", "min_p", "presence_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids",
            "structured_outputs", "top_logprobs"},
        {"max_output_tokens": _ONE, "store": _FALSE, "stream": _FALSE, "temperature": _ZERO}, _many_prompts),
}
"""By path. A field that is in no row is kept: it may be part of the prompt."""


class DialectRequest(msgspec.Struct, frozen=True):
    """A request, split into fields; those that make its prompt are never decoded."""

    dialect: Dialect
    fields: dict[str, Raw]
    alone: str = ""
    """The field for which decode must do all of it; empty where it may have a prefill leg."""

    @property
    def stream(self) -> bool:
        """Whether its answer is to come in events."""
        return is_true(self.fields.get("stream"))

    @property
    def prompt(self) -> Raw:
        """The most of it, as the client wrote it; empty where there is none."""
        return Raw(b"".join(self.fields.get(name, _EMPTY) for name in self.dialect.prompt))

    def prefill_body(self, leg: legs.Leg) -> bytes:
        """The prefill leg. vLLM's own word for one is there as well: its checks of a request then allow for one token."""
        kept = {name: raw for name, raw in self.fields.items() if name not in self.dialect.dropped}
        return _encode({**kept, **self.dialect.forced, legs.FIELD: {**legs.encode(leg), legs.REMOTE_DECODE: True}})

    def decode_body(self, leg: legs.Leg) -> bytes:
        """The decode leg."""
        return _encode({**self.fields, legs.FIELD: legs.encode(leg)})


def request(path: str, fields: dict[str, Raw]) -> DialectRequest | None:
    """What was asked of a path; None where the path is no dialect's."""
    dialect = DIALECTS.get(path)
    return None if dialect is None else DialectRequest(dialect, fields, dialect.alone(fields))
