from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from xpyd_sidecar.router.api import paths
from xpyd_sidecar.router.api.fields import DIALECTS
from xpyd_sidecar.router.api.paths import BodyKind, RouteKind

_VERBS = {"get", "post", "put", "delete", "patch", "head", "options", "websocket", "api_route", "add_api_route", "mount",
          "add_route", "add_websocket_route", "Mount", "Route", "APIRoute", "WebSocketRoute",
          "RouteConfig"}
_HERE = {"/static": "files of the documentation page, part of /docs"}
_OTHER_PROGRAMS = {"dp_supervisor.py", "preload.py"}
"""They listen on ports of their own."""


def _source(package: str) -> Path:
    """Where a package is, without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _registered(folder: Path) -> Iterator[tuple[str, str]]:
    """(path, file) of every route that the source registers."""
    for file in sorted(folder.rglob("*.py")):
        if file.name in _OTHER_PROGRAMS:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "path"), None)
            if (name in _VERBS and isinstance(given, ast.Constant) and isinstance(given.value, str)
                    and given.value.startswith("/")):
                yield given.value, file.name


def test_every_path_of_the_installed_vllm_is_in_the_table() -> None:
    found = dict(_registered(_source("vllm") / "entrypoints"))
    sagemaker = _source("model_hosting_container_standards") / "sagemaker"
    found |= dict(_registered(sagemaker))
    assert len(found) > 60, "the way vLLM registers its paths has changed: this test sees too little"
    assert {"/v1/completions", "/v1/realtime", "/metrics", "/v1/responses/{response_id}"} <= set(found)
    lost = {path: file for path, file in found.items() if paths.find(path) is None and path not in _HERE}
    assert not lost, "paths that router/api/paths.py does not know"


def test_every_row_of_the_table_is_a_path_of_vllm_or_the_routers_own() -> None:
    found = set(dict(_registered(_source("vllm") / "entrypoints")))
    found |= set(dict(_registered(_source("model_hosting_container_standards") / "sagemaker")))
    shapes = {"/".join("{}" if part.startswith("{") else part for part in path.split("/")) for path in found}
    fastapi = {"/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"}
    for route in paths.TABLE:
        shape = "/".join("{}" if part.startswith("{") else part for part in route.path.split("/"))
        assert shape in shapes or route.way is RouteKind.OWN or route.path in fastapi, route.path


def test_rows_are_whole() -> None:
    assert len({route.path for route in paths.TABLE}) == len(paths.TABLE)
    for route in paths.TABLE:
        assert route.methods
        assert (route.api in {"completions", "chat"}) == (route.way is RouteKind.DISAGGREGATED)
        assert route.api not in DIALECTS or (route.way, route.body) == (RouteKind.PASSED, BodyKind.JSON)
        assert bool(route.reason) == (route.way is RouteKind.REFUSED)
        assert route.way is RouteKind.PASSED or route.body is BodyKind.NONE


@pytest.mark.parametrize(("path", "row"), [
    ("/v1/completions", "/v1/completions"), ("/v1/models/a/b", "/v1/models/{model}"), ("/v1/models/", None),
    ("/v1/responses/r1", "/v1/responses/{id}"), ("/v1/responses/r1/cancel", "/v1/responses/{id}/cancel"),
    ("/v1/responses/r1/else", None), ("/v1/responses/", None), ("/adapters/x", "/adapters/{name}"),
    ("/adapters/x/y", None), ("/v1/completions/", None), ("", None), ("*", None), ("//v1/models", None),
])
def test_find(path: str, row: str | None) -> None:
    found = paths.find(path)
    assert (found.path if found else None) == row
