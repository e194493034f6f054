"""Rules about a service as a whole, and about how its parts work together."""

from __future__ import annotations

from collections.abc import Iterator

from xpyd_operator.api.operation import NetworkPolicy, Rollout
from xpyd_operator.api.router import Ports, Router
from xpyd_operator.api.rule import Finding, Rule, Target, finding_if
from xpyd_operator.api.service import ServiceSpec

_COUNTS = tuple(f"{role}.{field}" for role in ("prefill", "decode") for field in ("replicas", "scaling", "scaling.min"))
_LEAST = "(has(self.{0}.scaling) ? self.{0}.scaling.min : (has(self.{0}.replicas) ? self.{0}.replicas : 1))"
_PREFILL, _DECODE = _LEAST.format("prefill"), _LEAST.format("decode")


def _decode_needed(spec: ServiceSpec) -> list[Finding]:
    right = "only decode instances write answers; for none while nobody asks write decode.scaling with min 0"
    none = spec.decode.scaling is None and spec.decode.min_instances < 1
    return finding_if(none, "decode.replicas", f"must be at least 1: {right}")


def _prefill_needed(spec: ServiceSpec) -> list[Finding]:
    never = spec.prefill.max_instances == 0 and spec.router.on_no_prefill == "reject"
    right = "write router.onNoPrefill: decode, or at least 1"
    return finding_if(never, "prefill.replicas", f"with 0 every request would be rejected; {right}")


def _tensor(spec: ServiceSpec) -> list[Finding]:
    ours, theirs = spec.prefill.parallelism.tensor, spec.decode.parallelism.tensor
    return finding_if(
        ours % theirs != 0 and theirs % ours != 0,
        "decode.parallelism.tensor",
        f"one of the tensor sizes of prefill ({ours}) and decode ({theirs}) must divide the other: KV is split by heads",
    )


def _topology(spec: ServiceSpec) -> list[Finding]:
    unused = spec.engine.topology is not None and spec.prefill.parallelism.pods == spec.decode.parallelism.pods == 1
    right = "one pod is placed by template.spec.affinity"
    return finding_if(unused, "engine.topology", f"only for instances of several pods (parallelism.pods above 1); {right}")


def _planner_counts(spec: ServiceSpec) -> list[Finding]:
    idle = spec.planner.mode == "auto" and spec.prefill.scaling is None and spec.decode.scaling is None
    words = "auto sets the counts of roles with scaling; write prefill.scaling or decode.scaling"
    return finding_if(idle, "planner.mode", words)


def _planner_slo(spec: ServiceSpec) -> list[Finding]:
    blind = spec.planner.mode != "disabled" and spec.planner.slo.ttft_p95 is None and spec.planner.slo.tpot_p95 is None
    return finding_if(blind, "planner.slo", f"mode {spec.planner.mode} needs ttftP95, tpotP95 or both")


def _total(spec: ServiceSpec) -> list[Finding]:
    most, least = spec.limits.max_instances, spec.prefill.min_instances + spec.decode.min_instances
    few = most is not None and least > most
    return finding_if(few, "limits.maxInstances", f"must be at least {least}, the instances asked for, not {most}")


def _ports(ports: Ports) -> list[Finding]:
    taken = ports.admin in (ports.http, ports.members)
    return [
        *finding_if(ports.http == ports.members, "members", f"must not be the port of http ({ports.http})"),
        *finding_if(taken, "admin", f"must not be the port of another one ({ports.admin})"),
    ]


def _router_template(router: Router) -> list[Finding]:
    useless = router.template is not None and router.placement != "deployment"
    right = "with sidecar routers live in the pods of decode: write decode.template"
    return finding_if(useless, "template", f"only for placement: deployment; {right}")


def _no_room(rollout: Rollout) -> list[Finding]:
    stuck = all(given in (0, "0%") for given in (rollout.max_surge, rollout.max_unavailable))
    return finding_if(stuck, "maxUnavailable", "must be at least 1 when maxSurge is 0, or nothing could ever be replaced")


def _policy_off(policy: NetworkPolicy) -> list[Finding]:
    useless = not policy.enabled and bool(policy.clients or policy.egress)
    return finding_if(useless, "enabled", "must be true for clients or egress to have an effect")


def _open_pods(spec: ServiceSpec) -> Iterator[Finding]:
    policy = spec.network_policy
    for name, role in (("prefill", spec.prefill), ("decode", spec.decode)):
        if role.parallelism.pods > 1 and not policy.enabled:
            why = f"the pods of one instance ({name}.parallelism.pods) do not authenticate each other"
            yield "networkPolicy.enabled", f"must be true, as {why}; policies of your own add to it"
            return


