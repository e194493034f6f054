"""What documents could say once and cannot any more: each setting, word and version with what to write instead.

A setting that is gone is an unknown field with advice; a word that is gone is refused with the line that takes its place.
The walk over a document asks here, so ``check``, ``up`` and the operator say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_ROLES: Final = ("spec.prefill", "spec.decode")
_EXECUTOR: Final = "leave it out; an instance runs its workers in processes of its pods"
_PLACEMENT: Final = ("write spec.engine.topology, for both roles; for nodes alone template.spec.affinity.podAntiAffinity "
                     "with a labelSelector that xpyd.dev/instance exists, and mismatchLabelKeys: [xpyd.dev/instance]")
_RATIO: Final = "leave it out; scaling.min and scaling.max of each role say how few and how many there may be"
SETTINGS: Final[Mapping[str, str]] = {
    "spec.model.cache.size": "write resources.limits with ephemeral-storage, which bounds all that a pod writes",
    "spec.engine.imagePullPolicy": "write it in spec.template.spec.containers, for the container main",
    "spec.engine.dpStepSync": "leave it out; data-parallel ranks agree through shared memory on one host, else by RPC",
    "spec.engine.queue": "leave it out; calls between pods go by xpyd's queue, which asks for the service's key, others "
                         "by vLLM's",
    "spec.kv.keep": "write spec.kv.memory, of which half is for copies that prefill keeps",
    "spec.kv.bufferSize": "write spec.kv.memory, of which half is for KV that decode has no place for yet",
    "spec.kv.hostPool": "write spec.kv.memory, which is all the host memory of a rank for KV on its way",
    "spec.kv.checksum": "leave it out; decode always checks a sum of every block that comes",
    "spec.kv.network": "write spec.kv.encryption: network in place of network: trusted",
    "spec.kv.onLoadFailure": "leave it out; decode computes a prompt itself whose KV cannot be loaded",
    "spec.kv.loadLimit": "leave it out; decode waits 10 min for the KV of a prompt while prefill makes progress, and "
                         "never longer than spec.router.requestTimeout",
    "spec.kv.offload.store.module": "write it before the name in spec.kv.offload.store.connector: mine.store.Mine",
    "spec.limits.minRatio": _RATIO,
    "spec.limits.maxRatio": _RATIO,
    "spec.networkPolicy.allowOpenPods": "leave it out; instances of several pods always have a NetworkPolicy of the "
                                        "service, to which yours add",
    "spec.planner.scaleDownDelay": "leave it out; how long fewer must have been enough follows from "
                                   "spec.planner.lateCost, cold starts and what came of earlier removals",
    "spec.router.affinity": "leave it out; the policy cost finds what belongs together: by prompt_cache_key, session_id, "
                            "the header X-Session-Id, metadata.user_id or user, else by the first user message",
    "spec.router.bodyBudget": "write spec.router.resources.limits.memory: what it leaves beside 512 MiB is for what a "
                              "router holds for its clients",
    "spec.router.compat": "leave it out; engines of the service need nothing instead, and engines that only send the "
                          "older heartbeat (P2P and MoRIIO connectors) are served no more",
    "spec.router.dashboard": "leave it out; the page shows nothing without the admin token, and is at the admin port alone",
    "spec.router.gateway.pool.port": "leave it out; the picker's Service has port 9002, which may lead to any other one",
    "spec.router.heartbeat": "leave it out; instances beat every 3 s, and who missed three beats is probed",
    "spec.router.maxSidecars": "write spec.router.replicas, which with placement sidecar is the most decode pods that "
                               "route",
    "spec.router.pairTimeout": "leave it out; decode waits a minute for prefill to announce a request, and never longer "
                               "than spec.router.requestTimeout",
    "spec.router.policyOptions": "leave it out; no policy has settings, and least_loaded compares two instances",
    "spec.router.queue": "leave it out; a quarter as many as spec.router.maxInFlight wait for a place, for half a minute "
                         "or spec.router.hold where that is less, and what an instance can take is found from its engine",
    "spec.router.retryBudget": "leave it out; retries are a fifth of recent requests at most, beyond a small floor",
    "spec.router.skipPrefill.cachedShare": "write spec.router.skipPrefill.belowTokens, the tokens that decode may compute "
                                           "itself of a prompt of which it holds all else, such as 1024",
    "spec.router.skipPrefill.restTokens": "write spec.router.skipPrefill.belowTokens, which is also for prompts that "
                                          "decode holds but for so many tokens",
    "spec.router.workers": "leave it out; a router is one process, and who needs more writes more routers: "
                           "spec.router.replicas",
    **{f"{role}.parallelism.executor": _EXECUTOR for role in _ROLES},
    **{f"{role}.placement": _PLACEMENT for role in _ROLES},
}
"""Path of the field → what to write instead, or that nothing is needed."""

WORDS: Final[Mapping[str, Mapping[str, str]]] = {
    "apiVersion": {"xpyd.dev/v1alpha1": "xpyd.dev/v1beta1"},
    "spec.router.policy": {"prefix_aware": "cost"},
    "spec.router.placement": {"Sidecar": "sidecar", "Deployment": "deployment"},
    "spec.planner.mode": {"Off": "disabled", "Observe": "observe", "Auto": "auto"},
}
"""Path of the field → word that is gone → the one to write."""


def replacement(path: str, word: Any) -> str:
    """The line to write in place of the one at ``path`` that says ``word``; empty where that word never was one."""
    instead = WORDS.get(path, {}).get(word) if isinstance(word, str) else None
    return f"{path.rpartition('.')[2]}: {instead}" if instead is not None else ""
