"""Writing one object as a document wants it, and what server-side apply alone does not do."""

from __future__ import annotations

import logging
from typing import Any, Final

from xpyd_operator.errors import NotYet
from xpyd_operator.kube.client.api import Api, ApiError
from xpyd_operator.kube.client.cache import WatchCache
from xpyd_operator.render.compare import differs
from xpyd_operator.render.objects import count_of, initial_object

logger = logging.getLogger(__name__)
Body = dict[str, Any]
INVALID: Final = 422


async def apply(api: Api, cache: WatchCache, wanted: Body, why: str, live: Body | None = None) -> None:
    """Write an object, and put what the API server answers into the cache.

    Args:
        api: of the cluster.
        cache: is told of the answer.
        wanted: the object as it should be.
        why: for the log.
        live: as it is; None: it is missing.

    Raises:
        ApiError: it could not be written.
        NotYet: the count of a Deployment that is left to others has changed in between.
    """
    if live is not None and initial_object(wanted) is not wanted:
        await _leave_count(api, live)
    kind, namespace, name = wanted["kind"], wanted["metadata"]["namespace"], wanted["metadata"]["name"]
    logger.info("apply %s %s/%s: %s", kind, namespace, name, why)
    try:
        answer = await api.apply(kind, namespace, wanted)
    except ApiError as error:
        if error.status != INVALID:
            raise
        there = cache.get(kind, namespace, name)
        if there is None:
            raise
        answer = there.body
    # An apply keeps the items that others put into a list with keys (a port of a Service), and is refused where such
    # an item clashes with ours. A merge patch replaces the list.
    if differs(wanted, answer):
        answer = await api.patch(kind, namespace, name, wanted)
    cache.on_written(kind, answer)


async def _leave_count(api: Api, live: Body) -> None:
    """So that a Deployment keeps its count when we say nothing of it any more: a field that only we had would go back
    to its default.
    """
    try:
        await api.apply(live["kind"], live["metadata"]["namespace"], count_of(live), shared=True)
    except ApiError as error:
        if not (error.conflict or error.missing):
            raise
        raise NotYet(f"the count of Deployment {live['metadata']['name']} has just changed") from None
