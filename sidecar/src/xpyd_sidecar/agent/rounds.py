"""A member's agent among the others of its group: looks at its launcher, says hello to the leader, or counts the hellos.

    launcher ──member.json, pulses──▶ Seat ── hello, once a second and at changes ──▶ Lead (the leader's agent)
             ◀──────round.json─────        ◀── call, life, role, drain ─────────────
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from xpyd_sidecar.agent import ranks
from xpyd_sidecar.agent.beat import SLOW_LOOKS, ProbeResult
from xpyd_sidecar.agent.group import SILENT_S, Lead, Seat
from xpyd_sidecar.agent.member_metrics import MemberFigures
from xpyd_sidecar.agent.pulses import Pulses
from xpyd_sidecar.contract import group, keys, run_folder, signing
from xpyd_sidecar.contract.assignment import Assignment
from xpyd_sidecar.contract.group import (
    MOST_WORDS,
    ROUND,
    STATE,
    WIRE_VERSION,
    GroupRound,
    MemberAnswer,
    MemberHello,
    MemberRanks,
    MemberState,
    Pulse,
)
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.launch import GroupConfig, SidecarConfig
from xpyd_sidecar.contract.run_folder import FileT
from xpyd_sidecar.listening import bound
from xpyd_sidecar.process import resources
from xpyd_sidecar.process.whole_answer import read_whole

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.25
HELLO_S: Final = 1.0
TWIN_HELLOS: Final = 2.5
"""So many times later than the last hello of an agent's process another one may speak as the same member."""
ANSWER_S: Final = 2.0
ANSWER_MAX: Final = 64 << 10
PORTS: Final = range(31000, 32000)
"""Where engines of a group meet: below those that the kernel gives out, above those of engines of one host."""

Standing = Callable[[], tuple[Assignment, bool, bool]]
"""Role, draining, drained, as the leader's agent has them."""


class HelloRefused(Exception):
    """A hello that is not heard; the message says why."""


