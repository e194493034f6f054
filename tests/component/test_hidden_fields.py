"""Where vLLM's own requests could carry what only the router may send: a new vLLM with a new place fails here."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from vllm_places import MODULE

from xpyd_sidecar.router.api.bodies import passed_body
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.api.hidden import CONTENT, REFUSED

_PARAMS = ("kv_transfer_params", "ec_transfer_params", "vllm_xargs.")
CARRIERS = {*_PARAMS, "sampling_params.extra_args.",
            *(f"{request}.{name}" for request in ("chat_request", "completion_request") for name in _PARAMS)}
"""Places of requests (those of requests that /derender reads again are never obeyed); behind a dot any name may follow."""
ANSWERS = {f"{answer}.{name}" for answer in ("generate_response", "generate_responses") for name in REFUSED}
"""Places of answers that are read again (/derender)."""
MAKERS = {
    "openai/chat_completion/protocol.py", "openai/completion/protocol.py", "openai/responses/protocol.py",
    "scale_out/token_in_token_out/serving.py", "speech_to_text/transcription/protocol.py",
    "speech_to_text/translation/protocol.py"}
"""Files of vLLM's server that write SamplingParams.extra_args."""
MAKERS_OF = {
    "v032": {"generate/structured_decisions/strategies.py"},
    # the one writes what it makes itself; the other takes out what the request has, whose fields are refused
    "v033": {"openai/decisions/strategies.py", "scale_out/render/serving.py"}}
"""Those of one version alone."""


@pytest.fixture(scope="module")
def requests() -> list[type[BaseModel]]:
    """Every class of a request."""
    from vllm import entrypoints

    found = set()
    for module in pkgutil.walk_packages(entrypoints.__path__, entrypoints.__name__ + "."):
        if not module.name.endswith("protocol") or module.name == "vllm.entrypoints.cohere.protocol":
            continue  # the one needs a package that engines lack; its request becomes a ChatCompletionRequest
        for one in vars(importlib.import_module(module.name)).values():
            if isinstance(one, type) and issubclass(one, BaseModel) and one.__name__.endswith("Request"):
                found.add(one)
    return sorted(found, key=lambda one: (one.__module__, one.__name__))


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in typing.get_args(annotation):
        yield from _parts(inner)


def _carriers(model: type, path: str, seen: frozenset[type]) -> Iterator[str]:
    """Paths from a class on whose last name may be, or may hold, a name that is refused."""
    fields = getattr(model, "model_fields", None)
    hints = {name: field.annotation for name, field in fields.items()} if fields else typing.get_type_hints(model)
    for name, hint in hints.items():
        here = f"{path}{name}"
        if name in REFUSED:
            yield here
        if name in {"extra_args", "vllm_xargs"}:
            yield here + "."
        for part in _parts(hint):
            known = isinstance(part, type) and part.__module__.startswith("vllm.") and part not in seen
            if known and hasattr(part, "__annotations__"):
                yield from _carriers(part, here + ".", seen | {part})


def test_every_place_of_every_request_is_known_and_refused(requests: list[type[BaseModel]]) -> None:
    names = {one.__name__ for one in requests}
    assert {"CompletionRequest", "ChatCompletionRequest", "ResponsesRequest", "AnthropicMessagesRequest", "GenerateRequest",
            "TranscriptionRequest"} <= names, "this test sees too little"
    found = {path for one in requests for path in _carriers(one, "", frozenset({one}))}
    assert found == CARRIERS | ANSWERS, "refuse it (router/api/hidden.py), and name it here"
    for path in CARRIERS:
        assert path.split(".")[0] not in CONTENT
        for name in REFUSED:
            places = [*path[:-1].split("."), name] if path.endswith(".") else path.split(".")
            value: Any = {"xpyd": 1}
            for place in reversed(places):
                value = {place: value}
            with pytest.raises(HttpFault) as caught:
                passed_body("/inference/v1/generate", json.dumps(value).encode())
            assert (caught.value.code, caught.value.param) == ("refused_field", ".".join(places))


def test_nothing_else_of_the_server_writes_what_connectors_read() -> None:
    import vllm

    folder = Path(vllm.__file__).parent / "entrypoints"
    writes = re.compile(r"extra_args(?:\[[^\]]+\])?(?:: [^=\n]+)? ?=(?!=)")
    found = {str(file.relative_to(folder)) for file in folder.rglob("*.py") if writes.search(file.read_text())}
    assert found - {"llm.py"} == MAKERS | MAKERS_OF[MODULE], "which field of a request does it take them from?"


def test_the_engine_obeys_what_is_refused(requests: list[type[BaseModel]]) -> None:
    """So that the places above are no guess: each of them reaches SamplingParams.extra_args."""
    classes = {one.__name__: one for one in requests}
    params = {"do_remote_prefill": True}
    prompt = {"model": "m", "prompt": "x", "max_tokens": 1}
    for body in ({**prompt, "kv_transfer_params": params}, {**prompt, "vllm_xargs": {"kv_transfer_params": "x"}}):
        made = classes["CompletionRequest"](**body).to_sampling_params(1, {})  # type: ignore[attr-defined]
        assert "kv_transfer_params" in made.extra_args
    generate = classes["GenerateRequest"](
        token_ids=[1], sampling_params={"extra_args": {"kv_transfer_params": params}})
    assert generate.sampling_params.extra_args == {"kv_transfer_params": params}  # type: ignore[attr-defined]
