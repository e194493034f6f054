"""A world of instances without processes: applies the actions of the planner and lets time pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from xpyd_operator.plan import backoff
from xpyd_operator.plan.actions import (
    Action,
    Create,
    Drain,
    Plan,
    Remove,
    Restart,
    StartRouter,
    StopRouter,
    Switch,
    Undrain,
)
from xpyd_operator.plan.desired import DesiredService, Revision, RoleTarget
from xpyd_operator.plan.observed import Instance, ObservedRouter, ObservedService, ObservedUnit, Phase
from xpyd_operator.plan.step import step
from xpyd_sidecar.contract.ids import Role, ServiceName


def desired(
    prefill: int, decode: int, *, revision: str = "r1", router: str | None = "router1", max_surge: int = 1,
    max_unavailable: int = 0, **more: object,
) -> DesiredService:
    """What is wanted of processes; surge and what may be missing are the same for both roles."""
    return DesiredService(
        service=ServiceName("qwen"),
        prefill=RoleTarget(prefill, Revision(revision), max_surge, max_unavailable),
        decode=RoleTarget(decode, Revision(revision), max_surge, max_unavailable),
        router=Revision(router) if router else None,
        **more,  # type: ignore[arg-type]
    )


@dataclass
class Engine:
    name: str
    ordinal: int
    role: Role
    revision: Revision
    phase: Phase = Phase.STARTING
    since: float = 0.0
    load: int = 0
    crashes: int = 0
    ended: float = 0.0
    epoch: int = 1
    switched: float = -1e9
    deaf: bool = False
    """Its agent does not hear of a new role."""


@dataclass
class World:
    """Starting takes ``start_s``, draining ``drain_s``, removing ``stop_s``; revisions in ``broken`` crash at start."""

    now: float = 1000.0
    start_s: float = 10.0
    drain_s: float = 5.0
    stop_s: float = 2.0
    switch_s: float = 0.5
    broken: set[str] = field(default_factory=set)
    engines: dict[str, Engine] = field(default_factory=dict)
    router: ObservedRouter | None = None
    fleet_known: bool = True
    log: list[str] = field(default_factory=list)

    def observe(self) -> ObservedService:
        return ObservedService(
            instances=tuple(
                Instance(
                    name=engine.name,  # type: ignore[arg-type]
                    ordinal=engine.ordinal,
                    role=engine.role,
                    revision=engine.revision,
                    phase=engine.phase,
                    since=engine.since,
                    load=engine.load,
                    units=(ObservedUnit("engine", engine.phase is not Phase.CRASHED, engine.crashes, engine.ended,
                                        "exit code 1"),),
                    epoch=engine.epoch,
                    switching=engine.epoch > 1 and (engine.deaf or self.now - engine.switched < self.switch_s),
                    assigned=engine.switched,
                )
                for engine in self.engines.values()
            ),
            router=self.router,
            fleet_known=self.fleet_known,
        )

    def apply(self, action: Action) -> None:
        self.log.append(str(action))
        match action:
            case Create():
                assert action.instance not in self.engines
                self.engines[action.instance] = Engine(
                    action.instance, action.ordinal, action.role, action.revision, since=self.now
                )
            case Drain():
                self.enter(self.engines[action.instance], Phase.DRAINING)
            case Undrain():
                assert self.engines[action.instance].phase is Phase.DRAINING
                self.enter(self.engines[action.instance], Phase.READY)
            case Remove():
                self.enter(self.engines[action.instance], Phase.STOPPING)
            case Switch():
                engine = self.engines[action.instance]
                assert engine.phase is Phase.READY, "only who serves can switch"
                assert action.epoch == engine.epoch + 1
                engine.role, engine.epoch, engine.switched = action.role, action.epoch, self.now
            case Restart():
                self.enter(self.engines[action.instance], Phase.STARTING)
            case StartRouter():
                self.router = ObservedRouter(action.revision, ObservedUnit("router", alive=True), ready=True)
            case StopRouter():
                self.router = None

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for engine in list(self.engines.values()):
            age = self.now - engine.since
            if engine.phase is Phase.STARTING and engine.revision in self.broken and age >= 1:
                self.crash(engine.name)
            elif engine.phase is Phase.STARTING and age >= self.start_s:
                self.enter(engine, Phase.READY)
            elif engine.phase is Phase.DRAINING and age >= self.drain_s:
                self.enter(engine, Phase.DRAINED)
            elif engine.phase is Phase.STOPPING and age >= self.stop_s:
                del self.engines[engine.name]

    def crash(self, name: str) -> None:
        engine = self.engines[name]
        ran_s = self.now - engine.since if engine.phase is Phase.READY else 0.0
        engine.crashes = backoff.count_crash(engine.crashes, ran_s)
        engine.ended = self.now
        self.enter(engine, Phase.CRASHED)

    def crash_router(self) -> None:
        assert self.router is not None
        unit = ObservedUnit("router", alive=False, crashes=1, ended=self.now, exit="signal 9")
        self.router = ObservedRouter(self.router.revision, unit, ready=False)

    def tick(self, want: DesiredService, seconds: float = 1.0) -> Plan:
        plan = step(want, self.observe(), self.now)
        for action in plan.actions:
            self.apply(action)
        self.advance(seconds)
        return plan

    def run(self, want: DesiredService, *, limit: int = 500) -> list[str]:
        """Until nothing moves and nothing waits; the actions taken, in order."""
        begin = len(self.log)
        for _ in range(limit):
            still = all(engine.phase is Phase.READY for engine in self.engines.values())
            if self.tick(want).settled and still:
                return self.log[begin:]
        raise AssertionError(f"not settled after {limit} steps: {self.log[begin:]}, {self.engines}")

    def count(self, role: Role, *phases: Phase) -> int:
        return sum(engine.role is role and (not phases or engine.phase in phases) for engine in self.engines.values())

    def ready(self, role: Role) -> int:
        return self.count(role, Phase.READY)

    def shuffle_load(self, random: Random) -> None:
        for engine in self.engines.values():
            engine.load = random.randrange(20)

    def enter(self, engine: Engine, phase: Phase) -> None:
        engine.phase, engine.since = phase, self.now
