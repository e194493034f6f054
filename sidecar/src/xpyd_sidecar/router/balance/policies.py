"""Policies: which instance of several equal ones gets the next leg.

A policy is a class and a row of ``_POLICIES``. It sees what is asked, and candidates: at least one, by name, all of one
role and able to do the work. It returns an index; it may keep state of its own, gets chance as an argument
(``random.Random(seed).random``: numbers from 0 to below 1), and never changes a member.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Protocol

import msgspec

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.router.api.prompt import BLOCK_BYTES, PromptPrefix
from xpyd_sidecar.router.balance.candidates import Holdings, Mean, Rendezvous, score
from xpyd_sidecar.router.fleet.member import FleetMember

MATCHED = 0.1
"""Share of a prompt that must be held to count: for less, the hash's balance is worth more than what is saved."""
FEW = 2
"""So many requests are never too many for the holder of a prefix, whatever the mean."""
OVERLOADED = 2.0
"""A session leaves its instance while that has more than this times the mean."""
ALWAYS = 4
"""So many requests are never an overload for a session's instance, whatever the mean."""


Chance = Callable[[], float]


class Query(msgspec.Struct, eq=False):
    """What policies know of a request."""

    prefix: PromptPrefix = msgspec.field(default_factory=lambda: PromptPrefix(b""))
    """The prompt's beginning."""
    holdings: Holdings | None = None
    """What each instance probably holds; None where nobody keeps account."""
    session: int = 0
    """Key of the session that the request belongs to; 0: none."""


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


class PrefixAwareOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of ``prefix_aware``."""

    blocks: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    """Blocks of ``prompt.BLOCK_BYTES`` that are hashed, beyond what all prompts have in common."""
    bound: Annotated[float, msgspec.Meta(ge=1, le=10)] = 1.25
    """Most load of an instance, relative to the mean."""


class PrefixAware:
    """Where the beginning of the prompt probably is, unless that is too loaded.

    1. Those that this router sent the longest prefix of this prompt to (``holdings``), if it is a tenth of it or
       more; the less loaded of equal ones first.
    2. Rendezvous hash of the first blocks, so that several routers send a prefix that each sees for the first time to the
       same instance.

    In both, an instance counts only while its load stays within ``bound`` times the mean: consistent hashing with bounded
    loads (Mirrokni, Thorup and Zadimoghaddam, 2018). The next in order takes what is beyond, so a prefix that everybody
    asks for spreads over as many instances as it needs.
    """

    holds = True

    def __init__(self, _: Chance, options: PrefixAwareOptions) -> None:
        self._bytes = options.blocks * BLOCK_BYTES
        self._bound = options.bound
        self._rendezvous = Rendezvous()
        self._mean = Mean()

    def choose(self, query: Query, candidates: Sequence[FleetMember], partners: int = 1) -> int:  # noqa: ARG002 (as all)
        """Index of the chosen one."""
        role = candidates[0].role
        if len(candidates) == 1:
            return 0
        most = max(FEW, math.ceil(self._bound * self._mean.of(role, candidates)))
        common = 0
        if query.holdings is not None:
            found, common = query.holdings.holders(candidates, query.prefix)
            if len(found) > 1:
                found.sort(key=lambda one: (-one[0], score(candidates[one[1]])))
            enough = MATCHED * len(query.prefix)
            for held, index in found:
                if held >= enough and score(candidates[index]) < most:
                    return index
        key = query.prefix.first_key(common + self._bytes)
        best = -1
        for index in self._rendezvous.order(role, candidates, key):
            if score(candidates[index]) < most:
                return index
            if best < 0:
                best = index
        return best


class SessionAffinity:
    """Keeps requests together that belong to one session, and otherwise does as another policy does.

    The instance of a session is the winner of a rendezvous hash of its key, so every router knows it and none remembers
    it. When it is gone, the next in the hash's order is the winner; while it is overloaded, the policy chooses.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._rendezvous = Rendezvous()
        self._mean = Mean()
        self.holds = policy.holds

    def choose(self, query: Query, candidates: Sequence[FleetMember], partners: int = 1) -> int:
        """Index of the chosen one."""
        if query.session:
            role = candidates[0].role
            index = next(self._rendezvous.order(role, candidates, query.session))
            if score(candidates[index]) < max(ALWAYS, OVERLOADED * self._mean.of(role, candidates)):
                return index
        return self._policy.choose(query, candidates, partners)


_POLICIES: dict[str, tuple[Callable[..., Policy], type[msgspec.Struct]]] = {
    "least_loaded": (LeastLoaded, LeastLoadedOptions), "prefix_aware": (PrefixAware, PrefixAwareOptions),
    "random": (RandomChoice, NoOptions), "round_robin": (RoundRobin, NoOptions)}
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
