"""Policies: which instance of several equal ones gets the next leg.

A policy is a class and a row of ``_POLICIES``. It sees what is asked, and candidates: at least one, by name, all of one
role and able to do the work. It returns an index; it may keep state of its own, gets chance as an argument
(``random.Random(seed).random``: numbers from 0 to below 1), and never changes a member.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Protocol

import msgspec

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.router.api.prompt import PromptPrefix
from xpyd_sidecar.router.balance.candidates import FEW_TOKENS, Mean, PrefixCacheIndex, Rendezvous, backlog, score
from xpyd_sidecar.router.fleet.member import FleetMember

MATCHED = 0.05
"""Share of a prompt that must be held to count: for less, the hash's agreement is worth more than what is saved."""
FEW = 2
"""So many requests are never too many for the holder of a prefix, whatever the mean."""
BOUND = 1.25
"""Most requests of an instance, relative to the mean."""
BOUND_TOKENS = 1.1
"""Most tokens that wait: they are known more finely."""
HOLDERS = 4
"""Those that hold the most of a prompt that are compared."""


Chance = Callable[[], float]


class Query(msgspec.Struct, eq=False):
    """What policies know of a request."""

    prefix: PromptPrefix = msgspec.field(default_factory=lambda: PromptPrefix(b""))
    """The prompt's beginning."""
    holdings: PrefixCacheIndex | None = None
    """What each instance probably holds; None where nobody keeps account."""
    tokens: int = 0
    """About how many the prompt has."""
    now: float = 0.0
    """Seconds, as ``FleetMember.beat_at``."""


class Policy(Protocol):
    """What a policy offers."""

    holds: bool
    """Whether it looks at ``Query.holdings``, so that account must be kept."""

    def choose(self, query: Query, candidates: Sequence[FleetMember], partners: int = 1) -> int:
        """Index of the chosen one. ``partners``: how many instances of the other role the choice is combined with."""


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a policy that has none."""


class RandomChoice:
    """Any of them, all with the same chance. Needs no state, so several routers never fall into step."""

    holds = False

    def __init__(self, chance: Chance, _: NoOptions) -> None:
        self._chance = chance

    def choose(self, query: Query, candidates: Sequence[FleetMember], partners: int = 1) -> int:  # noqa: ARG002 (as all)
        """Index of the drawn one."""
        return int(self._chance() * len(candidates))


class RoundRobin:
    """Each in turn: one counter per role.

    Two counters in step would pair instance i with instance i for ever and never use the other pairs: with n prefill and m
    decode instances the pairs repeat after lcm(n, m) requests, while there are n·m = lcm·gcd. So prefill's turn is moved
    by one more in each such round, gcd rounds long, and any n·m requests use every pair once:

        2P2D     request  0  1  2  3        prefill = (k + (k div lcm) mod gcd) mod n
                 prefill  0  1  1  0
                 decode   0  1  0  1        decode  =  k mod m
    """

    holds = False

    def __init__(self, chance: Chance, _: NoOptions) -> None:
        self._turn = dict.fromkeys(Role, int(chance() * 2**16))  # several routers begin at different places

    def choose(self, query: Query, candidates: Sequence[FleetMember], partners: int = 1) -> int:  # noqa: ARG002 (as all)
        """Index of the next in turn."""
        n, role = len(candidates), candidates[0].role
        k = self._turn[role]
        self._turn[role] = k + 1
        if partners > 1 and role is Role.PREFILL:
            k += k // math.lcm(n, partners) % math.gcd(n, partners)
        return k % n


class LeastLoadedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of ``least_loaded``."""

    choices: Annotated[int, msgspec.Meta(ge=2, le=16)] = 2
    """Instances that are compared."""


class LeastLoaded:
    """The least loaded of a few drawn at random.

    Power of two choices (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001). Taking the least
    loaded of all would send every router's next requests to the same instance until the next beat (a herd); two random
    ones keep the load almost as even without that. Ties go to the first drawn, which is random.
    """

    holds = False

    def __init__(self, chance: Chance, options: LeastLoadedOptions) -> None:
        self._chance = chance
        self._more = options.choices - 2

    def choose(self, query: Query, candidates: Sequence[FleetMember], partners: int = 1) -> int:  # noqa: ARG002 (as all)
        """Index of the chosen one."""
        n = len(candidates)
        if n == 1:
            return 0
        chance = self._chance
        best, other = int(chance() * n), int(chance() * (n - 1))
        other += other >= best  # two different ones
        if score(candidates[other]) < score(candidates[best]):
            best = other
        for _ in range(min(self._more, n - 2)):  # with repetition: a repeated one costs a choice, not its rightness
            other = int(chance() * n)
            if score(candidates[other]) < score(candidates[best]):
                best = other
        return best


