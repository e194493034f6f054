"""Every path that vLLM 0.32 serves, and what the router does with it.

    DISAGGREGATED   prefill and decode share the work
    PASSED          one decode instance gives the whole answer, which passes through, whatever it is; prompts of some are
                    computed by prefill (dialects)
    OWN             the router answers itself
    REFUSED         404 with a reason: it means one engine alone, or needs what one engine alone keeps. After a 5xx clients
                    ask again, and would get the same answer for ever

A test holds the table against the paths that the installed vLLM registers, so that none is lost.

Generation in dialects of its own (``/v1/messages``, ``/v1/responses``): the answer passes through, whatever it is, since
the engine alone knows its dialect. But the prompt is a prompt, which prefill computes as it does those of ``fields``. So

    prefill   the same prompt, one token that nobody sees     what shapes the output alone is dropped, or made cheapest
    decode    what the client sent, and where the KV is
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Final

import msgspec
from msgspec import Raw

from xpyd_sidecar.contract import legs
from xpyd_sidecar.router.api.fields import Api, is_true

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


def in_dialect(path: str, fields: dict[str, Raw]) -> DialectRequest | None:
    """What was asked of a path; None where the path is no dialect's."""
    dialect = DIALECTS.get(path)
    return None if dialect is None else DialectRequest(dialect, fields, dialect.alone(fields))


class RouteKind(Enum):
    """What happens to a request."""

    DISAGGREGATED = "disaggregated"
    PASSED = "passed"
    OWN = "own"
    REFUSED = "refused"


class BodyKind(Enum):
    """What a passed request carries."""

    NONE = "none"
    JSON = "json"
    """Taken whole, since fields in it may have to be refused."""
    FORM = "form"
    """Handed on while it comes: an audio file may be large."""


class Route(msgspec.Struct, frozen=True):
    """One row. ``methods`` are those of the row; ``path`` may hold ``{names}`` that stand for one segment."""

    path: str
    methods: tuple[str, ...]
    way: RouteKind
    api: Api | None = None
    body: BodyKind = BodyKind.NONE
    reason: str = ""
    """Why it is refused, in words that end a sentence."""


_ADMIN = "it administers one engine, and this router stands before many: ask that engine itself"
_SWITCHES = "it changes one engine alone, and instances that serve together must stay equal: change the document"
_KEPT = "an answer is kept by the one engine that gave it, and requests go to any of them; send the whole conversation"
_SOCKET = "WebSockets are not carried"
_LOAD = "each instance has a load of its own: see xpyd_router_legs_open in /metrics"


def _passed(*paths: str, body: BodyKind = BodyKind.JSON) -> tuple[Route, ...]:
    methods = ("GET",) if body is BodyKind.NONE else ("POST",)
    return tuple(Route(path, methods, RouteKind.PASSED, body=body) for path in paths)


def _own(*paths: str, methods: tuple[str, ...] = ("GET",)) -> tuple[Route, ...]:
    return tuple(Route(path, methods, RouteKind.OWN) for path in paths)


def _refused(reason: str, *paths: str, methods: tuple[str, ...] = ("GET", "POST")) -> tuple[Route, ...]:
    return tuple(Route(path, methods, RouteKind.REFUSED, reason=reason) for path in paths)


TABLE: Final[tuple[Route, ...]] = (
    Route("/v1/completions", ("POST",), RouteKind.DISAGGREGATED, api="completions"),
    Route("/v1/chat/completions", ("POST",), RouteKind.DISAGGREGATED, api="chat"),
    # Generation in other forms.
    *_passed("/v1/responses", "/v1/messages", "/v1/chat/completions/batch", "/cohere/v2/chat", "/invocations",
             "/inference/v1/generate", "/generative_scoring", "/v1/systemone"),
    # Tokens and templates.
    *_passed("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/completions/render",
             "/v1/chat/completions/render", "/v1/responses/render", "/v1/messages/render", "/cohere/v2/chat/render",
             "/v1/completions/derender", "/v1/chat/completions/derender"),
    # Pooling.
    *_passed("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank",
             "/v2/rerank"),
    *_passed("/v1/audio/transcriptions", "/v1/audio/translations", body=BodyKind.FORM),
    *_passed("/version", "/tokenizer_info", body=BodyKind.NONE),
    *_own("/health", "/ready", "/metrics", "/fleet", "/v1/models", "/v1/models/{model}"),
    *_own("/ping", methods=("GET", "POST")),
    *_refused(_KEPT, "/v1/responses/{id}", "/v1/responses/{id}/cancel"),
    *_refused(_SOCKET, "/v1/realtime"),
    *_refused(_LOAD, "/load"),
    *_refused(_SWITCHES, "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/adapters/{name}",
              "/update_weights", "/update_weight_version", "/init_weight_transfer_engine",
              "/shutdown_weight_transfer_engine", "/start_weight_update", "/start_draft_weight_update",
              "/finish_weight_update", "/scale_elastic_ep", "/is_scaling_elastic_ep",
              methods=("GET", "POST", "DELETE")),
    *_refused(_ADMIN, "/abort_requests", "/inference/v1/abort_requests", "/pause", "/resume", "/is_paused", "/sleep",
              "/wake_up", "/is_sleeping", "/release_kv_cache_memory", "/reset_prefix_cache", "/reset_mm_cache",
              "/reset_encoder_cache", "/collective_rpc", "/start_profile", "/stop_profile", "/server_info",
              "/weight_info", "/weight_checker", "/get_world_size", "/kv_event_sources", "/fault_tolerance/apply",
              "/fault_tolerance/status", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"),
)


def api_of(route: Route) -> str:
    """What metrics and logs call the API of a path: ``completions``, ``chat``, a dialect's name; empty for other paths."""
    dialect = DIALECTS.get(route.path)
    return route.api or ("" if dialect is None else dialect.name)


_EXACT: Final = {route.path: route for route in TABLE if "{" not in route.path}
_PATTERNS: Final = tuple((tuple(route.path.split("/")), route) for route in TABLE if "{" in route.path)
STREAMED: Final = frozenset(route.path for route in TABLE if route.body is BodyKind.FORM)
"""Paths whose bodies are handed on while they come."""


def find(path: str) -> Route | None:
    """The row of a path; None: nothing is there. A model's name may hold slashes, other ``{names}`` may not."""
    route = _EXACT.get(path)
    if route is not None:
        return route
    given = path.split("/")
    for pattern, route in _PATTERNS:
        if len(given) < len(pattern) or (len(given) > len(pattern) and pattern[-1] != "{model}"):
            continue
        if all(wanted == part or (wanted[:1] == "{" and part) for wanted, part in zip(pattern, given, strict=False)):
            return route
    return None
