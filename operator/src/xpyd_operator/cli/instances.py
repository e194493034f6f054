"""Which engine models and rules of routers ``xpyd simulate`` plays: from its arguments, else from the document, else
assumed, which is said.
"""

from __future__ import annotations

import argparse
import re
from typing import Any, NamedTuple

import msgspec

from xpyd_operator.api.roles import RoleSpec
from xpyd_operator.api.service import DisaggService
from xpyd_operator.cli.traces import duration, load_model
from xpyd_operator.errors import XpydError
from xpyd_operator.simulation.engine import EngineModel, Pools
from xpyd_operator.simulation.hardware import LINK, PRESETS, gpu_of, model_of, roofline
from xpyd_operator.simulation.rules import RouterRules
from xpyd_sidecar.contract.ids import Role

MODEL, GPU = "qwen3-8b", "h200"
PRODUCT = "nvidia.com/gpu.product"
"""Label of nodes, which a template's ``nodeSelector`` may name."""
_LINK = re.compile(r"([0-9.]+)\s*([KMGT])(b|B)")
_SIZES = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


class Instances(NamedTuple):
    """What is played."""

    pools: Pools
    words: str
    """What an instance is, for people."""


def instances(args: argparse.Namespace, service: DisaggService | None) -> Instances:
    """From ``--engine``, or from ``--model --gpu --tp --link`` and the document.

    Raises:
        XpydError: what is asked for is unknown, does not fit together, or is not simulated.
    """
    if service is not None:
        _simulated(service)
    if args.engine:
        if given := [f"--{name}" for name in ("model", "gpu", "tp") if getattr(args, name)]:
            raise XpydError(f"--engine says what an instance is, so {', '.join(given)} cannot; leave one of them away")
        pools = _of_file(args.engine, service)
        said = [args.engine]
        if args.link:
            pools = Pools(*(msgspec.structs.replace(each, link=link_of(args.link)) for each in pools))
    else:
        pools, said = _of_data_sheets(args, service)
    if args.cold_start:
        pools = Pools(*(_starting(each, args.cold_start) for each in pools))
    gpus = pools.gpus
    size = f"{gpus[0]} GPU{'s' * (gpus[0] > 1)}" if gpus[0] == gpus[1] else f"{gpus[0]} GPUs (prefill), {gpus[1]} (decode)"
    link = min(each.link for each in pools)
    carries = f"{link / 1e9:g} GB/s" if link else "as many bytes/s as there are"
    return Instances(pools, f"instances of {size}: {', '.join(said)}; a link of {carries} each")


def _of_data_sheets(args: argparse.Namespace, service: DisaggService | None) -> tuple[Pools, list[str]]:
    model = args.model or (service.spec.model.source if service is not None else MODEL)
    try:
        model_of(model)
    except XpydError as error:
        raise XpydError(f"{'--model' if args.model else 'spec.model.source'}: {error}") from None
    said = [model if args.model or service is not None else f"{model} (assumed; --model)"]
    roles = (None, None) if service is None else (service.spec.role(Role.PREFILL), service.spec.role(Role.DECODE))
    sizes = _sizes(args.tp) if args.tp else tuple(1 if each is None else each.parallelism.tensor for each in roles)
    made: list[EngineModel] = []
    gpus: list[str] = []
    for role, tensor in zip(roles, sizes, strict=True):
        gpu = args.gpu or (_gpu(role) if role is not None else "")
        gpus.append(gpu_of(gpu or GPU) + ("" if gpu else " (assumed; --gpu)"))
        made.append(roofline(model, gpu or GPU, tensor, link=link_of(args.link) if args.link else LINK,
                             pods=1 if role is None else role.parallelism.pods))
    said.append(gpus[0] if gpus[0] == gpus[1] else f"{gpus[0]} and {gpus[1]}")
    if not args.link:
        said.append("200 Gb/s (assumed; --link)")
    said.append("from data sheets, not measured")
    return Pools(*made), said


def _of_file(name: str, service: DisaggService | None) -> Pools:
    """Figures of one instance, as measured; how many devices and pods it has the document says."""
    model = load_model(name)
    if service is None:
        return Pools(model, model)
    sizes = [service.spec.prefill.parallelism, service.spec.decode.parallelism]
    if sizes[0].devices != sizes[1].devices:
        raise XpydError(f"--engine {name} has the figures of one instance, and those of prefill ({sizes[0].devices} "
                        f"devices) and decode ({sizes[1].devices}) differ; without it both come from data sheets")
    if name in PRESETS and sizes[0].devices > 1:
        raise XpydError(f"--engine {name} is one GPU, and the document has {sizes[0].devices} per instance; give --gpu")
    return Pools(*(msgspec.structs.replace(model, gpus=each.devices, pods=each.pods) for each in sizes))


def _simulated(service: DisaggService) -> None:
    for name, role in (("prefill", service.spec.prefill), ("decode", service.spec.decode)):
        for field in ("data", "pipeline"):
            size = getattr(role.parallelism, field)
            if size > 1:
                right = "write 1, and so many times the instances" if field == "data" else "write 1, and a larger tensor"
                raise XpydError(f"spec.{name}.parallelism.{field} is {size}, which is not simulated; {right}")


def _gpu(role: RoleSpec) -> str:
    """As the role's template asks for it; empty where it does not."""
    template: Any = role.template or {}
    selector = (template.get("spec") or {}).get("nodeSelector") or {}
    return str(selector.get(PRODUCT) or "")


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not 1 <= len(parts) <= 2 or not all(each.isdecimal() for each in parts):
        raise XpydError(f"--tp {text}: write a size, or two, of prefill and of decode, as 4,2")
    found = [int(each) for each in parts]
    return found[0], found[-1]


def link_of(text: str) -> float:
    """Bytes a second, of ``100Gb`` (bits) or ``12.5GB`` (bytes).

    Raises:
        XpydError: it is neither.
    """
    match = _LINK.fullmatch(text.strip().removesuffix("/s").removesuffix("ps"))
    try:
        value = float(match[1]) * _SIZES[match[2]] / (8 if match[3] == "b" else 1) if match else 0.0
    except ValueError:
        value = 0.0
    if value <= 0:
        raise XpydError(f"--link {text}: write bits or bytes a second, as 100Gb or 12.5GB")
    return value


def _starting(model: EngineModel, text: str) -> EngineModel:
    """With starts of a time, or of a time between two."""
    low, _, high = text.partition("..")
    least, most = duration(low), duration(high or low)
    if not 0 < least <= most:
        raise XpydError(f"--cold-start {text}: write a duration above 0, or two, the shorter one first, as 2m..5m")
    mean = (least + most) / 2
    return msgspec.structs.replace(model, cold_start=mean, cold_spread=(most - least) / 2 / mean)


def rules_of(service: DisaggService | None) -> RouterRules:
    """From the document."""
    if service is None:
        return RouterRules()
    router = service.spec.router
    return RouterRules(
        queue_timeout_s=router.queue_timeout_s, queue_size=router.queue_size, routers=router.most_sidecars,
        skip_below=router.skip_prefill.below_tokens, onto_decode=router.on_no_prefill == "decode",
    )
