"""Instances of several pods under a quota: as many are made whole as it has room for."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from kube_documents import pod
from memory_world import MemoryWorld

from xpyd_operator.kube.client.api import ApiError

USED_UP = ApiError(403, "Forbidden", "exceeded quota: gpus")
READY = pod(0)["status"] | {"podIP": ""}


def decode(replicas: int, pods: int) -> dict[str, Any]:
    each = {"tensor": pods, "pods": pods, "device": "none"}
    return {"prefill": {"replicas": 0, "resources": {}}, "decode": {"replicas": replicas, "parallelism": each}}


@pytest.mark.parametrize(("replicas", "fit", "pods", "more"), [(3, 2, 2, 0), (4, 2, 4, 1), (8, 4, 2, 0), (2, 0, 4, 3)])
async def test_as_many_groups_are_made_whole_as_the_quota_has_room_for(
    replicas: int, fit: int, pods: int, more: int
) -> None:
    """The followers of all, which are made first, would use it up, so that no leader fits."""
    async with aiohttp.ClientSession() as session:
        world = MemoryWorld(session)
        world.api.clock = lambda: world.now
        room = fit * pods + more

        def there() -> set[str]:
            return world.named("Pod")

        world.api.fault = lambda verb, kind, name: (
            USED_UP if (verb, kind) == ("create", "Pod") and len(there()) >= room else None)
        world.write(**decode(replicas, pods))
        for _ in range(90):
            world.now += 20
            await world.round()
            world.api.run_pods(world.cache, READY, lambda body: body["metadata"]["name"].endswith("-0"))
        leaders = [name for name in there() if name.endswith("-0")]
        assert len(leaders) == fit, there()
        assert all(f"{name[:-1]}{index}" in there() for name in leaders for index in range(pods))
