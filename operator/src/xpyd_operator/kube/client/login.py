"""The way to the API server: where it is, how it is trusted, who we are. Used by requests and by kopf alike.

Inside a cluster the service account is used, whose token file the library reads again as it is renewed; outside of one, a
kubeconfig. Tokens are never logged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec
from aiohttp import ClientHandlerType, ClientMiddlewareType, ClientRequest, ClientResponse
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from xpyd_operator import __version__
from xpyd_operator.errors import XpydError
from xpyd_operator.kube.client.api import Api, Counter

USER_AGENT = f"xpyd-operator/{__version__}"
CONNECT_S = 5.0
_config: Any = kubernetes_config  # the library's loaders have no types


class LoginError(XpydError):
    """There is no usable way to the API server; the message names the flag."""


class Login(msgspec.Struct, frozen=True):
    """What the flags say. Both empty: the service account of this pod, or else the default kubeconfig."""

    kubeconfig: str = ""
    context: str = ""

    async def configuration(self) -> Configuration:
        """Read everything anew.

        Raises:
            LoginError: a file cannot be read or says nothing useful.
        """
        configuration = Configuration()
        inside = "KUBERNETES_SERVICE_HOST" in os.environ and not self.kubeconfig and not self.context
        try:
            if inside:
                _config.load_incluster_config(client_configuration=configuration)
            else:
                await _config.load_kube_config(config_file=self.kubeconfig or None, context=self.context or None,
                                               client_configuration=configuration, persist_config=False)
        except (kubernetes_config.ConfigException, OSError) as error:
            where = "the service account" if inside else f"--kubeconfig {self.kubeconfig or '(default)'}"
            raise LoginError(f"{where}: {error}") from None
        configuration.retries = None
        return configuration

    async def api(self, counter: Counter | None, *, width: int, timeout_s: float) -> Api:
        """An Api with connections of its own.

        Raises:
            LoginError: see ``configuration``.
        """
        configuration = await self.configuration()
        return Api(session(configuration), configuration.host, counter, width=width, timeout_s=timeout_s)


def session(configuration: Configuration, middlewares: Sequence[ClientMiddlewareType] = ()) -> aiohttp.ClientSession:
    """A session that is logged in; ``middlewares`` see each request before it gets its token."""

    async def authorize(request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        token = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        if token:
            request.headers["Authorization"] = token
        return await handler(request)

    tls = RESTClientObject(configuration).ssl_context
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=tls, limit=0),
        headers={"User-Agent": USER_AGENT},
        timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_S),
        middlewares=(*middlewares, authorize),
        auto_decompress=True,
    )
