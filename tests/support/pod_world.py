"""A world of pods that behaves as Kubernetes does: grace periods, restarts by the kubelet, lost nodes, full clusters.

Nothing of the operator lives here: a pod is what a backend would see of it, and the planner's memory is none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from xpyd_operator.api.operation import Rollout
from xpyd_operator.plan import backoff, counts
from xpyd_operator.plan.absent import QUEUED, UNPLACED, Absence, Breakage, Waiting, waits
from xpyd_operator.plan.actions import Action, Create, Drain, Label, Plan, Remove, Switch
from xpyd_operator.plan.desired import STARTUP_S, DesiredService, Revision, RoleTarget
from xpyd_operator.plan.observed import Instance, ObservedService, Phase
from xpyd_operator.plan.step import step
from xpyd_sidecar.contract.ids import Fingerprint, InstanceName, Role, ServiceName

ONE_BY_ONE = Rollout()
ROLES = (Role.PREFILL, Role.DECODE)


def wish(
    prefill: int, decode: int, revision: str = "r1", decode_revision: str = "", *, rollout: Rollout = ONE_BY_ONE,
    **more: object,
) -> DesiredService:
    """What is wanted of pods; ``decode_revision`` where the roles differ."""
    settings: dict[str, object] = {"max_sidecars": 8, "keep_terminating": False, **more}
    return DesiredService(
        service=ServiceName("qwen"),
        prefill=bounded(RoleTarget(prefill, Revision(revision)), rollout),
        decode=bounded(RoleTarget(decode, Revision(decode_revision or revision)), rollout),
        router=None,
        **settings,  # type: ignore[arg-type]
    )


def bounded(target: RoleTarget, rollout: Rollout) -> RoleTarget:
    """The same with the bounds that a document sets."""
    return counts.target(target.replicas, target.revision, rollout)


@dataclass
class Pod:
    """One engine pod."""

    name: InstanceName
    ordinal: int
    role: Role
    revision: Revision
    phase: Phase = Phase.STARTING
    since: float = 0.0
    scheduled: bool = False
    admitted: bool = True
    """No scheduling gate holds it."""
    failed: str = ""
    """Reason for which it never runs again."""
    ends: float | None = None
    """When its containers are through with ending; None while nobody deleted it."""
    crashes: int = 0
    load: int = 0
    roster: bool = False
    router: bool = False
    hears: float = 0.0
    """Since when agents beat to it."""
    epoch: int = 1
    switched: float = -1e9
    """When its role was changed last."""


@dataclass
class PodWorld:
    """Starting takes ``start_s``, ending ``drain_s`` where requests run and ``stop_s`` where not."""

    now: float = 1000.0
    start_s: float = 8.0
    drain_s: float = 5.0
    stop_s: float = 2.0
    settle_s: float = 4.0
    switch_s: float = 0.5
    """From a new role until everybody knows."""
    room: int = 1000
    """Pods that find a node."""
    quota: int | None = None
    """Pods that are admitted, in the order in which they were made; the others wait at a scheduling gate. None: all."""
    broken: set[str] = field(default_factory=set)
    """Revisions that crash at start."""
    slow: set[str] = field(default_factory=set)
    """Revisions that never get ready."""
    prints: dict[str, str] = field(default_factory=dict)
    """Fingerprint by revision; that of the others is the same."""
    answers: bool = True
    """The operator reaches a router."""
    pods: dict[str, Pod] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    freed: float = 0.0
    """When a pod gave its place back last, as far as it was looked at."""
    placed: set[str] = field(default_factory=set)
    """Pods that had one then."""

    def observe(self) -> ObservedService:
        """What a backend would make of it."""
        placed: set[str] = {pod.name for pod in self.pods.values() if pod.scheduled}
        if self.placed - placed:
            self.freed = self.now
        self.placed = placed
        known = self.answers and any(self.settled(pod) and pod.router for pod in self.serving(Role.DECODE))
        return ObservedService(
            instances=tuple(self._instance(pod, known) for pod in sorted(self.pods.values(), key=lambda pod: pod.ordinal)),
            front=None if known else Waiting("NoRouter", "no pod routes yet"),
            fleet_known=known,
            freed=self.freed,
        )

    def _instance(self, pod: Pod, known: bool) -> Instance:
        return Instance(
            name=pod.name,
            ordinal=pod.ordinal,
            role=pod.role,
            revision=pod.revision,
            phase=pod.phase,
            since=pod.since,
            load=pod.load if known else 0,
            platform_crashes=pod.crashes,
            absent=self._absent(pod),
            fingerprint=self.fingerprint(pod) if known and pod.phase is Phase.READY else Fingerprint(""),
            roster=pod.roster,
            router=pod.router,
            settled=self.answers and self.settled(pod),
            epoch=pod.epoch,
            switching=self.now - pod.switched < self.switch_s,
            assigned=pod.switched,
        )

    def _absent(self, pod: Pod) -> Absence | None:
        if pod.phase is Phase.LOST:
            return Breakage("NodeLost", "its node is away")
        if pod.failed:
            return Breakage(pod.failed, "it was put off its node", replaced=True)
        if not pod.admitted:
            return Waiting(QUEUED, "it waits to be admitted", since=pod.since, place=True)
        if pod.phase is Phase.STARTING and not pod.scheduled:
            return waits(UNPLACED, "no node has room", self.now, since=pod.since, limit_s=STARTUP_S, place=True)
        if pod.phase is Phase.CRASHED:
            words = "exit code 1: no"
            return Breakage("CrashLoop", words) if pod.crashes >= backoff.LOOPING else Waiting("CrashLoop", words)
        return None

    def fingerprint(self, pod: Pod) -> Fingerprint:
        """Of its KV."""
        return Fingerprint(self.prints.get(pod.revision, "f" * 32))

    def settled(self, pod: Pod) -> bool:
        """Its router knows the roster."""
        runs = pod.scheduled and pod.phase in (Phase.STARTING, Phase.READY)
        return runs and pod.roster and self.now - pod.hears >= self.settle_s

    def serving(self, role: Role) -> list[Pod]:
        """Ready pods of a role that nobody deleted."""
        return [pod for pod in self.pods.values() if pod.role is role and pod.phase is Phase.READY]

    def existing(self, role: Role) -> list[Pod]:
        """Pods of a role, those that end included, those that are lost not."""
        return [pod for pod in self.pods.values() if pod.role is role and pod.phase is not Phase.LOST]

    def routing(self) -> list[Pod]:
        """Pods whose router serves clients."""
        return [pod for pod in self.serving(Role.DECODE) if pod.router and self.settled(pod)]

    def groups(self) -> dict[str, tuple[int, int]]:
        """Prefill and decode that serve, by fingerprint."""
        found: dict[str, tuple[int, int]] = {}
        for index, role in enumerate(ROLES):
            for pod in self.serving(role):
                pair = list(found.get(self.fingerprint(pod), (0, 0)))
                pair[index] += 1
                found[self.fingerprint(pod)] = (pair[0], pair[1])
        return found

    def apply(self, action: Action) -> None:
        """What the API server does with it."""
        self.log.append(str(action))
        match action:
            case Create():
                assert action.instance not in self.pods, f"{action.instance} exists"
                self.pods[action.instance] = Pod(
                    action.instance, action.ordinal, action.role, action.revision, since=self.now,
                    admitted=self.quota is None,
                )
                self._schedule()
            case Drain() | Remove():
                self.delete(action.instance)
            case Switch():
                pod = self.pods[action.instance]
                assert pod.phase is Phase.READY, "only who serves can switch"
                assert action.epoch == pod.epoch + 1, "an epoch twice"
                pod.role, pod.epoch, pod.switched = action.role, action.epoch, self.now
                pod.roster = pod.router = False
            case Label():
                pod = self.pods[action.instance]
                if action.roster and not pod.roster:
                    pod.hears = self.now
                pod.roster, pod.router = action.roster, action.router
            case _:
                raise AssertionError(f"not for pods: {action}")

    def delete(self, name: str) -> None:
        """Delete a pod: it gets its grace."""
        pod = self.pods[name]
        if pod.ends is None:
            pod.ends = self.now + (self.drain_s if pod.phase is Phase.READY else self.stop_s)
            self._enter(pod, Phase.STOPPING)

    def lose(self, name: str) -> None:
        """Its node goes away, and the pod is to end there."""
        pod = self.pods[name]
        pod.ends = self.now
        self._enter(pod, Phase.LOST)

    def fail(self, name: str) -> None:
        """It is evicted."""
        pod = self.pods[name]
        if pod.ends is None:
            pod.failed = "Evicted"
            self._enter(pod, Phase.CRASHED)

    def crash(self, name: str) -> None:
        """Its engine ends by itself; the kubelet starts it again later."""
        pod = self.pods[name]
        if pod.ends is None and pod.scheduled and not pod.failed:
            ran_s = self.now - pod.since if pod.phase is Phase.READY else 0.0
            pod.crashes = backoff.count_crash(pod.crashes, ran_s)
            self._enter(pod, Phase.CRASHED)

    def nodes_back(self) -> None:
        """Lost nodes are there again, or removed: their pods end."""
        for name in [pod.name for pod in self.pods.values() if pod.phase is Phase.LOST]:
            del self.pods[name]

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        for pod in list(self.pods.values()):
            age = self.now - pod.since
            if pod.phase is Phase.STOPPING and pod.ends is not None and self.now >= pod.ends:
                del self.pods[pod.name]
            elif pod.phase is Phase.CRASHED and not pod.failed and age >= backoff.delay_s(pod.crashes):
                self._enter(pod, Phase.STARTING)
            elif pod.phase is Phase.STARTING and pod.scheduled and pod.revision in self.broken and age >= 1:
                self.crash(pod.name)
            elif pod.phase is Phase.STARTING and pod.scheduled and pod.revision not in self.slow and age >= self.start_s:
                self._enter(pod, Phase.READY)
        self._schedule()

    def _schedule(self) -> None:
        admitted = sum(pod.admitted for pod in self.pods.values())
        for pod in self.pods.values():
            if not pod.admitted and pod.ends is None and (self.quota is None or admitted < self.quota):
                pod.admitted, admitted = True, admitted + 1
        used = sum(pod.scheduled for pod in self.pods.values())
        for pod in self.pods.values():
            if pod.admitted and not pod.scheduled and pod.ends is None and used < self.room:
                pod.scheduled, pod.since, used = True, self.now, used + 1

    def _enter(self, pod: Pod, phase: Phase) -> None:
        pod.phase, pod.since = phase, self.now

    def tick(self, want: DesiredService, seconds: float = 1.0) -> Plan:
        """One round, then time."""
        plan = step(want, self.observe(), self.now)
        for action in plan.actions:
            self.apply(action)
        self.advance(seconds)
        return plan

    def run(self, want: DesiredService, *, limit: int = 600, quiet: int = 90) -> list[str]:
        """Until nothing was done for ``quiet`` seconds; the actions taken but for labels, in order."""
        begin, still = len(self.log), 0
        for _ in range(limit + quiet):
            still = 0 if self.tick(want).actions else still + 1
            if still >= quiet:
                return [line for line in self.log[begin:] if "route" not in line and "roster" not in line]
        raise AssertionError(f"no rest after {limit} s: {self.log[begin:][-20:]}")
