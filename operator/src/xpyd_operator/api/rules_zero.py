"""Rules about a service that may have no instances (``decode.scaling.min`` 0): who holds requests then, how long."""

from __future__ import annotations

from xpyd_operator.api.rule import Finding, Rule, Target, finding_if
from xpyd_operator.api.service import ServiceSpec

_STAYS = "!has(self.decode.scaling) || self.decode.scaling.min > 0"
_PREFILL = ("(has(self.prefill.scaling) ? self.prefill.scaling.min : "
            "(has(self.prefill.replicas) ? self.prefill.replicas : 1))")


def _zero_routers(spec: ServiceSpec) -> list[Finding]:
    beside = _to_zero(spec) and spec.router.placement != "deployment"
    right = "write router.placement: deployment, or decode.scaling.min: 1"
    words = f"with decode.scaling.min 0 no router would be left that wakes it; {right}"
    return finding_if(beside, "router.placement", words)


def _zero_prefill(spec: ServiceSpec) -> list[Finding]:
    path = "prefill.replicas" if spec.prefill.scaling is None else "prefill.scaling.min"
    right = "write prefill.scaling with min 0, or prefill.replicas: 0"
    above = _to_zero(spec) and spec.prefill.min_instances > 0
    return finding_if(above, path, f"must be 0, as decode.scaling.min is 0; {right}")


def _zero_hold(spec: ServiceSpec) -> list[Finding]:
    short = _to_zero(spec) and spec.router.hold_s < 60
    words = f"with decode.scaling.min 0 requests wait for a start; write at least 1m, e.g. 10m, not {spec.router.hold}"
    return finding_if(short, "router.hold", words)


def _to_zero(spec: ServiceSpec) -> bool:
    return spec.decode.scaling is not None and spec.decode.scaling.min == 0


RULES: tuple[Rule, ...] = (
    Rule(
        at=("spec",),
        reads=("decode.scaling", "decode.scaling.min", "router.placement"),
        says="decode.scaling.min 0 needs routers in pods of their own; write router.placement: deployment",
        cel=f"{_STAYS} || self.router.placement in ['deployment', 'Deployment']",
        wrong=_zero_routers,
        target=Target.KUBERNETES,
    ),
    Rule(
        at=("spec",),
        reads=("decode.scaling", "decode.scaling.min", "prefill.replicas", "prefill.scaling", "prefill.scaling.min"),
        says="decode.scaling.min 0 needs 0 for prefill, too; write prefill.scaling with min 0, or prefill.replicas: 0",
        cel=f"{_STAYS} || {_PREFILL} == 0",
        wrong=_zero_prefill,
    ),
    Rule(
        at=("spec",),
        reads=("decode.scaling", "decode.scaling.min", "router.hold"),
        says="with decode.scaling.min 0 requests wait for a start; write a router.hold of at least 1m, e.g. 10m",
        cel=f"{_STAYS} || duration(self.router.hold) >= duration('60s')",
        wrong=_zero_hold,
        target=Target.KUBERNETES,
    ),
)
