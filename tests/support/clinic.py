"""Readings for a doctor: a healthy service and host, and traffic played on engines that are known."""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

import msgspec

from xpyd_operator.doctor.learned import LearnedFigures
from xpyd_operator.doctor.reading import Examination, HostReading, ServiceReading
from xpyd_operator.doctor.replay import engine_of
from xpyd_operator.simulation.controllers import Static
from xpyd_operator.simulation.rules import PATIENT
from xpyd_operator.simulation.trace import Arrival
from xpyd_operator.simulation.world import World
from xpyd_sidecar.contract.fleet import Fleet, FleetInstance, Quantiles, Rates
from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.intake import Disaggregation, IntakeRates, LinkRate
from xpyd_sidecar.contract.membership import Load
from xpyd_sidecar.contract.sample import PackedSample, Sample, SampledRequest, pack_numbers

NAME = ServiceName("qwen")
KV_BYTES = 147_456
"""Of one token of an 8B model."""
GPU = LearnedFigures(prefill_start=0.012, prefill_per_token=1 / 20_000, step_base=0.008, step_per_request=0.00005,
                     handover=0.02, prompt=2000, output=200, rate=1.0, alone=0.0)
"""An engine on a GPU; its hand-over is without what decode's steps add."""


def traffic(prompt: int, rate: float, *, engine: LearnedFigures = GPU, prefills: int = 1, decodes: int = 1,
            seconds: int = 600, output: int = 200, seed: int = 1) -> Sample:
    """What a router would have kept of such traffic through so many engines. ``prompt``, ``output``: means, tokens."""
    random = Random(seed)
    at, trace = 0.0, []
    while (at := at + random.expovariate(rate)) < seconds:
        length = max(8, round(prompt * random.uniform(0.5, 1.5)))
        trace.append(Arrival(at, length, max(2, round(output * random.uniform(0.5, 1.5)))))
    left_s = engine.step_base / 2  # of decode's step that runs when KV comes, on average: no part of the simulation
    model = msgspec.structs.replace(engine_of(engine), handover=engine.handover + left_s)
    run = World(trace, model, (prefills, decodes), Static(), rules=PATIENT).play()
    free, found = [0.0] * prefills, []
    for one, ttft, tpot in zip(trace, run.ttft, run.tpot, strict=True):
        place = free.index(min(free))
        free[place] = max(free[place], one.at) + model.prefill_s(one.prompt)
        leg = free[place] - one.at
        total = ttft + tpot * (one.output - 1)
        found.append(SampledRequest(one.at, one.prompt, one.output, ttft, total, 0.0, leg, ttft - leg))
    return Sample(NAME, float(seconds), tuple(found))


def instance(name: str, role: Role, **more: Any) -> FleetInstance:
    """One that serves."""
    fields: dict[str, Any] = {
        "instance": InstanceName(name), "role": role, "epoch": 1, "state": State.READY,
        "incarnation": Incarnation(f"i-{name}"), "fingerprint": Fingerprint("f" * 32),
        "http": (HostPort("10.0.0.1:8000"),), "control": (HostPort("10.0.0.1:9"),),
        "model": "qwen", "load": Load(running=4, kv_usage=0.3), "drained": False, "in_flight": 4, "beat_age_s": 1.0}
    return FleetInstance(**(fields | more))


def intake(received_s: float, *, best: float = 12.5e9, **more: Any) -> IntakeRates:
    """What a decode instance tells that receives so many tokens a second."""
    return IntakeRates(**({"received_s": received_s, "bytes_s": received_s * KV_BYTES, "best_bytes_s": best, "loads_s": 2.0,
                           "wait_s": 0.2} | more))


def healthy(sample: Sample | None = None, **more: Any) -> ServiceReading:
    """1P1D whose decode receives all. ``more``: fields of the fleet that are otherwise."""
    fields: dict[str, Any] = {
        "service": NAME, "router": "qwen-e1", "uptime_s": 4000.0, "settled": True, "window_s": 60,
        "instances": (instance("p0", Role.PREFILL, intake=IntakeRates(computed_s=4000.0)),
                      instance("d0", Role.DECODE, intake=intake(4000.0))),
        "rates": Rates(requests=2.0), "requests_total": 4000,
        "latencies": {"ttft": Quantiles(120, 0.2, 0.4, 0.5), "handover": Quantiles(120, 0.02, 0.03, 0.04)},
        "disaggregation": Disaggregation("True", "Receiving", "decode received all", 1.0, (LinkRate("nixl", 0.6),))}
    return ServiceReading(Fleet(**(fields | more)), traffic(4000, 2.0) if sample is None else sample)


def sound(**more: Any) -> HostReading:
    """A host of which nothing is wrong. ``more``: what is otherwise."""
    fields: dict[str, Any] = {"memory": 512 << 30, "memory_free": 300 << 30, "shm": 64 << 30, "shm_free": 60 << 30,
                              "gpus": 8, "rdma": ("mlx5_0",)}
    return HostReading(**(fields | more))


def reading(service: ServiceReading | None = None, host: HostReading | None = None) -> Examination:
    """Both, healthy where nothing is given."""
    return Examination(host or sound(), service or healthy())


def packed(sample: Sample) -> PackedSample:
    """As a router tells it."""
    rows = [msgspec.structs.astuple(one) for one in sample.requests]
    return PackedSample(sample.service, 1000.0, 1000.0 + sample.covers_s,
                        pack_numbers(array("d", [1000.0 + row[0] for row in rows])),
                        pack_numbers(array("f", [value for row in rows for value in row[1:]])))
