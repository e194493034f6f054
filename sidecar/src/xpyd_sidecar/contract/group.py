"""An instance of several members: what its agents say to each other, and what agent and launcher of a member leave in its
run folder (docs/protocols/group.md).

    POST /member of the leader's agent   MemberHello → MemberAnswer, a signed call, once a second from each follower
    GET  /group/ready                    of every member's agent, for probes: 200, or 503 and why not
    <run dir>/round.json                 GroupRound: the agent tells its launcher which life to run
    <run dir>/member.json                MemberState: the launcher says what it runs
    <run dir>/pulse-<pid>.json           Pulse: a worker of the engine says that it lives, and how many steps it has ended

A *life* is one run of all engines of the group, 32 hex digits: members begin it together and end it together.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from xpyd_sidecar.contract import run_folder
from xpyd_sidecar.contract.ids import HostPort, InstanceName, Role
from xpyd_sidecar.contract.membership import MAX_RANKS
from xpyd_sidecar.contract.record import EngineRecord

WIRE_VERSION: Final = 1
PATH: Final = "/member"
"""Of the leader's agent."""
READY_PATH: Final = "/group/ready"
"""Whether the group serves, as this member knows."""
MOST_BYTES: Final = 64 << 10
"""Of a hello; an address of each of its ranks is in it."""
MOST_MEMBERS: Final = 16
"""Each says hello once a second, and an agent takes 4,096 signed calls in two minutes."""

ROUND: Final = "round.json"
STATE: Final = "member.json"

LIFE_HERE: Final = "{xpyd:life}"
"""Stands in the arguments of a member's engine for the life of its round,"""
LEADER_HERE: Final = "{xpyd:leader}"
"""for the leader's host,"""
PORT_HERE: Final = "{xpyd:port}"
"""and for the port at which engines of the group meet there."""

ENV_LIFE: Final = "XPYD_LIFE"
"""The life, in the environment of a member's engine."""

Index = Annotated[int, msgspec.Meta(ge=0, lt=MOST_MEMBERS)]
Token = Annotated[str, msgspec.Meta(max_length=64)]
MOST_WORDS: Final = 1024
"""Characters of what is said for people."""
Words = Annotated[str, msgspec.Meta(max_length=MOST_WORDS)]
MemberHeld = Literal["absent", "free", "busy", "running", "over"]
"""What a member has: no launcher that answers; a launcher that runs nothing and has promised to run only the life that was
called last; one that is about to begin or to end an engine; an engine of the life; one that has ended in this life."""


class GroupRound(msgspec.Struct, frozen=True):
    """What an agent asks of its member's launcher: which life of the engine to run, if any."""

    turn: int
    """Grows with each change; the launcher says which it has seen."""
    life: Token = ""
    """Empty: nothing."""
    leader: str = ""
    """Host of the leader, without brackets."""
    port: int = 0


class MemberState(msgspec.Struct, frozen=True):
    """What the launcher of a member says of itself: the engine's life that it runs or has run, and how that ended."""

    boot: Token
    """Of the launcher's process."""
    beat: int
    """Grows with each look at what it is to run."""
    turn: int = 0
    """Of the round that it has seen last, and acted on."""
    life: Token = ""
    """That it runs, or has run last: it begins none twice."""
    running: bool = False
    why: Words = ""
    """How the engine has ended, where nobody had asked for it."""
    group: int = 0
    """Process group of the engine that runs, or ran last: whoever takes the launcher's place ends what is left of it,"""
    session: int = 0
    """if it is in this session"""
    start: int = 0
    """and its first process began at this tick after the boot."""


class Pulse(msgspec.Struct, frozen=True):
    """One worker process's sign that it goes on, which it writes about once a second."""

    pid: int
    life: Token
    beat: int
    """Grows once a second, by a thread of its own."""
    steps: int = 0
    """That it has ended."""
    inside: bool = False
    """It is in a step."""


class MemberRanks(msgspec.Struct, frozen=True):
    """Data-parallel ranks of a member that has a server of its own."""

    door: HostPort
    """Where the server is reached."""
    first: EngineRecord
    """Of the first one; the others differ in rank and address alone."""
    control: Annotated[tuple[HostPort, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]
    """KV control addresses, the first one's first."""


class MemberHello(msgspec.Struct, frozen=True):
    """From a follower's agent to the leader's. Fields that are not known are ignored."""

    v: int
    instance: InstanceName
    index: Index
    layout: Token
    """Hash of what the whole group is made of: members of two layouts never run together."""
    boot: Token
    """Of the agent's process, and"""
    seq: Annotated[int, msgspec.Meta(ge=0)]
    """its count of hellos: an older one that comes late is not heard."""
    held: MemberHeld
    call: Token = ""
    """The call that the member answers to: it has promised to run this life and no other."""
    beat: Token = ""
    """Of the engine, or of the launcher while the engine starts. Another one than before: it lives."""
    why: Words = ""
    """How the engine has ended."""
    ranks: MemberRanks | None = None
    """While its engine runs and all its ranks have started; None too where it has none."""
    drain: bool = False
    """This member is to go, and asks that the whole group is drained first."""


class MemberAnswer(msgspec.Struct, frozen=True):
    """What the leader's agent answers to the hello of another member."""

    v: int
    call: Token
    """What is to be promised."""
    life: Token = ""
    """What is to run; empty: nothing, whatever runs is to end."""
    leader: str = ""
    port: int = 0
    role: Role = Role.PREFILL
    epoch: int = 1
    draining: bool = False
    drained: bool = False
    problem: Words = ""
    """Why the group does not serve; empty where it does."""


def pulse_path(run_dir: Path, pid: int) -> Path:
    """Where the pulse of a worker's process is."""
    return run_dir / f"pulse-{pid}.json"


def pulses(run_dir: Path) -> list[Pulse]:
    """Of all workers, in no order; what cannot be read is left out, and so counts as silent."""
    found = []
    for path in run_dir.glob("pulse-*.json"):
        with contextlib.suppress(ValueError, OSError):
            one = run_folder.read(path, Pulse)
            found += [one] if one is not None else []
    return found
