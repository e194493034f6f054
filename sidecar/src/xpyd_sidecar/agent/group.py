"""Rounds of an instance of several members: who may begin an engine, and when all of them end. Pure; time is an argument.

A ``Seat`` is a member's own side: what its launcher is told. A ``Lead`` counts all members; the leader's agent has both,
and its own seat speaks to its lead as the others do.

    lead                                   seat of each member
      call c ─────────────────────────────▶  promises c: nothing runs here, and nothing but c will be begun
      ◀──────────────── held "free", call c
      all are free with c: life = c ──────▶  its launcher begins an engine of life c
      one is over, or silent: call c+1 ───▶  its launcher ends the engine; "free" again once it has

Laws
    1. A life is a call that every member has answered with nothing running. A seat that has promised a call begins no other
       one, so at no moment do engines of two lives run.
    2. No engine is begun before all members have promised, and none is begun twice in one life.
    3. The round is over when a member's engine has ended, when its life is another one, when it has lost its promise (a new
       pod), or when its beat has not changed for ``over_s``. A seat that has not heard of the lead for ``over_s`` ends its
       own engine: so none runs alone.
    4. The lead has no problem ⇒ every member said within ``silent_s`` that it runs this life, with a beat that changed
       within ``silent_s``.
    5. What a lead has made a life is in its round's file before anybody hears of it, so a lead that is started again goes
       on with it (``Lead.restore``).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from xpyd_sidecar.contract.group import GroupRound, MemberAnswer, MemberHeld, MemberHello, MemberState

SILENT_S: Final = 5.0
"""A member that is not heard, or whose engine does not beat, for so long: not ready."""
OVER_S: Final = 15.0
"""The same: the round is over."""


class Present(NamedTuple):
    """What a lead knows of a member."""

    boot: str
    seq: int
    held: MemberHeld
    call: str
    beat: str
    heard: float
    beaten: float
    """When its beat changed last."""
    why: str = ""


class Lead(NamedTuple):
    """State of a lead; ``receive`` and ``tick`` give the next one."""

    boot: str
    """Of the agent's process: calls of two processes are never equal."""
    size: int
    number: int = 1
    """Of calls."""
    taken: str = ""
    """A life that was found in the round's file when this process began."""
    life: str = ""
    since: float = 0.0
    """When the life began, or the call was made."""
    members: tuple[Present | None, ...] = ()
    ended: str = ""
    """Why the last round was over."""
    over_s: float = OVER_S
    silent_s: float = SILENT_S

    @classmethod
    def restore(cls, boot: str, size: int, now: float, kept: GroupRound | None, over_s: float = OVER_S) -> Lead:
        """Return the first state of a process; ``kept``: what the round's file says."""
        life = kept.life if kept is not None else ""
        return cls(boot, size, taken=life, life=life, since=now, members=(None,) * size, over_s=over_s)

    @property
    def call(self) -> str:
        """What members are to promise."""
        return self.taken or f"{self.boot}{self.number:08x}"

    def receive(self, hello: MemberHello, now: float) -> Lead:
        """Return the state after a member's hello; of an agent's process only what is newer than before counts."""
        before = self.members[hello.index]
        if before is not None and before.boot == hello.boot and hello.seq <= before.seq:
            return self
        changed = before is None or hello.beat != before.beat
        beaten = now if before is None or (changed and hello.beat) else before.beaten
        seen = Present(hello.boot, hello.seq, hello.held, hello.call, hello.beat, now, beaten, hello.why)
        after = self._replace(members=(*self.members[:hello.index], seen, *self.members[hello.index + 1:]))
        if after.life:
            return after._over(after._broken(hello.index), now)
        return after._begun(now)

    def tick(self, now: float) -> Lead:
        """Return the state at ``now``, in monotonic seconds."""
        if not self.life:
            return self
        for index, seen in enumerate(self.members):
            beaten = self.since if seen is None else max(seen.beaten, self.since)
            if now - beaten > self.over_s:
                return self._over(f"member {index} was silent for {self.over_s:g} s", now)
        return self

    def problem(self, now: float) -> str:
        """Why the group does not serve; empty where it does."""
        if not self.life:
            missing = [str(index) for index, seen in enumerate(self.members)
                       if seen is None or seen.held != "free" or seen.call != self.call or self._late(seen, now)]
            last = f"; the last round: {self.ended}" if self.ended else ""
            return f"waits for members {', '.join(missing)} of {self.size}{last}"
        for index, seen in enumerate(self.members):
            if seen is None or seen.held != "running":
                return f"the engine of member {index} of {self.size} has not begun"
            if now - min(seen.heard, seen.beaten) > self.silent_s:
                return f"member {index} of {self.size} is silent for {now - min(seen.heard, seen.beaten):.0f} s"
        return ""

    def silent_s_of_all(self, now: float) -> float:
        """How long nothing was heard of the engine of the most silent member."""
        return max((now - max(seen.beaten if seen is not None else self.since, self.since) for seen in self.members),
                   default=0.0)

    def answer(self) -> tuple[str, str]:
        """Call and life, as members are told."""
        return self.call, self.life

    def _late(self, seen: Present, now: float) -> bool:
        return now - seen.heard > self.silent_s

    def _begun(self, now: float) -> Lead:
        free = all(seen is not None and seen.held == "free" and seen.call == self.call and not self._late(seen, now)
                   for seen in self.members)
        return self._replace(life=self.call, since=now) if free else self

    def _broken(self, index: int) -> str:
        seen = self.members[index]
        assert seen is not None
        if seen.call != self.life:
            return f"member {index} was started anew"
        if seen.held == "over":
            return f"the engine of member {index} ended: {seen.why or 'it was told to'}"
        return ""

    def _over(self, why: str, now: float) -> Lead:
        if not why:
            return self
        return self._replace(life="", taken="", number=self.number + 1, since=now, ended=why)