class Rounds:
    """One member's side. ``run`` it; the leader's also calls ``receive``."""

    def __init__(self, config: SidecarConfig, mine: GroupConfig, key: ServiceKey, standing: Standing,
                 told: Callable[[MemberAnswer], None], *, drains: Callable[[], None] = lambda: None) -> None:
        """Take up what the run folder says. ``told``: what the leader answers a follower; ``drains``: whether some member
        asks for a drain (``asking``) has changed.
        """
        assert config.agent is not None
        self._config, self._mine = config, mine
        self._host = mine.host or config.agent.advertise_host
        self._key = keys.derive(key, "agent call")
        self._run_dir = Path(config.run_dir)
        self._standing, self._told, self._drains = standing, told, drains
        self.drain = False
        """This member asks that the group is drained."""
        self.asking: frozenset[int] = frozenset()
        """The members that do, as the leader has heard."""
        self._was_up = ""
        """The life in which the leader's server was up."""
        self._up: bool | None = None
        """Whether it is now; None: nobody looked yet."""
        self._slow = 0
        self._boot = secrets.token_hex(12)
        self._seq = 0
        self._loop = asyncio.get_running_loop()
        self._problems: dict[str, str] = {}
        self._complaint = resources.Complaint("the engine of this member cannot be looked at, and counts as before")
        now, kept = self._loop.time(), self._read(ROUND, GroupRound)
        self._seat = Seat.restore(now, kept, mine.over_s)
        self._pulses = Pulses()
        self._launcher: tuple[MemberState | None, float] = (None, now)
        self._port = kept.port if kept is not None else 0
        self._lead = Lead.restore(self._boot, mine.size, now, kept, mine.over_s) if mine.index == 0 else None
        self._heard: dict[int, MemberHello] = {}
        """Of each follower, what counted last."""
        self._answer = ""
        self._turn = self._seat.turn
        self._lives = 0
        """That were begun since this process has."""

    @property
    def leads(self) -> bool:
        """Whether this is the leader's agent."""
        return self._lead is not None

    @property
    def problem(self) -> str:
        """Why the group does not serve; empty where it does."""
        return self._lead.problem(self._loop.time()) if self._lead is not None else self._answer

    def judge_probe(self, look: ProbeResult) -> ProbeResult:
        """Return a probe of the leader's own engine, as one that has a problem while not all members serve."""
        self._slow = self._slow + 1 if look.health == "slow" else 0
        if look.health == "up" and self._lead is not None:
            self._up, self._was_up = True, self._lead.life
        elif look.health == "down" or self._slow >= SLOW_LOOKS:
            self._up = False
        problem = self.problem
        if not problem:
            return look
        health = "unready" if look.health == "slow" else look.health
        return msgspec.structs.replace(look, health=health, problem=problem)

    @property
    def idle(self) -> bool:
        """Nothing runs here, and nothing is about to."""
        return not self._seat.life and self._seat.member_state != "busy"

    def serves(self) -> str:
        """Why this member's group does not serve, as far as this member knows; empty where it does."""
        silent_s = self._loop.time() - self._seat.heard
        if self._lead is None and silent_s > SILENT_S:
            return f"the leader at {self._mine.leader} has not answered for {silent_s:.0f} s"
        return self.problem or ("" if self._seat.member_state == "running"
                                else f"the engine of this member is {self._seat.member_state}")

    def hangs(self, startup_s: float) -> str:
        """Why it is no use to wait for this member's engine any longer; empty where it is. With the leader also its server
        counts, which had ``startup_s`` from the beginning of the life.
        """
        if self._seat.member_state == "absent":
            return "the launcher does not answer"
        lead = self._lead
        if lead is None or not lead.life or self._up:
            return ""
        if self._was_up == lead.life:
            return "the engine was up in this life and does not answer any more"
        late = self._loop.time() - lead.since > startup_s
        return f"the engine is not up {startup_s:g} s after the life began" if late else ""

    def follower_ranks(self) -> tuple[MemberRanks, ...]:
        """Ranks of the followers, in order; those of a member that does not run the life are left out."""
        life = self._lead.life if self._lead is not None else ""
        return tuple(said.ranks for _, said in sorted(self._heard.items())
                     if life and said.call == life and said.held == "running" and said.ranks is not None)

    def status(self) -> dict[str, Any]:
        """The state of the round, for people."""
        call, life = self._lead.answer() if self._lead is not None else (self._seat.promised, self._seat.life)
        return {"index": self._mine.index, "size": self._mine.size, "held": self._seat.member_state, "call": call,
                "life": life, "problem": self.problem, "asking": sorted(self.asking),
                "ended": self._lead.ended if self._lead is not None else ""}

    def figures(self, *, serving: bool) -> MemberFigures:
        """For whoever watches the members."""
        now, workers = self._loop.time(), [one for _, one in self._pulses.seen] if self._seat.life else []
        silent_s = now - self._seat.heard if self._lead is None else self._lead.silent_s_of_all(now)
        return MemberFigures(self._config.instance, self._mine.index, serving, self._seat.member_state == "running",
                             self._lives, len(workers), sum(one.steps for one in workers), silent_s)

    def receive(self, hello: MemberHello) -> MemberAnswer:
        """A follower says hello.

        Raises:
            HelloRefused: this is not the leader, or the follower is not of this group.
        """
        if self._lead is None:
            raise HelloRefused(f"this is member {self._mine.index}, not the leader")
        mine, name = self._mine, f"member {hello.index}"
        if hello.v != WIRE_VERSION:
            raise HelloRefused(f"hello of version {hello.v}; this agent speaks {WIRE_VERSION}")
        if hello.instance != self._config.instance or not 0 < hello.index < mine.size:
            raise HelloRefused(f"no {name} of {hello.instance}: this is {self._config.instance}, of {mine.size}")
        if hello.layout != mine.layout:
            raise HelloRefused(f"{name} is of another layout ({hello.layout}) than the leader ({mine.layout})")
        before = self._lead.members[hello.index]
        if before is not None and before.boot != hello.boot:
            ago_s = self._loop.time() - before.heard
            if ago_s < TWIN_HELLOS * HELLO_S:  # or both would begin an engine of the life
                raise HelloRefused(f"another process has spoken as {name} {ago_s:.1f} s ago; are there two?")
        self._check_ranks(hello)
        return self._count(hello)

    def _check_ranks(self, hello: MemberHello) -> None:
        assert self._config.agent is not None
        if hello.ranks is None:
            return
        first, count = hello.ranks.first.dp_rank, len(hello.ranks.control)
        if range(first, first + count) != (right := ranks.of_member(self._config.agent, hello.index)):
            raise HelloRefused(f"member {hello.index} says ranks {first} to {first + count - 1}, it has {right.start} to "
                               f"{right.stop - 1}")

    async def run(self) -> None:
        """Take part in rounds until cancelled."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=1)) as session:
            said, at = ("", False), float("-inf")
            while True:
                self._look()
                now = self._loop.time()
                if self._lead is not None:
                    self._follow(self._lead.tick(now))
                    self._take(self._count(self._hello()))
                elif (self._seat.member_state, self.drain) != said or now - at >= HELLO_S:
                    said, at = (self._seat.member_state, self.drain), now
                    await self._say(session)
                    self._seat = self._seat.tick(self._loop.time())
                    self._write()
                await asyncio.sleep(LOOK_S)

    def _look(self) -> None:
        """At the launcher, and at what its engine's workers say. A look for which this process lacks files is none: it
        says nothing of the engine, which counts as it did.
        """
        now = self._loop.time()
        try:
            self._look_at(now)
        except resources.Lack as lack:
            self._complaint.add(lack)
            self._launcher = (self._launcher[0], now)
            self._pulses = self._pulses.pass_over()

    def _look_at(self, now: float) -> None:
        found = self._read(STATE, MemberState)
        before, changed = self._launcher
        if found is not None and (before is None or (found.boot, found.beat) != (before.boot, before.beat)):
            changed = now
        self._launcher = (found, changed)
        alive = found if found is not None and now - changed <= SILENT_S else None
        self._seat = self._seat.watch(alive)
        if alive is not None and alive.running:
            self._pulses = self._pulses.observe(alive, self._found_pulses(), now)

    def _found_pulses(self) -> list[Pulse]:
        try:
            return group.pulses(self._run_dir)
        except OSError as error:
            resources.refuse_lack(error)
            self._complain("pulses", str(error))
            return []

    def _hello(self) -> MemberHello:
        self._seq += 1
        seat, launcher = self._seat, self._launcher[0]
        held = seat.member_state
        return MemberHello(WIRE_VERSION, self._config.instance, self._mine.index, self._mine.layout, self._boot, self._seq,
                           held, seat.promised, self._pulses.word if held == "running" else "",
                           launcher.why if launcher is not None else "",
                           self._ranks() if held == "running" and not self.leads else None, self.drain)

    def _ranks(self) -> MemberRanks | None:
        agent = self._config.agent
        assert agent is not None
        try:
            found = ranks.read_ranks(self._run_dir, ranks.own(agent), agent.advertised_address)
        except (ValueError, OSError) as error:
            self._complain("ranks", f"engine record: {error}")
            return None
        self._problems.pop("ranks", None)
        return found

    def _count(self, hello: MemberHello) -> MemberAnswer:
        assert self._lead is not None
        before = self._lead
        self._follow(before.receive(hello, self._loop.time()))
        seen = self._lead.members[hello.index]
        if hello.index and seen is not None and (seen.boot, seen.seq) == (hello.boot, hello.seq):
            self._heard[hello.index] = hello
            asking = self.asking | {hello.index} if hello.drain else self.asking - {hello.index}
            if asking != self.asking:
                self.asking = asking
                self._drains()
        if self._lead.life and not before.life:
            self._port = _free_port(self._host)
            logger.info("a round begins", extra={"life": self._lead.life, "members": self._mine.size})
        call, life = self._lead.answer()
        if hello.index and (self._seat.life != life or self._seat.turn != self._turn):
            life = ""  # nobody hears of a life that is not written down yet
        role, draining, drained = self._standing()
        problem = self.problem or ("the leader's server is not up" if self._up is False else "")
        return MemberAnswer(WIRE_VERSION, call, life, self._host, self._port, role.role, role.epoch, draining, drained,
                            problem[:MOST_WORDS])

    def _follow(self, lead: Lead) -> None:
        if self._lead is not None and self._lead.life and not lead.life:
            logger.warning("the round is over: %s", lead.ended)
        self._lead = lead

    def _take(self, answer: MemberAnswer) -> None:
        self._seat = self._seat.receive(answer, self._loop.time())
        self._write()

    def _write(self) -> None:
        """What the launcher is told; before that nobody is told that it is so."""
        if self._seat.turn == self._turn:
            return
        try:
            run_folder.write(self._run_dir / ROUND, self._seat.round)
        except OSError as error:
            self._complain("write", f"the launcher cannot be told: {error}")
            return
        self._turn = self._seat.turn
        self._lives += bool(self._seat.life)

    async def _say(self, session: aiohttp.ClientSession) -> None:
        body = msgspec.json.encode(self._hello())
        said = signing.sign(self._key, signing.SignedCall("POST", group.PATH, self._config.instance, body))
        try:
            async with session.post(f"http://{self._mine.leader}{group.PATH}", data=body, allow_redirects=False,
                                    headers={signing.HEADER: said}) as answer:
                raw = await read_whole(answer.content, ANSWER_MAX)
                if answer.status != 200:
                    self._not_heard(f"status {answer.status}: {raw[:300].decode(errors='replace')}")
                    return
                if not signing.answers(self._key, said, answer.headers.get(signing.HEADER, ""), raw):
                    self._not_heard("who answers there does not hold the service's key")
                    return
                told = msgspec.json.decode(raw, type=MemberAnswer)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._not_heard(str(error) or type(error).__name__)
            return
        self._problems.pop("hello", None)
        self._answer = told.problem
        self._take(told)
        self._told(told)

    def _not_heard(self, why: str) -> None:
        self._answer = f"the leader at {self._mine.leader} does not answer: {why}"
        self._complain("hello", self._answer)

    def _complain(self, what: str, problem: str) -> None:
        if self._problems.get(what) != problem:
            logger.warning("%s", problem)
        self._problems[what] = problem

    def _read(self, name: str, kind: type[FileT]) -> FileT | None:
        try:
            found = run_folder.read(self._run_dir / name, kind)
        except (ValueError, OSError) as error:
            resources.refuse_lack(error)
            self._complain(name, str(error))
            return None
        self._problems.pop(name, None)
        return found


def _free_port(host: str) -> int:
    """A port at which the engines can meet. Should somebody take it meanwhile, the round fails and the next has another."""
    for port in random.sample(PORTS, 64):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((bound(host), port))
        except OSError:  # somebody has it, or no file is left to ask with
            continue
        return port
    return random.choice(PORTS)
