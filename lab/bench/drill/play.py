"""What is played: an hour of traffic and the instances that serve it, ten times as fast, and what the simulation makes of
the very same. Pure.

    hour    3600 s, prefill of 2,500 tokens/s, steps of 20 ms, cold starts of two minutes, goals of 5 s and 60 ms
    drill    360 s, prefill of 25,000 tokens/s, steps of 2 ms, cold starts of 12 s, goals of 0.5 s and 6 ms

All times of the model and of the document are divided; what the operator has of its own (its look every five seconds) is
not, in the drill and in the simulation alike. So what is compared is one play, in two ways.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from xpyd_operator.api.decode import decode_service
from xpyd_operator.plan.planner.run import bounds_of, goals_of
from xpyd_operator.simulation.engine import EngineModel
from xpyd_operator.simulation.families import make_trace
from xpyd_operator.simulation.outcome import Pair, Run
from xpyd_operator.simulation.rules import RouterRules
from xpyd_operator.simulation.study import play_planner
from xpyd_operator.simulation.trace import Trace

FASTER = 10.0
HOUR_ENGINE = EngineModel(prefill_start=0.02, prefill_rate=2500, step_base=0.02, step_per_request=0.0004, max_requests=96,
                          kv_tokens=400_000, handover=0.05, kv_bytes=147_456, link=12.5e9, cold_start=120)
TTFT_S, TPOT_S, INTERVAL_S, QUEUE_S = 5.0, 0.06, 50.0, 600.0
MODEL = "org/tiny"
START: Pair = (1, 1)
MOST: Pair = (8, 5)


class Play(NamedTuple):
    """One scenario, in the drill's own time."""

    family: str
    seed: int
    trace: Trace
    engine: EngineModel
    faster: float

    @property
    def ttft_s(self) -> float:
        """The goal for the first token, 95th percentile."""
        return TTFT_S / self.faster

    @property
    def tpot_s(self) -> float:
        """The goal for each further one."""
        return TPOT_S / self.faster

    @property
    def lasts_s(self) -> float:
        """Until the last request comes."""
        return self.trace[-1].at


def play_of(family: str, seed: int, faster: float = FASTER) -> Play:
    """The scenario of a family of traffic. Raises XpydError: there is none of that name."""
    trace = [each._replace(at=each.at / faster) for each in make_trace(family, seed)]
    return Play(family, seed, trace, hurried(HOUR_ENGINE, faster), faster)


def hurried(engine: EngineModel, faster: float) -> EngineModel:
    """An instance that does everything so many times as fast."""
    shorter = {name: getattr(engine, name) / faster for name in (
        "prefill_start", "prefill_quadratic", "step_base", "step_per_request", "step_per_token", "handover",
        "handover_per_token", "cold_start", "switch")}
    longer = {name: getattr(engine, name) * faster for name in ("prefill_rate", "link")}
    return msgspec.structs.replace(engine, **shorter, **longer)


def document(play: Play, name: str, ports: tuple[int, int, int], routers: int) -> dict[str, Any]:
    """The service, as a person would write it. ``ports``: for clients, agents, and the operator."""
    http, members, admin = ports
    roles = {role: {"scaling": {"min": start, "max": most}}
             for role, start, most in zip(("prefill", "decode"), START, MOST, strict=True)}
    return {
        "apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService", "metadata": {"name": name},
        "spec": roles | {
            "model": {"source": MODEL}, "engine": {"image": "engine:1"}, "drain": {"timeout": "60s"},
            "rollout": {"switchWindow": "0s"},
            "router": {"placement": "deployment", "replicas": routers,
                       "ports": {"http": http, "members": members, "admin": admin},
                       "hold": f"{QUEUE_S / play.faster:g}s"},
            "planner": {"mode": "auto", "interval": f"{INTERVAL_S / play.faster:g}s",
                        "slo": {"ttftP95": _milliseconds(play.ttft_s), "tpotP95": _milliseconds(play.tpot_s)}}}}


def simulated(play: Play, routers: int) -> Run:
    """The same by the simulation: the planner of the same document, from the same counts."""
    service = decode_service(document(play, "drill", (10001, 30001, 10002), routers)).service
    rules = RouterRules(queue_timeout_s=service.spec.router.queue_timeout_s, queue_size=service.spec.router.queue_size,
                        routers=routers)
    goals = goals_of(service, play.engine.cold_start)
    run, _ = play_planner(play.trace, play.engine, goals, bounds_of(service), START, rules=rules, seed=play.seed)
    return run


def _milliseconds(seconds: float) -> str:
    return f"{round(seconds * 1e3)}ms"