class Seat(NamedTuple):
    """State of a member's own side; every method gives the next one."""

    promised: str = ""
    """The call that it answers to."""
    life: str = ""
    """What its launcher is to run."""
    turn: int = 0
    """Grows with each change of what the launcher is told."""
    leader: str = ""
    port: int = 0
    heard: float = 0.0
    """When the lead answered last."""
    launcher: MemberState | None = None
    """What the launcher said last; None: nothing, or too long ago."""
    over_s: float = OVER_S

    @classmethod
    def restore(cls, now: float, kept: GroupRound | None, over_s: float = OVER_S) -> Seat:
        """Return the first state of a process; ``kept``: what the round's file says."""
        if kept is None:
            return cls(heard=now, over_s=over_s)
        return cls(kept.life, kept.life, kept.turn, kept.leader, kept.port, now, over_s=over_s)

    @property
    def round(self) -> GroupRound:
        """What the launcher is told; it is in the file before anything else is said."""
        return GroupRound(self.turn, self.life, self.leader, self.port)

    @property
    def member_state(self) -> MemberHeld:
        """What the member has, as it tells the lead."""
        launcher = self.launcher
        if launcher is None:
            return "absent"
        if self.life:
            if launcher.life == self.life:
                return "running" if launcher.running else "over"
            return "busy"
        return "free" if launcher.turn == self.turn and not launcher.running else "busy"

    def watch(self, launcher: MemberState | None) -> Seat:
        """What the launcher says now. Where it has acted on a later turn than this seat knows of, the round's file is lost:
        it is told anew.
        """
        turn = launcher.turn + 1 if launcher is not None and launcher.turn > self.turn else self.turn
        return self._replace(launcher=launcher, turn=turn)

    def receive(self, answer: MemberAnswer, now: float) -> Seat:
        """Return the state after the lead's answer."""
        after = self._replace(heard=now)
        if self.life and answer.life != self.life:
            after = after._told("", "", 0)
        if not answer.life:
            return after._replace(promised=answer.call)
        begins = after.member_state == "free" and after.promised == answer.life
        return after._told(answer.life, answer.leader, answer.port) if begins else after

    def tick(self, now: float) -> Seat:
        """Time has passed: who hears nothing of the lead runs nothing."""
        return self._told("", "", 0) if self.life and now - self.heard > self.over_s else self

    def _told(self, life: str, leader: str, port: int) -> Seat:
        return self._replace(life=life, leader=leader, port=port, turn=self.turn + 1)