RULES: tuple[Rule, ...] = (
    Rule(
        at=("spec",),
        reads=("decode.replicas", "decode.scaling"),
        says="decode needs at least one instance; for none while nobody asks write decode.scaling with min 0",
        cel="has(self.decode.scaling) || !has(self.decode.replicas) || self.decode.replicas >= 1",
        wrong=_decode_needed,
    ),
    Rule(
        at=("spec",),
        reads=("prefill.replicas", "prefill.scaling", "router.onNoPrefill"),
        says="prefill.replicas 0 with router.onNoPrefill: reject would reject every request",
        cel="""has(self.prefill.scaling) || !has(self.prefill.replicas) || self.prefill.replicas > 0 ||
            self.router.onNoPrefill != 'reject'""",
        wrong=_prefill_needed,
    ),
    Rule(
        at=("spec",),
        reads=("prefill.parallelism.tensor", "decode.parallelism.tensor"),
        says="one of the tensor sizes of prefill and decode must divide the other, as KV is split by heads",
        cel="""self.prefill.parallelism.tensor % self.decode.parallelism.tensor == 0 ||
            self.decode.parallelism.tensor % self.prefill.parallelism.tensor == 0""",
        wrong=_tensor,
    ),
    Rule(
        at=("spec",),
        reads=("engine.topology", "prefill.parallelism.pods", "decode.parallelism.pods"),
        says="engine.topology is for parallelism.pods above 1",
        cel="!has(self.engine.topology) || self.prefill.parallelism.pods > 1 || self.decode.parallelism.pods > 1",
        wrong=_topology,
    ),
    Rule(
        at=("spec",),
        reads=("planner.mode", "prefill.scaling", "decode.scaling"),
        says="planner.mode auto sets the counts of roles with scaling; write prefill.scaling or decode.scaling",
        cel="!(self.planner.mode in ['auto', 'Auto']) || has(self.prefill.scaling) || has(self.decode.scaling)",
        wrong=_planner_counts,
    ),
    Rule(
        at=("spec",),
        reads=("planner.mode", "planner.slo", "planner.slo.ttftP95", "planner.slo.tpotP95"),
        says="planner.slo: modes observe and auto need ttftP95, tpotP95 or both",
        cel="self.planner.mode in ['disabled', 'Off'] || has(self.planner.slo.ttftP95) || has(self.planner.slo.tpotP95)",
        wrong=_planner_slo,
    ),
    Rule(
        at=("spec",),
        reads=("limits.maxInstances", *_COUNTS),
        says="limits.maxInstances is below the instances asked for",
        cel=f"!has(self.limits.maxInstances) || {_PREFILL} + {_DECODE} <= self.limits.maxInstances",
        wrong=_total,
    ),
    Rule(
        at=("spec.router.ports",),
        reads=("http", "members", "admin"),
        says="http, members and admin must be three ports",
        cel="""self.http != self.members &&
            (!has(self.admin) || (self.admin != self.http && self.admin != self.members))""",
        wrong=_ports,
    ),
    Rule(
        at=("spec.router",),
        reads=("template", "placement"),
        says="template is only for placement deployment; with sidecar write decode.template",
        cel="!has(self.template) || self.placement in ['deployment', 'Deployment']",
        wrong=_router_template,
    ),
    Rule(
        at=("spec.rollout",),
        reads=("maxSurge", "maxUnavailable"),
        says="maxUnavailable must be at least 1 when maxSurge is 0, or nothing could ever be replaced",
        cel="""(type(self.maxSurge) == int ? self.maxSurge > 0 : self.maxSurge != '0%') ||
            (type(self.maxUnavailable) == int ? self.maxUnavailable > 0 : self.maxUnavailable != '0%')""",
        wrong=_no_room,
    ),
    Rule(
        at=("spec.networkPolicy",),
        reads=("enabled", "clients", "egress"),
        says="clients and egress have an effect only when enabled",
        cel="self.enabled || (self.clients.size() == 0 && self.egress.size() == 0)",
        wrong=_policy_off,
    ),
    Rule(
        at=("spec",),
        reads=("networkPolicy.enabled", "prefill.parallelism.pods", "decode.parallelism.pods"),
        says="networkPolicy.enabled must be true where parallelism.pods is above 1",
        cel="""self.networkPolicy.enabled || (self.prefill.parallelism.pods == 1 && self.decode.parallelism.pods == 1)""",
        wrong=_open_pods,
        target=Target.KUBERNETES,
    ),
)
