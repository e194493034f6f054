"""Routers that a command asks: one of a service of this host, or one by its URL; each answer within a deadline."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import aiohttp

from xpyd_operator.cli.choose import choose
from xpyd_operator.errors import LocalError, NotFound, XpydError
from xpyd_operator.local import store
from xpyd_operator.local.paths import ServiceFolder
from xpyd_operator.local.router import LocalRouter
from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.ids import join_host_port
from xpyd_sidecar.process.whole_answer import read_whole

TIMEOUT_S = 10.0
TOKEN = "XPYD_ADMIN_TOKEN"  # noqa: S105 (the name of a variable)
ANSWER_MAX = 16 << 20
"""Bytes of a router's answer."""
WHERE = ("WHERE is a service of this host, or the URL of a router (in a cluster: kubectl port-forward svc/NAME-members "
         f"10002), whose admin token is read from the variable {TOKEN}.")


def router_of(where: str | None) -> tuple[str, str]:
    """URL and admin token. ``where``: a service of this host, a URL, or None: the one service of this host.

    Raises:
        XpydError: there is none, or no token.
    """
    if where is None or "://" not in where:
        return local_router(choose(where))
    token = os.environ.get(TOKEN, "")
    if not token:
        raise XpydError(f"{TOKEN} is not set: python -m xpyd_sidecar.admin_token KEYFILE makes it of a service's key")
    return where.rstrip("/"), token


def local_router(folder: ServiceFolder) -> tuple[str, str]:
    """The same of a service of this host.

    Raises:
        LocalError: no router of it runs here, or its key cannot be read.
    """
    settings = store.load_settings(folder)
    port = LocalRouter(folder, settings).admin_port()
    if port is None:
        raise LocalError(f"no router of {folder.service} runs on this host")
    try:
        token = keys.admin_token(keys.read(folder.key))
    except (OSError, ValueError) as error:
        raise LocalError(f"the key of {folder.service}: {error}") from None
    return f"http://{join_host_port(settings.host, port)}", token


async def read_of(url: str, token: str, path: str, headers: Mapping[str, str] | None = None) -> bytes:
    """What a router answers.

    Raises:
        NotFound: it knows of no such thing.
        XpydError: it cannot be asked, or answers with another status than 200.
    """
    shown = {"Authorization": f"Bearer {token}", **(headers or {})}
    try:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(url + path, headers=shown, allow_redirects=False) as answer,
        ):
            status, body = answer.status, await read_whole(answer.content, ANSWER_MAX)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise XpydError(f"{url}{path}: {str(error) or type(error).__name__}") from None
    if status == 404:
        raise NotFound(f"{url}: {_words(body)}")
    if status != 200:
        raise XpydError(f"{url}{path}: {status} {_words(body)}")
    return body


def _words(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
