"""One task per DisaggService, begun when it is first heard of and ended when it is gone."""

from __future__ import annotations

from xpyd_operator.kube.api import Api
from xpyd_operator.kube.cache import Cache
from xpyd_operator.kube.metrics import Metrics
from xpyd_operator.kube.settings import OperatorSettings


class Services:
    """``wake`` is cheap and may be called for any event of a service or of what belongs to it."""

    def __init__(self, api: Api, cache: Cache, settings: OperatorSettings, metrics: Metrics) -> None:
        self._api = api
        self._cache = cache
        self._settings = settings
        self._metrics = metrics

    def wake(self, namespace: str, name: str) -> None:
        """Something of this service may have changed."""
        raise NotImplementedError

    async def run(self) -> None:
        """Look after every service in the cache until cancelled or closed."""
        raise NotImplementedError

    async def close(self) -> None:
        """End all tasks; what was begun is finished or given up within seconds."""
        raise NotImplementedError
