"""Whether an instance of one role could be one of the other: what stands against it, by its field. Pure.

Engines run as ``kv_both``, so a running instance takes the other role when nothing but the role tells the two apart.
"""

from __future__ import annotations

from typing import Any

import msgspec

from xpyd_operator.api.service import DisaggService
from xpyd_operator.plan.desired import Revision
from xpyd_operator.render import labels
from xpyd_operator.render.compare import differs
from xpyd_operator.render.defaults import without_defaults
from xpyd_operator.render.pod import engine_pods
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract.ids import InstanceName, Role

NEVER = "rollout.switchWindow is 0s"


def local_difference(service: DisaggService) -> str:
    """What of a document keeps its local instances from switching, in words; empty where nothing does.

    ``template`` is not used there. Which GPUs an instance has is its own; how many is stated.
    """
    return _stated(service, ("replicas", "scaling", "template"))


def pods_difference(service: DisaggService, settings: KubeSettings) -> str:
    """What keeps the pods of a document from switching, in words; empty where nothing does.

    Looks at the document, which names what a person can change, and then at the rendered pods, which have the last word.
    """
    if found := _stated(service, ("replicas", "scaling")):
        return found
    prefill, decode = (_without_role(list(engine_pods(service, role, InstanceName("x"), Revision(""), settings)))
                       for role in Role)
    field = differs(prefill, decode) or differs(decode, prefill)
    return f"the pods of prefill and decode differ in {field}" if field else ""


def same_places(service: DisaggService, settings: KubeSettings) -> bool:
    """Whether a node that takes an instance of one role takes one of the other: both ask the same of nodes."""
    prefill, decode = ([_asked_of_nodes(pod["spec"])
                        for pod in engine_pods(service, role, InstanceName("x"), Revision(""), settings)] for role in Role)
    return prefill == decode


def _asked_of_nodes(spec: dict[str, Any]) -> Any:
    fields = ("nodeSelector", "tolerations", "priorityClassName", "schedulerName", "runtimeClassName", "resourceClaims")
    resources = [[each.get("resources") for each in spec.get(part) or ()] for part in ("initContainers", "containers")]
    return [*(spec.get(field) for field in fields), (spec.get("affinity") or {}).get("nodeAffinity"), resources]


def _stated(service: DisaggService, apart: tuple[str, ...]) -> str:
    if not service.spec.rollout.switch_window_s:
        return NEVER
    prefill, decode = (
        {name: part for name, part in stated.items() if name not in apart}
        for stated in (without_defaults(service.spec.role(role)) for role in Role)
    )
    field = differs(prefill, decode) or differs(decode, prefill)
    if not field and prefill != decode:  # a value that stands for nothing, and none
        field = next(name for name in {**prefill, **decode} if prefill.get(name) != decode.get(name))
    return f"spec.prefill and spec.decode differ in {field}" if field else ""


def _without_role(pods: list[dict[str, Any]]) -> Any:
    """The pods of an instance without what says its role: the label, the same in selectors, and the agent's first role. By
    index, so that a difference is named as in one pod.
    """
    for container in (one for pod in pods for one in pod["spec"]["initContainers"]):
        if container["name"] == labels.SIDECAR:
            config = msgspec.json.decode(container["command"][-1])
            config["agent"].pop("role")
            container["command"] = [*container["command"][:-1], config]
    leader, *others = pods
    return _pruned(leader | ({"members": {str(index): pod for index, pod in enumerate(others, 1)}} if others else {}))


def _pruned(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: _pruned(one) for key, one in part.items() if key != labels.ROLE}
    return [_pruned(one) for one in part] if isinstance(part, list | tuple) else part
