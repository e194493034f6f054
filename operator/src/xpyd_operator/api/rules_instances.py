"""Rules about one model, engine or role: what an instance is."""

from __future__ import annotations

from collections.abc import Iterator

from xpyd_operator.api import owned
from xpyd_operator.api.model import Engine, Model
from xpyd_operator.api.roles import RoleSpec, Scaling
from xpyd_operator.api.rule import Finding, Rule, Target, finding_if
from xpyd_operator.api.source import Claim, Hub, Image, RelativePath

_ROLES = ("spec.prefill", "spec.decode")
_PODS = tuple(f"parallelism.{name}" for name in ("pods", "tensor", "pipeline", "data"))
_ARGUMENTS = ("spec.engine", *_ROLES)


def _source_fits(model: Model) -> Iterator[Finding]:
    if not isinstance(model.origin, Hub):
        for name, value in (
            ("revision", model.revision),
            ("tokenSecret", model.token_secret),
            ("cache", model.cache.claim),
        ):
            if value is not None:
                yield name, f"only for a hub id; {model.source} is read without it"


def _relative(model: Model) -> list[Finding]:
    return finding_if(
        isinstance(model.origin, RelativePath), "source",
        f"{model.source}: a path beside the document works with `xpyd up` only"
    )


def _claim(model: Model) -> list[Finding]:
    return finding_if(
        isinstance(model.origin, Claim | Image), "source", f"{model.source}: a volume exists in Kubernetes only"
    )


def _owned_arguments(section: Engine | RoleSpec) -> Iterator[Finding]:
    for index, argument in enumerate(section.args):
        if found := owned.option_of(argument):
            option, instead = found
            written = argument.split("=")[0]
            meant = "" if written == option else f" ({option})"
            yield f"args[{index}]", f"{written}{meant} is set by xpyd; {instead}"


def _spaced_arguments(section: Engine | RoleSpec) -> Iterator[Finding]:
    for index, argument in enumerate(section.args):
        if owned.is_spaced_option(argument):
            option = argument.split()[0]
            yield f"args[{index}]", f"an option and its value are two items, or {option}=VALUE"


def _env(engine: Engine) -> Iterator[Finding]:
    for index, variable in enumerate(engine.env):
        if instead := owned.env(variable.name):
            yield f"env[{index}].name", f"{variable.name} is set by xpyd; {instead}"
        if variable.value is not None and variable.value_from is not None:
            yield f"env[{index}]", "value and valueFrom exclude each other; keep one of them"


def _env_local(engine: Engine) -> Iterator[Finding]:
    for index, variable in enumerate(engine.env):
        if variable.value_from is not None:
            yield f"env[{index}].valueFrom", "exists in Kubernetes only; write value"


def _one_owner(role: RoleSpec) -> list[Finding]:
    both = role.replicas is not None and role.scaling is not None
    return finding_if(both, "", "replicas and scaling exclude each other; keep replicas for a fixed count, or scaling")


def _scaling(scaling: Scaling) -> list[Finding]:
    return finding_if(scaling.min > scaling.max, "min", f"must be at most max ({scaling.max}), not {scaling.min}")


def _pods(role: RoleSpec) -> Iterator[Finding]:
    parallel = role.parallelism
    if parallel.pods == 1:
        return
    shared, words = parallel.data, f"data {parallel.data}: each pod has whole ranks"
    if parallel.data == 1:
        shared, words = parallel.tensor * parallel.pipeline, f"tensor {parallel.tensor} x pipeline {parallel.pipeline}"
    if shared % parallel.pods:
        right = " or ".join(str(pods) for pods in range(1, 17) if shared % pods == 0)
        yield "parallelism.pods", f"{parallel.pods} does not divide {words}; write {right}"


def _main_container(role: RoleSpec) -> Iterator[Finding]:
    spec = (role.template or {}).get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    for index, container in enumerate(containers if isinstance(containers, list) else []):
        if isinstance(container, dict) and container.get("name") == "main":
            for field in ("command", "args", "image"):
                if field in container:
                    right = "engine.image" if field == "image" else "engine.args or this role's args"
                    yield f"template.spec.containers[{index}].{field}", f"xpyd starts the container main; write {right}"


RULES: tuple[Rule, ...] = (
    Rule(
        at=("spec.model",),
        reads=("source", "revision", "tokenSecret", "cache"),
        says="revision, tokenSecret and cache are only for a hub id",
        cel=r"""self.source.matches('^([.]|/|(pvc|oci|s3|gs|az):)') ?
            !has(self.revision) && !has(self.tokenSecret) && !has(self.cache.claim) : true""",
        wrong=_source_fits,
    ),
    Rule(
        at=("spec.model",),
        reads=("source",),
        says="source: a path beside the document works with `xpyd up` only",
        cel="!self.source.startsWith('.')",
        wrong=_relative,
        target=Target.KUBERNETES,
    ),
    Rule(
        at=("spec.model",),
        reads=("source",),
        says="",
        wrong=_claim,
        target=Target.LOCAL,
        no_twin="the API server sees documents for Kubernetes only",
    ),
    Rule(
        at=_ARGUMENTS,
        reads=(),
        says="args: one of these is set by xpyd; see the reference of engine.args",
        tells=owned.message(),
        cel=f"!self.exists(a, a.matches('{owned.expression()}'))",
        cel_at="args",
        wrong=_owned_arguments,
    ),
    Rule(
        at=_ARGUMENTS,
        reads=(),
        says="args: an option and its value are two items, or --option=VALUE; one of these has a space",
        cel=f"!self.exists(a, a.matches('{owned.SPACED_PATTERN}'))",
        cel_at="args",
        wrong=_spaced_arguments,
    ),
    Rule(
        at=("spec.engine",),
        reads=(),
        says="",
        wrong=_env,
        no_twin="CEL does not see what objects of Kubernetes name",
    ),
    Rule(
        at=("spec.engine",),
        reads=(),
        says="",
        wrong=_env_local,
        target=Target.LOCAL,
        no_twin="the API server sees documents for Kubernetes only",
    ),
    Rule(
        at=_ROLES,
        reads=(),
        says="replicas and scaling exclude each other",
        cel="!(has(self.replicas) && has(self.scaling))",
        wrong=_one_owner,
    ),
    Rule(
        at=tuple(f"{role}.scaling" for role in _ROLES),
        reads=("min", "max"),
        says="min must be at most max",
        cel="self.min <= self.max",
        wrong=_scaling,
    ),
    Rule(
        at=_ROLES,
        reads=_PODS,
        says="parallelism.pods must divide data, or, where that is 1, tensor x pipeline",
        cel="""(self.parallelism.data > 1 ? self.parallelism.data :
            self.parallelism.tensor * self.parallelism.pipeline) % self.parallelism.pods == 0""",
        wrong=_pods,
    ),
    Rule(
        at=_ROLES,
        reads=("template",),
        says="",
        wrong=_main_container,
        no_twin="CEL does not see fields that the schema only preserves",
    ),
)
