"""What the pods of an instance of several members have beside those of an instance that is one pod.

    names      qwen-e3-0 (the leader), qwen-e3-1 …; each is found as qwen-e3-0.qwen-engines, ready or not
    command    the launcher, which begins the engine when all members are there, and again for the next round
    probes     those of ``main`` ask the agent: an engine that waits for other members is no sick one, and one whose group
               does not serve is not ready, whatever its ``/health`` says
    torch      compiles into a folder of each life (the launcher sets it)
"""

from __future__ import annotations

import math
from typing import Any, Final

from xpyd_operator.api.service import DisaggService
from xpyd_operator.plan.placing import HALF_S
from xpyd_operator.render import labels
from xpyd_operator.render import paths as at
from xpyd_operator.render.layout import Member, digest
from xpyd_operator.render.process import LAUNCHER
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract.group import READY_PATH
from xpyd_sidecar.contract.ids import HostPort, join_host_port
from xpyd_sidecar.contract.launch import GroupConfig

COMPILED: Final = "TORCHINDUCTOR_CACHE_DIR"
_STARTUP_PERIOD_S: Final = 5


def marks(member: Member) -> dict[str, str]:
    """Labels of a member's pod."""
    return {labels.INSTANCE_OF: member.instance, labels.MEMBER: str(member.index)}


def notes(members: tuple[Member, ...], settings: KubeSettings) -> dict[str, str]:
    """Annotations of every member's pod."""
    return {labels.MEMBERS: str(len(members)), labels.LAYOUT: digest(members, settings.sidecar_image)}


def hostname_fields(service: DisaggService, member: Member) -> dict[str, str]:
    """Fields of a pod's spec that give a member its name among the others."""
    return {"hostname": member.name, "subdomain": labels.engines_name(service.name)}


def placement(service: DisaggService, member: Member) -> dict[str, Any]:
    """Fields of a pod's spec that say where the scheduler may put a member: with the others.

    The first pod of an instance finds none of its kind, and the scheduler then takes its own labels for one.
    """
    topology = service.spec.engine.topology
    if topology is None:
        return {}
    mine = {"key": labels.INSTANCE_OF, "operator": "In", "values": [member.instance]}
    term = {"labelSelector": {"matchExpressions": [mine]}, "topologyKey": topology}
    return {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}}


def group_config(
    service: DisaggService, members: tuple[Member, ...], index: int, settings: KubeSettings
) -> GroupConfig:
    """For the agent of one member. The engines meet at the address of the leader's pod."""
    namespace = service.metadata.namespace or "default"
    host = f"{members[0].name}.{labels.engines_name(service.name)}.{namespace}.svc.{settings.cluster_domain}."
    leader = join_host_port(host, at.AGENT_PORT) if index else HostPort("")
    return GroupConfig(index, len(members), digest(members, settings.sidecar_image), leader)


def command(service: DisaggService, member: Member) -> list[str]:
    """The launcher of a member, and what it is to start; the arguments follow."""
    grace = str(math.ceil(service.spec.drain.timeout_s))
    begin = at.LISTENING if member.serves else ["python3", "-m"]
    return ["python3", "-m", LAUNCHER, "--grace-s", grace, "--", *begin, member.module]


def port_args(member: Member) -> tuple[str, ...]:
    """Where its server listens; nothing where it has none."""
    return ("--port", str(at.ENGINE_PORT)) if member.serves else ()


def probes(service: DisaggService) -> dict[str, Any]:
    """Of ``main``. It counts as started once its group serves, for which all members must have found a place."""
    limit_s = service.spec.engine.startup_timeout_s + HALF_S
    return {
        "startupProbe": at.killing(_asked(READY_PATH, _STARTUP_PERIOD_S, math.ceil(limit_s / _STARTUP_PERIOD_S))),
        "livenessProbe": at.live_probe(),
        "readinessProbe": _asked(READY_PATH, 2, 2),
    }


def _asked(path: str, period_s: int, failures: int) -> dict[str, Any]:
    return at.http_probe(path, at.AGENT_PORT, period_s=period_s, failures=failures)
