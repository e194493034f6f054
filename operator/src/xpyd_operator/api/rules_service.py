"""Rules about a service as a whole, and about how its parts work together."""

from __future__ import annotations

from collections.abc import Iterator

from xpyd_operator.api.durations import seconds
from xpyd_operator.api.operation import Limits, NetworkPolicy, Rollout
from xpyd_operator.api.router import Ports, Router
from xpyd_operator.api.rule import Finding, Rule, Target, when
from xpyd_operator.api.service import ServiceSpec

_COUNTS = tuple(f"{role}.{field}" for role in ("prefill", "decode") for field in ("replicas", "scaling", "scaling.min"))
_LEAST = "(has(self.{0}.scaling) ? self.{0}.scaling.min : (has(self.{0}.replicas) ? self.{0}.replicas : 1))"
_PREFILL, _DECODE = _LEAST.format("prefill"), _LEAST.format("decode")
_BOUNDS = tuple(f"limits.{bound}{field}" for bound in ("minRatio", "maxRatio") for field in ("", ".prefill", ".decode"))


def _decode_needed(spec: ServiceSpec) -> list[Finding]:
    right = "only decode instances write answers; for none while nobody asks write decode.scaling with min 0"
    return when(spec.decode.scaling is None and spec.decode.least < 1, "decode.replicas", f"must be at least 1: {right}")


def _prefill_needed(spec: ServiceSpec) -> list[Finding]:
    never = spec.prefill.most == 0 and spec.router.on_no_prefill == "reject"
    right = "write router.onNoPrefill: decode, or at least 1"
    return when(never, "prefill.replicas", f"with 0 every request would be rejected; {right}")


def _tensor(spec: ServiceSpec) -> list[Finding]:
    ours, theirs = spec.prefill.parallelism.tensor, spec.decode.parallelism.tensor
    return when(
        ours % theirs != 0 and theirs % ours != 0,
        "decode.parallelism.tensor",
        f"one of the tensor sizes of prefill ({ours}) and decode ({theirs}) must divide the other: KV is split by heads",
    )


def _queue_between_pods(spec: ServiceSpec) -> Iterator[Finding]:
    for role in (spec.prefill, spec.decode):
        if spec.engine.queue == "vllm" and role.parallelism.pods > 1 and not spec.network_policy.allow_open_pods:
            right = "write auto, or networkPolicy.allowOpenPods: true"
            yield "engine.queue", f"vllm takes calls between pods from everybody who reaches it; {right}"
            return


def _queue_of_ray(spec: ServiceSpec) -> Iterator[Finding]:
    for name, role in (("prefill", spec.prefill), ("decode", spec.decode)):
        if spec.engine.queue == "xpyd" and role.parallelism.executor == "ray":
            yield "engine.queue", f"{name}.parallelism.executor ray has a queue of its own; write auto, or executor mp"
            return


def _planner_counts(spec: ServiceSpec) -> list[Finding]:
    idle = spec.planner.mode == "auto" and spec.prefill.scaling is None and spec.decode.scaling is None
    return when(idle, "planner.mode", "auto sets the counts of roles with scaling; write prefill.scaling or decode.scaling")


def _planner_slo(spec: ServiceSpec) -> list[Finding]:
    blind = spec.planner.mode != "disabled" and spec.planner.slo.ttft_p95 is None and spec.planner.slo.tpot_p95 is None
    return when(blind, "planner.slo", f"mode {spec.planner.mode} needs ttftP95, tpotP95 or both")


def _total(spec: ServiceSpec) -> list[Finding]:
    most, least = spec.limits.max_instances, spec.prefill.least + spec.decode.least
    few = most is not None and least > most
    return when(few, "limits.maxInstances", f"must be at least {least}, the instances asked for, not {most}")


def _ratio_kept(spec: ServiceSpec) -> Iterator[Finding]:
    """Fixed counts lie within the bounds: ``prefill / decode`` against ``p / d``, in whole numbers (cross-multiplied)."""
    if spec.prefill.scaling is not None or spec.decode.scaling is not None:
        return
    prefill, decode = spec.prefill.least, spec.decode.least
    low, high = spec.limits.min_ratio, spec.limits.max_ratio
    if low is not None and prefill * low.decode < decode * low.prefill:
        yield "limits.minRatio", f"{prefill}P{decode}D has less prefill per decode than {low.prefill}:{low.decode}"
    if high is not None and prefill * high.decode > decode * high.prefill:
        yield "limits.maxRatio", f"{prefill}P{decode}D has more prefill per decode than {high.prefill}:{high.decode}"


def _ratio_order(limits: Limits) -> list[Finding]:
    low, high = limits.min_ratio, limits.max_ratio
    crossed = low is not None and high is not None and low.prefill * high.decode > high.prefill * low.decode
    return when(crossed, "minRatio", "must not be above maxRatio")


def _ports(ports: Ports) -> list[Finding]:
    taken = ports.admin in (ports.http, ports.members)
    return [
        *when(ports.http == ports.members, "members", f"must not be the port of http ({ports.http})"),
        *when(taken, "admin", f"must not be the port of another one ({ports.admin})"),
    ]


def _router_replicas(router: Router) -> list[Finding]:
    useless = router.replicas is not None and router.placement != "deployment"
    return when(useless, "replicas", "only for placement: deployment; with sidecar write maxSidecars")


def _router_template(router: Router) -> list[Finding]:
    useless = router.template is not None and router.placement != "deployment"
    right = "with sidecar routers live in the pods of decode: write decode.template"
    return when(useless, "template", f"only for placement: deployment; {right}")


