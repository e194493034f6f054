"""Every path that vLLM 0.32 serves, and what the router does with it.

    DISAGGREGATED   prefill and decode share the work
    PASSED          one decode instance gives the whole answer, which passes through, whatever it is; prompts of some are
                    computed by prefill (dialects)
    OWN             the router answers itself
    REFUSED         404 with a reason: it means one engine alone, or needs what one engine alone keeps. After a 5xx clients
                    ask again, and would get the same answer for ever

A test holds the table against the paths that the installed vLLM registers, so that none is lost.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

from xpyd_sidecar.router.api.fields import Api


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
    """What metrics and logs call it, where it generates."""
    body: BodyKind = BodyKind.NONE
    reason: str = ""
    """Why it is refused, in words that end a sentence."""

    @property
    def generates(self) -> bool:
        """Whether a model writes the answer."""
        return self.api is not None or self.path in GENERATING

    @property
    def served(self) -> bool:
        """Whether engines answer it."""
        return self.way is RouteKind.DISAGGREGATED or self.way is RouteKind.PASSED


GENERATING: Final = ("/v1/chat/completions/batch", "/cohere/v2/chat", "/invocations", "/inference/v1/generate",
                     "/v1/systemone", "/v1/audio/transcriptions", "/v1/audio/translations")
"""Paths without an API of the router's whose answers a model writes; what they ask in detail only the engine knows."""
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
    Route("/v1/messages", ("POST",), RouteKind.PASSED, api="messages", body=BodyKind.JSON),
    Route("/v1/responses", ("POST",), RouteKind.PASSED, api="responses", body=BodyKind.JSON),
    *_passed("/v1/chat/completions/batch", "/cohere/v2/chat", "/invocations",
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
    *_own("/health", "/ready", "/metrics", "/v1/models", "/v1/models/{model}"),
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


_EXACT: Final = {route.path: route for route in TABLE if "{" not in route.path}
_PATTERNS: Final = tuple((tuple(route.path.split("/")), route) for route in TABLE if "{" in route.path)
PATHS: Final = {str(route.api): route.path.encode() for route in TABLE if route.way is RouteKind.DISAGGREGATED}
"""Where an API is served that prefill and decode share."""
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
