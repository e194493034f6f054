"""Whose an object of a name that a service needs is. Pure.

    ours     the service is its controller, or it has none and carries the service's uid
    left     it has no controller and our marks: a service of this name before left it, and this one takes it over
    others'  all else; never touched
"""

from __future__ import annotations

from typing import Any, Literal

from xpyd_operator.kube.podstate.facts import controller
from xpyd_operator.render import labels

Ownership = Literal["ours", "left", "others"]


def ownership(metadata: dict[str, Any], service: str, uid: str) -> Ownership:
    """Of an object with this metadata, as the service of this name and uid sees it."""
    if owner := controller(metadata):
        return "ours" if owner == uid else "others"
    if uid and (metadata.get("labels") or {}).get(labels.SERVICE_UID) == uid:
        return "ours"
    return "left" if is_unowned(metadata, service) else "others"


def is_unowned(metadata: dict[str, Any], service: str) -> bool:
    """Whether xpyd made it for a service of this name, and nothing owns it (any more)."""
    marks, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
    made = labels.SERVICE_UID in marks or labels.APPLIED in notes
    return made and marks.get(labels.SERVICE) == service and not metadata.get("ownerReferences")
