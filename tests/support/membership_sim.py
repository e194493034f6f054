"""A simulated service: agents' own state machines and encoders, a network that loses, and one roster. Time is simulated.

    world = World(256, seed=1, lost=0.1)
    world.run(600.0)
    world.evicted, world.unpicked_s …

Every agent beats each interval from a random phase. A beat is encoded as an agent does and decoded as a router does. The
roster ticks every second; its probes are answered by the engines, after a delay or not at all.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import msgspec
from agent_fakes import config_of, record_of

from xpyd_sidecar.agent.beat import Machine, ProbeDone, ProbeResult
from xpyd_sidecar.contract.ids import AgentId, InstanceName, Role
from xpyd_sidecar.contract.membership import Load, Up
from xpyd_sidecar.router.fleet.member import HealthResult, InstanceLost, Instruction, ProbeInstance, RosterChange
from xpyd_sidecar.router.fleet.roster import Roster

JOINED_S = 30.0
"""By then all have joined, however many of their first beats were lost."""
_decode = msgspec.msgpack.Decoder(Up).decode


class Instance:
    """An agent and its engine."""

    def __init__(self, index: int) -> None:
        config = config_of(role=(Role.PREFILL, Role.DECODE)[index % 2], advertise_host="10.0.0.1", advertise_port=index + 1)
        self.name = InstanceName(f"test-e{index}")
        self.machine = Machine(msgspec.structs.replace(config, instance=self.name), AgentId(f"{index:020x}"))
        self.alive = True
        self.record = record_of(f"{index:032x}")
        for _ in range(2):
            self.machine.handle(ProbeDone(ProbeResult("up", records=(self.record,), load=Load(running=1), model="m"),
                                          ()), 0.0)


class World:
    """``lost``: share of beats that never arrive; ``unanswered``: share of probes of living engines without an answer."""

    def __init__(self, instances: int, *, seed: int, lost: float = 0.0, unanswered: float = 0.0, interval_s: float = 3.0,
                 missed_beats: int = 3) -> None:
        self.rng = random.Random(seed)
        self.roster = Roster(config_of().service, started=0.0, settle_s=8.0, missed_beats=missed_beats)
        self.instances = {each.name: each for each in map(Instance, range(instances))}
        self.now = 0.0
        self.beats = self.dropped = self.probes = 0
        self.evicted: list[tuple[float, InstanceName]] = []
        self.suspended: list[tuple[float, InstanceName]] = []
        self.given_up = 0
        """Times legs were given up."""
        self.unpicked_s = 0.0
        """Seconds times living instances that were not picked, after all had joined."""
        self._lost, self._unanswered, self._interval_s = lost, unanswered, interval_s
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        for each in self.instances.values():
            self._at(self.rng.uniform(0, interval_s), lambda each=each: self._beat(each))  # type: ignore[misc]
        self._at(1.0, self._tick)

    def run(self, seconds: float) -> None:
        """Go on for so long."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, act = heapq.heappop(self._queue)
            act()
        self.now = end

    def kill(self, name: InstanceName) -> None:
        """The node is gone: no beat, no answer, no reset."""
        self.instances[name].alive = False

    def _at(self, when: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (when, self._order, act))

    def _beat(self, instance: Instance) -> None:
        if not instance.alive:
            return
        instance.machine.handle(ProbeDone(ProbeResult("up", records=(instance.record,), load=Load(self.rng.randrange(9)),
                                                      model="m"),
                                       ()), self.now)
        raw = msgspec.msgpack.encode(instance.machine.heartbeat())
        self.beats += 1
        if self.rng.random() < self._lost:
            self.dropped += 1
        else:
            self._do(self.roster.on_message(self.now, _decode(raw)))
        self._at(self.now + self._interval_s * self.rng.uniform(0.95, 1.05), lambda: self._beat(instance))

    def _tick(self) -> None:
        self._do(self.roster.on_tick(self.now))
        if self.now > JOINED_S:
            picked = sum(len(self.roster.pickable(role)) for role in Role)
            self.unpicked_s += sum(each.alive for each in self.instances.values()) - picked
        self._at(self.now + 1.0, self._tick)

    def _do(self, instructions: list[Instruction]) -> None:
        for each in instructions:
            match each:
                case ProbeInstance():
                    self.probes += 1
                    silent = not self.instances[each.instance].alive or self.rng.random() < self._unanswered
                    self._at(self.now + (each.patience_s if silent else 0.01), lambda each=each, silent=silent:  # type: ignore[misc]
                             self._probed(each, HealthResult.SILENT if silent else HealthResult.HEALTHY))
                case RosterChange(kind="evicted"):
                    self.evicted.append((self.now, each.instance))
                case RosterChange(kind="suspended"):
                    self.suspended.append((self.now, each.instance))
                case InstanceLost():
                    self.given_up += 1
                case _:
                    pass

    def _probed(self, probe: ProbeInstance, result: HealthResult) -> None:
        self._do(self.roster.on_probe(self.now, probe.instance, probe.incarnation, result, "no answer"))
