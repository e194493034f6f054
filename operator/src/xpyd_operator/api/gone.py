"""What documents could say once and cannot any more: each setting, word and version with what to write instead.

A setting that is gone is an unknown field with advice; a word that is gone is refused with the line that takes its place.
The walk over a document asks here, so ``check``, ``up`` and the operator say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

SETTINGS: Final[Mapping[str, str]] = {
    "spec.planner.scaleDownDelay": "leave it out; how long fewer must have been enough follows from spec.planner.lateCost, "
                                   "cold starts and what came of earlier removals",
    "spec.router.affinity": "leave it out; the policy cost finds what belongs together: by prompt_cache_key, session_id, "
                            "the header X-Session-Id, metadata.user_id or user, else by the first user message",
    "spec.router.compat": "leave it out; engines of the service need nothing instead, and engines that only send the older "
                          "heartbeat (P2P and MoRIIO connectors) are served no more",
    "spec.router.policyOptions.blocks": "leave it out; the policy cost, in place of prefix_aware, has no settings",
    "spec.router.policyOptions.bound": "leave it out; the policy cost, in place of prefix_aware, has no settings",
    "spec.router.skipPrefill.cachedShare": "write spec.router.skipPrefill.restTokens, the tokens that decode may compute "
                                           "itself of a prompt of which it holds all else, such as 1024",
    "spec.router.workers": "leave it out; a router is one process, and who needs more writes more routers: "
                           "spec.router.replicas with placement: deployment, else spec.router.maxSidecars",
}
"""Path of the field → what to write instead, or that nothing is needed."""

WORDS: Final[Mapping[str, Mapping[str, str]]] = {
    "apiVersion": {"xpyd.dev/v1alpha1": "xpyd.dev/v1beta1"},
    "spec.router.policy": {"prefix_aware": "cost"},
    "spec.router.placement": {"Sidecar": "sidecar", "Deployment": "deployment"},
    "spec.planner.mode": {"Off": "disabled", "Observe": "observe", "Auto": "auto"},
    "spec.engine.dpStepSync": {"off": "disabled"},
    "spec.kv.checksum": {"xxh3": "enabled", "none": "disabled"},
}
"""Path of the field → word that is gone → the one to write."""


def replacement(path: str, word: Any) -> str:
    """The line to write in place of the one at ``path`` that says ``word``; empty where that word never was one."""
    instead = WORDS.get(path, {}).get(word) if isinstance(word, str) else None
    return f"{path.rpartition('.')[2]}: {instead}" if instead is not None else ""
