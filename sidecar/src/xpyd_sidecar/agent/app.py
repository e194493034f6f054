"""The agent's half of a sidecar: looks, beats, control socket, drain.

Two loops that do not wait for each other: one looks at the engine, one sends beats. A hanging engine thus never keeps a
beat back, and routers learn from the beats that it hangs. A third one looks whether the role has changed (``role``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from xpyd_sidecar.agent.beat import (
    SILENT_BEATS,
    AdaptersTold,
    BeatNow,
    DrainAsked,
    DrainEnded,
    Event,
    Machine,
    ProbeDone,
    ProbeResult,
    RoleTold,
    UndrainAsked,
)
from xpyd_sidecar.agent.beats import Beats, Resolve, system_resolve
from xpyd_sidecar.agent.control import Control, TooOld
from xpyd_sidecar.agent.engine import Probe
from xpyd_sidecar.agent.liveness import Liveness
from xpyd_sidecar.agent.member_metrics import MemberFigures
from xpyd_sidecar.agent.remote import Remote
from xpyd_sidecar.agent.role import RoleFiles
from xpyd_sidecar.agent.rounds import Rounds
from xpyd_sidecar.contract import adapters, assignment, duty, keys
from xpyd_sidecar.contract.adapters import AdapterOrder
from xpyd_sidecar.contract.assignment import Assignment
from xpyd_sidecar.contract.duty import EngineRole
from xpyd_sidecar.contract.group import MemberAnswer
from xpyd_sidecar.contract.ids import AgentId, State
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.launch import AgentConfig, SidecarConfig
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.process import resources
from xpyd_sidecar.process.beside import Draining

logger = logging.getLogger(__name__)

FAST_S = 0.5
"""Between looks (and beats) while the state is about to change: starting, draining."""
LOOK_S = 1.0
"""Between looks while ready: how late a dead engine is noticed."""
ROLE_S = 1.0
"""Between looks at the file that tells the role."""


class Agent:
    """One agent. ``run`` it until ``stop``."""

    def __init__(self, config: SidecarConfig, key: ServiceKey, resolve: Resolve = system_resolve,
                 draining: Draining | None = None) -> None:
        """Opens nothing yet. ``draining`` is told of drains.

        Raises:
            ConfigError: the configuration has no agent, or names a key of before that is none.
        """
        if config.agent is None:
            raise ConfigError("an agent needs its settings - at `$.agent`")
        resources.raise_files()
        self._config = config.agent
        self._run_dir = Path(config.run_dir)
        self._draining = draining or Draining()
        self._machine = Machine(config, AgentId(f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(4)}"))
        self._loop = asyncio.get_running_loop()
        self._beats = Beats(config.agent.routers, key, heartbeat_s=config.agent.beat_s,
                            resolve_s=config.agent.resolve_s, resolve=resolve, before=_before(config.agent))
        self._probe = Probe(config.agent, self._run_dir)
        self._liveness = Liveness(config.agent.startup_timeout_s, SILENT_BEATS * config.agent.heartbeat_s,
                                  server=config.agent.group is None)
        self._control = Control(self._run_dir, self)
        self._remote: Remote | None = None
        if config.agent.listen is not None:
            self._remote = Remote(config.agent.listen, key, self, config.instance,
                                  members=config.agent.group is not None)
        self._rounds: Rounds | None = None
        if config.agent.group is not None:
            self._rounds = Rounds(config, config.agent.group, key, self._standing, self._led,
                                  drains=self._members_ask)
            if self._remote is not None:
                self._remote.rounds, self._remote.probed = self._rounds, self._probed
                self._remote.measured = self._measured
        self._told = RoleFiles(self._run_dir, config.agent.assignment_file)
        self._look_now = asyncio.Event()
        self._beat_now = asyncio.Event()
        self._looked = asyncio.Event()
        self._drain_over: asyncio.Future[tuple[bool, str]] | None = None
        self._drain_deadline = float("inf")
        self._own_drain = False
        """The drain was asked of this agent, not by another member."""
        self._started = self._loop.time()
        self._starting_since: float | None = self._started
        self._said_late = False
        self._duty: EngineRole | None = None
        self._complaint = resources.Complaint("the engine cannot be looked at, and counts as before")

    async def run(self, stop: asyncio.Event) -> None:
        """Speak for the engine until ``stop``, then say goodbye.

        Raises:
            ConfigError: the control socket cannot be opened.
        """
        try:
            # Before the first beat: one that says the role of before would be refused.
            self._look_at_role()
            self._look_at_adapters()
            await self._control.start()
            self._tell_engine()
            if self._remote is not None:
                await self._remote.start()
            logger.info("agent started", extra={"engine": self._config.engine, "role": self._machine.role.value,
                                                "epoch": self._machine.epoch})
            tasks = [asyncio.ensure_future(work) for work in
                     (*self._loops(), self._role_loop(), self._beats.keep_resolving(), stop.wait())]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await self._beats.close(self._machine.last_message())
            await self._control.close()
            if self._remote is not None:
                await self._remote.close()
            await self._probe.close()
            logger.info("agent ended")

    def _loops(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """A member that is led has no server to look at and no router to tell of it."""
        if self._rounds is None:
            return (self._look_loop(), self._beat_loop())
        return (self._rounds.run(), *((self._look_loop(), self._beat_loop()) if self._rounds.leads else ()))

    def status(self) -> dict[str, Any]:
        """What GET /status answers."""
        now, machine = self._loop.time(), self._machine
        routers = self._beats.routers()
        return {
            "state": machine.state.value,
            "role": machine.role.value,
            "epoch": machine.epoch,
            "incarnation": machine.incarnation,
            "engine": self._config.engine,
            "advertise_http": self._config.advertised_address,
            "drained": machine.drained,
            "waits_for": "" if machine.drained else machine.waits_for(routers, now),
            "load": msgspec.to_builtins(machine.load),
            "problem": machine.problem,
            "hangs": self.hangs(),
            "pairs_refused": msgspec.to_builtins(machine.pairs.refused),
            "links": list(machine.pairs.links),
            "uptime_s": round(now - self._started, 3),
            **({"group": self._rounds.status()} if self._rounds is not None else {}),
            "routers": [{
                "address": router.address,
                "name": router.name,
                "ack_age_s": round(now - router.heard, 3) if router.acked >= 0 else None,
                "refused": router.refused,
            } for router in routers],
        }

    def drain(self) -> None:
        """Begin to drain. A member that is led asks its leader, and is drained once the whole group is."""
        self._own_drain = True
        self._begin_drain()

    def _begin_drain(self) -> None:
        now = self._loop.time()
        if self._drain_over is None:
            self._drain_over = self._loop.create_future()
        elif now < self._drain_deadline:
            return
        self._drain_deadline = now + self._config.drain_timeout_s
        if self._is_led:
            self._ask_leader(True)
            return
        self._apply(DrainAsked())
        self._draining.announce(True)

    def undrain(self) -> None:
        """Take the drain back, but for what other members have asked for."""
        self._own_drain = False
        if self._rounds is None or not self._rounds.asking:
            self._end_drain()

    def _end_drain(self) -> None:
        if self._is_led:
            self._ask_leader(False)
            self._drained(False, "the drain was taken back")
            self._drain_over = None
            return
        self._apply(UndrainAsked())
        self._drain_over = None
        self._draining.announce(False)

    async def wait_drained(self, timeout_s: float | None) -> tuple[bool, str]:
        """``(drained, reason)`` once drained, at the drain deadline or after ``timeout_s``."""
        over = self._drain_over
        if over is None:
            return False, "not draining"
        left_s = self._drain_deadline - self._loop.time()
        try:
            async with asyncio.timeout(left_s if timeout_s is None else min(left_s, timeout_s)):
                return await asyncio.shield(over)
        except TimeoutError:
            reason = ("the leader has not drained the group" if self._is_led
                      else self._machine.waits_for(self._beats.routers(), self._loop.time()))
            logger.warning("not drained in time: %s", reason)
            return False, f"deadline passed: {reason}"

    def assign(self, told: Assignment) -> None:
        """Take a role of a higher epoch: kept first, then said to all routers. What runs goes on.

        Raises:
            TooOld: the epoch has passed, or is that of another role.
            OSError: it cannot be kept; nothing has changed.
        """
        machine = self._machine
        if told.epoch < machine.epoch or (told.epoch == machine.epoch and told.role is not machine.role):
            raise TooOld(f"epoch {told.epoch} as {told.role}: the instance is {machine.role} of epoch {machine.epoch}")
        if told.epoch > machine.epoch:
            assignment.keep(self._run_dir, told)
            self._apply(RoleTold(told))

    def order_adapters(self, order: AdapterOrder) -> None:
        """Have the engine follow this order: kept first, then the API server reads it, then routers hear how far it is.

        Raises:
            OSError: it cannot be kept; nothing has changed.
        """
        adapters.write_order(self._run_dir, order)
        self._apply(AdaptersTold(order))

    def _look_at_adapters(self) -> None:
        try:
            order = adapters.read_order(self._run_dir)
        except (OSError, ValueError) as error:
            logger.warning("the order of adapters that was told before cannot be read: %s", error)
            return
        if order is not None:
            self._apply(AdaptersTold(order))

    def _standing(self) -> tuple[Assignment, bool, bool]:
        """For the other members of the group."""
        machine = self._machine
        return Assignment(machine.role, max(machine.epoch, 1)), machine.state is State.DRAINING, machine.drained

    def _led(self, answer: MemberAnswer) -> None:
        """A follower is what its leader says: its engine's ranks are told by the same file."""
        if answer.epoch > self._machine.epoch:
            self._apply(RoleTold(Assignment(answer.role, answer.epoch)))
        if answer.draining != (self._machine.state is State.DRAINING):
            self._apply(DrainAsked() if answer.draining else UndrainAsked())
        if answer.drained:
            self._drained(True, "the group is drained")

    @property
    def _is_led(self) -> bool:
        """It is a member of a group, and not its leader."""
        return self._rounds is not None and not self._rounds.leads

    def _ask_leader(self, drain: bool) -> None:
        assert self._rounds is not None
        self._rounds.drain = drain

    def _members_ask(self) -> None:
        """Members that are to go have asked for a drain, or none does any more."""
        assert self._rounds is not None
        if self._rounds.asking:
            self._begin_drain()
        elif not self._own_drain:
            self._end_drain()

    def hangs(self) -> str:
        """Why the engine is to be ended, for whoever ends it; empty: it lives, as far as anybody knows."""
        group = self._rounds.hangs(self._config.startup_timeout_s) if self._rounds is not None else ""
        return group or self._liveness.problem

    def stacks(self) -> bool:
        """Whether who asks is to have the stacks of the engine that is to be ended written."""
        return self._liveness.stacks()

    def _probed(self) -> str:
        """Why this member is not ready, for a kubelet. One that drains is not ready, so that the others of its group may
        be evicted with it.
        """
        assert self._rounds is not None
        if self._machine.state is State.DRAINING:
            return "the group is drained"
        if self._rounds.leads:
            return "" if self._machine.state is State.READY else self._machine.problem or "the group does not serve"
        return self._rounds.serves()

    def _measured(self) -> MemberFigures:
        assert self._rounds is not None
        return self._rounds.figures(serving=not self._probed())

    def _drained(self, drained: bool, reason: str) -> None:
        if self._drain_over is not None and not self._drain_over.done():
            self._drain_over.set_result((drained, reason))

    def _look_at_role(self) -> None:
        for told in self._told.read_assignments():
            self._apply(RoleTold(told))

    async def _role_loop(self) -> None:
        while True:
            await asyncio.sleep(ROLE_S)
            self._look_at_role()
            if self._is_led and self._rounds is not None and self._rounds.idle:
                self._drained(True, "nothing runs here")  # perhaps the leader has gone before

    def _apply(self, event: Event) -> None:
        for instruction in self._machine.handle(event, self._loop.time()):
            match instruction:
                case BeatNow(reason=reason):
                    machine = self._machine
                    logger.info("state", extra={"state": machine.state.value, "role": machine.role.value, "why": reason,
                                                "incarnation": machine.incarnation})
                    self._tell_engine()
                    self._beat_now.set()
                    self._look_now.set()
                case DrainEnded(drained=drained, reason=reason):
                    logger.info("drain ended", extra={"drained": drained, "why": reason})
                    if not self._is_led:
                        self._drained(drained, reason)

    def _tell_engine(self) -> None:
        machine = self._machine
        now = EngineRole(machine.role, machine.epoch, machine.state is State.DRAINING)
        if now == self._duty:
            return
        try:
            duty.write(self._run_dir, now)
        except OSError as error:
            logger.warning("the engine is not told that it is %s: %s", now, error)
            return
        self._duty = now

    async def _look_loop(self) -> None:
        scraped = float("-inf")
        while True:
            began = self._loop.time()
            calm = self._machine.state is State.READY
            scrape = not calm or began - scraped >= self._config.heartbeat_s - LOOK_S / 2
            if scrape:
                scraped = began
            look = await self._probe.probe(scrape=scrape, others=self._rounds.follower_ranks()
                                           if self._rounds is not None else ())
            if look.health == "unmade":
                self._complaint.add(resources.Lack(look.problem))
            if self._rounds is not None:
                look = self._rounds.judge_probe(look)
            self._apply(ProbeDone(look, self._beats.routers()))
            self._look_alive(look)
            self._looked.set()
            self._say_late()
            await _wait_or(self._look_now, LOOK_S if self._machine.state is State.READY else FAST_S)

    def _look_alive(self, look: ProbeResult) -> None:
        """Whether the engine stands still; routers hear at once of what changes."""
        liveness, state = self._liveness, self._machine.state
        before, problem = liveness.restart, liveness.problem
        liveness.on_probe(self._loop.time(), look, self._beats.routers(), serves=state is State.READY,
                      draining=state is State.DRAINING)
        if liveness.problem and not problem:
            logger.error("the engine stands still and is to be restarted: %s", liveness.problem,
                         extra={"engine": self._config.engine})
        if liveness.restart is not before:
            logger.warning("restart of the engine: %s", liveness.restart.value or "no need of it",
                           extra={"why": liveness.reason, "incarnation": self._machine.incarnation})
            self._beat_now.set()

    async def _beat_loop(self) -> None:
        # An agent that comes back beside an engine that serves must not call it starting: routers would pick it no more.
        await self._looked.wait()
        while True:
            machine = self._machine
            self._beats.send(machine.heartbeat(self._liveness.restart), self._probe.prefixes(machine.incarnation))
            calm = self._machine.state is State.READY or self._machine.drained
            await _wait_or(self._beat_now, self._config.beat_s if calm else min(FAST_S, self._config.beat_s))

    def _say_late(self) -> None:
        """Once per start: the engine is not up although its time to start has passed."""
        now = self._loop.time()
        if self._machine.state is not State.STARTING:
            self._starting_since, self._said_late = None, False
            return
        if self._starting_since is None:
            self._starting_since = now
        if not self._said_late and now - self._starting_since > self._config.startup_timeout_s:
            self._said_late = True
            logger.error("the engine is not ready after %g s: %s", self._config.startup_timeout_s, self._machine.problem,
                         extra={"engine": self._config.engine})


def _before(config: AgentConfig) -> ServiceKey | None:
    """The key that the service had before, where it is told."""
    if config.previous_key_file is None:
        return None
    try:
        return keys.read_before(Path(config.previous_key_file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{error} - at `$.agent.previous_key_file`") from None


async def _wait_or(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    event.clear()


async def run_agent(config: SidecarConfig, key: ServiceKey, stop: asyncio.Event, draining: Draining | None = None) -> None:
    """Run the agent of ``config`` until ``stop`` is set; the router in the same process listens to ``draining``.

    Raises:
        ConfigError: no agent configured, or its control socket cannot be opened.
    """
    await Agent(config, key, draining=draining).run(stop)
