"""What a service that is gone leaves behind, since it has no owner: deleted once nothing is left that needs it.

    pods or a Deployment of that name are left    all of it stays
    nothing is left but what has no owner         it goes, and what fetches ahead (``prefetch``) at once

Each is deleted as the very version that was seen, so that a service of the same name that takes it over at that moment
keeps it.
"""

from __future__ import annotations

import logging

from xpyd_operator.kube.client.api import Api, ApiError
from xpyd_operator.kube.client.cache import KINDS, OWNER_KIND, POLLED, Entry, WatchCache
from xpyd_operator.kube.client.work import all_of
from xpyd_operator.kube.objects.ownership import is_unowned
from xpyd_operator.render.dependencies import keepers

logger = logging.getLogger(__name__)
_WISHED = frozenset({OWNER_KIND, "Pod", "Deployment"})
"""Without an owner, these are somebody's wish (``kubectl delete --cascade=orphan``)."""


def left_behind(cache: WatchCache, namespace: str, service: str) -> list[Entry]:
    """What a service of this name left behind; empty while there is one."""
    if cache.get(OWNER_KIND, namespace, service) is not None:
        return []
    kinds = [kind for kind in (*KINDS, *POLLED) if kind not in _WISHED]
    return [entry for kind in kinds for entry in cache.of_service(kind, namespace, service)
            if is_unowned(entry.body["metadata"], service)]


def may_go(cache: WatchCache, namespace: str, service: str) -> list[Entry]:
    """Of that, what nothing needs or uses any more, and whose deletion has not begun."""
    return [entry for entry in left_behind(cache, namespace, service)
            if not entry.deleting and not any(cache.of_service(kind, namespace, service) for kind in keepers(entry.kind))]


async def sweep(api: Api, cache: WatchCache, namespace: str, service: str) -> None:
    """Delete what may go.

    Raises:
        ApiError: something could not be deleted; everything else was.
        XpydError: several things could not.
    """

    async def delete(entry: Entry) -> None:
        logger.info("delete %s %s/%s: no service and no pod of %s is left", entry.kind, namespace, entry.name, service)
        try:
            await api.delete(entry.kind, namespace, entry.name, entry.uid, version=str(entry.version))
        except ApiError as error:
            if error.missing:
                cache.missing(entry)
            elif not error.conflict:  # it was changed, or is another one: the watch brings it
                raise
        else:
            cache.missing(entry)

    await all_of(delete(entry) for entry in may_go(cache, namespace, service))