class Cost:
    """Where the prompt is done soonest: least (tokens queued + tokens of it that are not held).

    Of prefill, loads are tokens (``backlog``), of decode requests (``score``): a prompt of 100,000 tokens keeps the next
    one waiting 200 times as long as one of 500, a stream does not. An instance is *free* while its load is within a bound
    of the mean (consistent hashing with bounded loads: Mirrokni, Thorup and Zadimoghaddam, 2018).

    1. Nobody is believed to hold a twentieth of it, beyond what most hold: a rendezvous hash of its conversation, the first
       in order that is free. So several routers find the same instance for what each sees for the first time.
    2. Decode: who holds the most of it and is free; else as 1.
    3. Prefill: the least cost of a few: those that hold the most, two that are first in order, and two drawn. Where
       instances tell what they hold it is always this: the next turn is found by what is told, wherever the first one went.
    """

    holds = True

    def __init__(self, chance: Chance, _: NoOptions) -> None:
        self._chance = chance
        self._rendezvous = Rendezvous()
        self._mean = Mean()

    def choose(self, query: Query, candidates: Sequence[FleetMember], partners: int = 1) -> int:  # noqa: ARG002 (as all)
        """Index of the chosen one."""
        n, role, chance = len(candidates), candidates[0].role, self._chance
        if n == 1:
            return 0
        prefix, computes = query.prefix, role is Role.PREFILL
        load: Callable[[FleetMember], float] = partial(backlog, now=query.now) if computes else score
        mean = self._mean.load_per_instance(role, candidates, load, query.tokens if computes else 1)
        most = max(FEW_TOKENS, BOUND_TOKENS * mean) if computes else max(FEW, math.ceil(BOUND * mean))
        found: list[tuple[int, int]] = []
        common = 0  # bytes that most hold
        if query.holdings is not None:
            found, common = query.holdings.holders(candidates, prefix)
        enough = common + MATCHED * (len(prefix) - common)
        order = self._rendezvous.order(role, candidates, prefix.conversation_key(common))
        told = query.holdings is not None and query.holdings.told
        if computes and (told or (found and found[0][0] >= enough)):
            held = {index: size for size, index in found[:HOLDERS]}
            few = dict.fromkeys((*held, next(order), next(order), int(chance() * n), int(chance() * n)))
            each = query.tokens / len(prefix)
            # Of equal ones it is the first: who holds it.
            return min(few, key=lambda index: load(candidates[index]) - each * held.get(index, common))
        for size, index in sorted(found, key=lambda one: (-one[0], score(candidates[one[1]]))):
            if size >= enough and load(candidates[index]) < most:
                return index
        for index in order:
            if load(candidates[index]) < most:
                return index
        return min(range(n), key=lambda index: load(candidates[index]))


_POLICIES: dict[str, tuple[Callable[..., Policy], type[msgspec.Struct]]] = {
    "cost": (Cost, NoOptions), "least_loaded": (LeastLoaded, LeastLoadedOptions), "random": (RandomChoice, NoOptions),
    "round_robin": (RoundRobin, NoOptions)}
"""By name: what is called with chance and options, and the kind of its options."""


def names() -> list[str]:
    """Every policy's name, sorted."""
    return sorted(_POLICIES)


def make(name: str, options: Mapping[str, Any], chance: Chance) -> Policy:
    """Build a policy. Raises ConfigError: no policy has this name, or an option is wrong."""
    found = _POLICIES.get(name)
    if found is None:
        raise ConfigError(f"router.policy: {name!r} is not a policy; there are {', '.join(names())}")
    cls, kind = found
    try:
        return cls(chance, msgspec.convert(dict(options), kind))
    except msgspec.ValidationError as error:
        raise ConfigError(f"router.policy_options of {name}: {error}") from None
