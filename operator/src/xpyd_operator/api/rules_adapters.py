"""Rules about LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator

from xpyd_operator.api.rule import Finding, Rule, Target, finding_if
from xpyd_operator.api.service import ServiceSpec
from xpyd_sidecar.contract.adapters import NAMES_BYTES


def _not_the_model(spec: ServiceSpec) -> Iterator[Finding]:
    for index, adapter in enumerate(spec.adapters):
        if adapter.name == (spec.model.served_name or spec.model.source):
            yield f"adapters[{index}].name", f"{adapter.name} is the name of the model itself; write another one"


def _names_fit(spec: ServiceSpec) -> list[Finding]:
    size = sum(len(each.name) for each in spec.adapters)
    return finding_if(size > NAMES_BYTES, "adapters", f"the names have {size} characters together, at most {NAMES_BYTES}")


def _one_pod(spec: ServiceSpec) -> list[Finding]:
    several = [name for name, role in (("prefill", spec.prefill), ("decode", spec.decode)) if role.parallelism.pods > 1]
    where = " and ".join(f"{name}.parallelism.pods" for name in several)
    right = "write --lora-modules in engine.args, with a folder that all pods see"
    return finding_if(bool(several and spec.adapters), "adapters", f"not with {where} above 1; {right}")


def _revision(spec: ServiceSpec) -> Iterator[Finding]:
    for index, adapter in enumerate(spec.adapters):
        if adapter.revision is not None and adapter.source.startswith(("/", ".")):
            yield f"adapters[{index}].revision", f"only for a hub id; {adapter.source} is read without it"


def _relative(spec: ServiceSpec) -> Iterator[Finding]:
    for index, adapter in enumerate(spec.adapters):
        if adapter.source.startswith("."):
            words = f"{adapter.source}: a path beside the document works with `xpyd up` only"
            yield f"adapters[{index}].source", words


RULES: tuple[Rule, ...] = (
    Rule(
        at=("spec",),
        reads=("adapters", "model.source", "model.servedName"),
        says="adapters: one has the name of the model itself; write another one",
        cel="""!has(self.adapters) ||
            self.adapters.all(a, a.name != (has(self.model.servedName) ? self.model.servedName : self.model.source))""",
        wrong=_not_the_model,
    ),
    Rule(
        at=("spec",),
        reads=("adapters",),
        says="",
        wrong=_names_fit,
        no_twin="CEL cannot add up lengths at a bounded cost; the operator refuses it",
    ),
    Rule(
        at=("spec",),
        reads=("adapters", "prefill.parallelism.pods", "decode.parallelism.pods"),
        says="adapters: not with parallelism.pods above 1; write --lora-modules in engine.args",
        cel="""!has(self.adapters) || size(self.adapters) == 0 ||
            (self.prefill.parallelism.pods == 1 && self.decode.parallelism.pods == 1)""",
        wrong=_one_pod,
    ),
    Rule(
        at=("spec",),
        reads=("adapters",),
        says="adapters: revision is only for a hub id",
        cel="""!has(self.adapters) ||
            self.adapters.all(a, !has(a.revision) || !(a.source.startsWith('/') || a.source.startsWith('.')))""",
        wrong=_revision,
    ),
    Rule(
        at=("spec",),
        reads=("adapters",),
        says="adapters: a path beside the document works with `xpyd up` only",
        cel="!has(self.adapters) || self.adapters.all(a, !a.source.startsWith('.'))",
        wrong=_relative,
        target=Target.KUBERNETES,
    ),
)