def _options(router: Router) -> list[Finding]:
    useless = router.policy_options.choices is not None and router.policy != "least_loaded"
    return when(useless, "policyOptions.choices", f"belongs to policy least_loaded, not {router.policy}")


def _pair_timeout(router: Router) -> list[Finding]:
    late = seconds(router.pair_timeout) > seconds(router.request_timeout)
    message = f"must be at most requestTimeout ({router.request_timeout}), not {router.pair_timeout}"
    return when(late, "pairTimeout", message)


def _queue_timeout(router: Router) -> list[Finding]:
    late = router.queue_timeout_s > router.request_timeout_s
    message = f"must be at most requestTimeout ({router.request_timeout}), not {router.queue.timeout}"
    return when(late, "queue.timeout", message)


def _no_room(rollout: Rollout) -> list[Finding]:
    stuck = all(given in (0, "0%") for given in (rollout.max_surge, rollout.max_unavailable))
    return when(stuck, "maxUnavailable", "must be at least 1 when maxSurge is 0, or nothing could ever be replaced")


def _policy_off(policy: NetworkPolicy) -> list[Finding]:
    useless = not policy.enabled and bool(policy.clients or policy.egress)
    return when(useless, "enabled", "must be true for clients or egress to have an effect")


def _open_pods(spec: ServiceSpec) -> Iterator[Finding]:
    policy = spec.network_policy
    for name, role in (("prefill", spec.prefill), ("decode", spec.decode)):
        if role.parallelism.pods > 1 and not policy.enabled and not policy.allow_open_pods:
            why = f"the pods of one instance ({name}.parallelism.pods) do not authenticate each other"
            yield "networkPolicy.enabled", f"must be true, as {why}; or write networkPolicy.allowOpenPods: true"
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
        reads=("engine.queue", "networkPolicy.allowOpenPods", "prefill.parallelism.pods", "decode.parallelism.pods"),
        says="engine.queue vllm takes calls between pods from everybody; write auto, or networkPolicy.allowOpenPods",
        cel="""self.engine.queue != 'vllm' || self.networkPolicy.allowOpenPods ||
            (self.prefill.parallelism.pods == 1 && self.decode.parallelism.pods == 1)""",
        wrong=_queue_between_pods,
        target=Target.KUBERNETES,
    ),
    Rule(
        at=("spec",),
        reads=("engine.queue", *(f"{role}.parallelism.executor" for role in ("prefill", "decode"))),
        says="engine.queue xpyd is for executor mp; ray has a queue of its own",
        cel="""self.engine.queue != 'xpyd' ||
            (!has(self.prefill.parallelism.executor) || self.prefill.parallelism.executor != 'ray') &&
            (!has(self.decode.parallelism.executor) || self.decode.parallelism.executor != 'ray')""",
        wrong=_queue_of_ray,
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
        at=("spec",),
        reads=(*_BOUNDS, *_COUNTS),
        says="the counts of prefill and decode are outside limits.minRatio or limits.maxRatio",
        cel=f"""has(self.prefill.scaling) || has(self.decode.scaling) ||
            ((!has(self.limits.minRatio) ||
            {_PREFILL} * self.limits.minRatio.decode >= {_DECODE} * self.limits.minRatio.prefill) &&
            (!has(self.limits.maxRatio) ||
            {_PREFILL} * self.limits.maxRatio.decode <= {_DECODE} * self.limits.maxRatio.prefill))""",
        wrong=_ratio_kept,
    ),
    Rule(
        at=("spec.limits",),
        reads=tuple(bound.removeprefix("limits.") for bound in _BOUNDS),
        says="minRatio must not be above maxRatio",
        cel="""!has(self.minRatio) || !has(self.maxRatio) ||
            self.minRatio.prefill * self.maxRatio.decode <= self.maxRatio.prefill * self.minRatio.decode""",
        wrong=_ratio_order,
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
        reads=("replicas", "placement"),
        says="replicas is only for placement deployment",
        cel="!has(self.replicas) || self.placement in ['deployment', 'Deployment']",
        wrong=_router_replicas,
    ),
    Rule(
        at=("spec.router",),
        reads=("template", "placement"),
        says="template is only for placement deployment; with sidecar write decode.template",
        cel="!has(self.template) || self.placement in ['deployment', 'Deployment']",
        wrong=_router_template,
    ),
    Rule(
        at=("spec.router",),
        reads=("policy", "policyOptions"),
        says="policyOptions: choices belongs to least_loaded",
        cel="!has(self.policyOptions.choices) || self.policy == 'least_loaded'",
        wrong=_options,
    ),
    Rule(
        at=("spec.router",),
        reads=("pairTimeout", "requestTimeout"),
        says="pairTimeout must be at most requestTimeout",
        cel="duration(self.pairTimeout) <= duration(self.requestTimeout)",
        wrong=_pair_timeout,
    ),
    Rule(
        at=("spec.router",),
        reads=("queue.timeout", "requestTimeout"),
        says="queue.timeout must be at most requestTimeout",
        cel="duration(self.queue.timeout) <= duration(self.requestTimeout)",
        wrong=_queue_timeout,
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
        reads=("networkPolicy.enabled", "networkPolicy.allowOpenPods",
               "prefill.parallelism.pods", "decode.parallelism.pods"),
        says="networkPolicy.enabled must be true where parallelism.pods is above 1; or write networkPolicy.allowOpenPods",
        cel="""self.networkPolicy.enabled || self.networkPolicy.allowOpenPods ||
            (self.prefill.parallelism.pods == 1 && self.decode.parallelism.pods == 1)""",
        wrong=_open_pods,
        target=Target.KUBERNETES,
    ),
)
