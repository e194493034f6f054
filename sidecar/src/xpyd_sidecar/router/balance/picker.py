"""Choosing a pair: filters that make every candidate right, then the policy, then a data-parallel rank of each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Incarnation, InstanceName, Role
from xpyd_sidecar.router.api.prompt import PromptPrefix
from xpyd_sidecar.router.balance.adapter_slots import AdapterSlots
from xpyd_sidecar.router.balance.candidates import Mean, PrefixCacheIndex, score
from xpyd_sidecar.router.balance.limits import ConcurrencyLimits
from xpyd_sidecar.router.balance.policies import Policy, Query
from xpyd_sidecar.router.fleet.member import EngineTarget, FleetMember, Pair
from xpyd_sidecar.router.fleet.roster import Roster

CACHED_BOUND = 2.0
"""A prompt goes to decode alone for what is cached there only while that has less than this times the mean."""
CACHED_ALWAYS = 4
"""So many requests are never too many for that."""
RANK_LATELY: Final = 32
"""So many requests for each rank are counted before the counts are halved."""
RANK_OVERLOADED: Final = 1.5
"""A rank is left for another one from this times the mean on,"""
RANK_ALWAYS: Final = 4
"""and so many requests more."""
MOST_KEYS: Final = 1 << 16
MOST_INSTANCES: Final = 4096


class _Known(msgspec.Struct, frozen=True):
    """Candidates as they are until the roster changes."""

    decodes: tuple[FleetMember, ...]
    prefills: tuple[FleetMember, ...]
    partners: dict[Fingerprint, tuple[FleetMember, ...]]
    """Prefill instances that can send, by fingerprint."""
    sending: int
    """How many they are."""
    paired: tuple[FleetMember, ...]
    """Decode instances that have a possible partner."""
    narrowed: dict[InstanceName, tuple[FleetMember, ...]]
    """Partners of decode instances that cannot take KV from all of their fingerprint; the others are not listed."""
    targets: dict[tuple[InstanceName, int], EngineTarget]
    """What was made of them, by rank."""
    only: dict[InstanceName, EngineTarget]
    """Of those that have one rank."""

    def partners_of(self, decode: InstanceName, kind: Fingerprint) -> tuple[FleetMember, ...]:
        """Prefill instances that can send to a decode instance of that fingerprint."""
        narrowed = self.narrowed.get(decode) if self.narrowed else None
        return self.partners.get(kind, ()) if narrowed is None else narrowed


class RankChoice:
    """Which data-parallel rank of an instance a request goes to. Each has a KV cache, and so a prefix cache, of its own.

        a prompt (policies    the rank that was given the longest beginning of  unless that has had far more than the others
        that look at them)    it last                                           lately: then whichever has had the fewest
        a conversation that   its own rank, by its key
        has a name
        else                  whichever has had the fewest: in turn

    Engines tell their load as a whole, so what counts is what this router has given to each rank lately: counts are halved
    when there are ``RANK_LATELY`` for each rank. What is remembered of prompts is a belief in bounded memory: what was
    asked for longest ago goes first.
    """

    def __init__(self, most: int = MOST_KEYS) -> None:
        self._most = most
        self._given: dict[tuple[InstanceName, Incarnation], list[int]] = {}
        """Requests lately, by rank."""
        self._last: OrderedDict[tuple[InstanceName, Incarnation, int], int] = OrderedDict()
        """Who was given a prefix last, by its key."""

    def __len__(self) -> int:
        """Prefixes that are remembered."""
        return len(self._last)

    def choose(self, member: FleetMember, prefix: PromptPrefix | None, session: int = 0) -> int:
        """The rank of one request. ``prefix``: None where nobody looks at prompts; ``session``: 0: it has no name."""
        ranks = max(len(member.http), len(member.control), 1)
        if ranks == 1:
            return 0
        given = self._counts(member, ranks)
        wanted = self._holder(member, prefix)
        if wanted is None and session:
            wanted = (session >> 1) % ranks  # keys are odd
        if wanted is None or wanted >= ranks or given[wanted] > RANK_OVERLOADED * sum(given) / ranks + RANK_ALWAYS:
            wanted = given.index(min(given))
        given[wanted] += 1
        if sum(given) >= RANK_LATELY * ranks:
            given[:] = [count // 2 for count in given]
        if prefix is not None:
            self._remember(member, prefix, wanted)
        return wanted

    def _counts(self, member: FleetMember, ranks: int) -> list[int]:
        name = (member.name, member.incarnation)
        given = self._given.get(name)
        if given is None or len(given) != ranks:
            if len(self._given) >= MOST_INSTANCES:
                self._given.clear()
            given = self._given[name] = [0] * ranks
        return given

    def _holder(self, member: FleetMember, prefix: PromptPrefix | None) -> int | None:
        for _, key in reversed(prefix.keys) if prefix is not None else ():
            rank = self._last.get((member.name, member.incarnation, key))
            if rank is not None:
                return rank
        return None

    def _remember(self, member: FleetMember, prefix: PromptPrefix, rank: int) -> None:
        for _, key in prefix.keys:
            name = (member.name, member.incarnation, key)
            self._last[name] = rank
            self._last.move_to_end(name)
            if len(self._last) > self._most:
                self._last.popitem(last=False)


class Picker:
    """Picks from a roster by a policy."""

    def __init__(self, roster: Roster, policy: Policy, *, room: ConcurrencyLimits | None = None,
                 rest_tokens: int = 0) -> None:
        """``rest_tokens``: of a prompt that decode may compute itself, where it holds all else; 0: none."""
        self._roster = roster
        self._policy = policy
        self._room = room or ConcurrencyLimits()
        self._rest_tokens = rest_tokens
        self._known = _Known((), (), {}, 0, (), {}, {}, {})
        self._picks: dict[Role, tuple[FleetMember, ...]] | None = None
        """What ``_known`` was made of."""
        self._mean = Mean()
        self.holdings = PrefixCacheIndex() if policy.holds or rest_tokens else None
        self._ranks = RankChoice()
        self._of_name: dict[str, _Known] = {}
        """Those of a name that not all answer to, of the same roster as ``_known``."""
        self._slots = AdapterSlots()

    def selection(self, prefix: PromptPrefix, tokens: int = 0, now: float = 0.0, name: str = "") -> Selection:
        """The picks of one request. ``tokens``: of its prompt, about. ``name``: which model it asks for; empty: any."""
        return Selection(prefix, self.holdings, tokens, now, picker=self, name=name)

    def has_room(self, *, alone: bool) -> bool:
        """Whether a request could be served now, as far as limits of instances go."""
        room = self._room
        if room.unlimited:
            return True
        known = self._look()
        return room.has_room(known.decodes) and (alone or room.has_room(known.prefills))

    def missing(self, *, alone: bool) -> Role | None:
        """The role of which nobody can be picked for a request, with prefill or ``alone``; None: there is somebody."""
        known = self._look()
        if not known.decodes:
            return Role.DECODE
        return None if alone or known.paired else Role.PREFILL

    def _answering(self, name: str) -> _Known:
        """Candidates that answer to a name; empty: to any."""
        known = self._look()
        if not name or not self._roster.names().partly(name):
            return known
        found = self._of_name.get(name)
        if found is None:
            decodes = tuple(m for m in known.decodes if name in m.names)
            prefills = tuple(m for m in known.prefills if name in m.names)
            found = self._of_name[name] = _known(decodes, prefills, known.targets, known.only)
        return found

    def _look(self) -> _Known:
        picks = self._roster.picks
        if picks is not None and picks is self._picks:
            return self._known
        decodes, prefills = self._roster.pickable(Role.DECODE), self._roster.pickable(Role.PREFILL)
        known = self._known
        if known.decodes is not decodes or known.prefills is not prefills:
            known = self._known = _known(decodes, prefills, {}, {})
        self._of_name.clear()
        self._picks = self._roster.picks
        return known

    def _choose(self, asked: Selection, candidates: Sequence[FleetMember], partners: int) -> FleetMember:
        chosen = candidates[0]
        adapter = asked.name if asked.name and asked.name != chosen.model and chosen.adapters is not None else ""
        if len(candidates) > 1:
            if not self._room.unlimited:
                candidates = self._room.free(candidates)
            if adapter:
                self._slots.count(adapter, candidates)
                candidates = self._slots.narrow(adapter, candidates)
            chosen = candidates[self._policy.choose(asked, candidates, partners)]
        if adapter:
            self._slots.use(adapter, chosen)
        if self.holdings is not None:
            asked.note(chosen)
            self.holdings.add(chosen, asked.prefix)
        return chosen

    def _holders(self, asked: Selection, decodes: Sequence[FleetMember]) -> list[FleetMember]:
        """Decode instances that probably hold the prompt but for a rest that they may compute beside what they compute
        already, which a step of theirs takes in; and that are not loaded far above the others.
        """
        most = self._rest_tokens
        if self.holdings is None or not most or not decodes or not asked.tokens:
            return []
        size = len(asked.prefix)
        usual = max(CACHED_ALWAYS, CACHED_BOUND * self._mean.load_per_instance(Role.DECODE, decodes))
        found = [(decodes[index], asked.tokens * (1 - cut / size))
                 for cut, index in self.holdings.holding(decodes, asked.prefix, size * (1 - most / asked.tokens))]
        return [member for member, rest in found if member.uncached_tokens + rest <= most and score(member) < usual]

    def _target(self, member: FleetMember, asked: Selection) -> EngineTarget:
        only = self._known.only.get(member.name)
        if only is not None:
            return only
        rank = self._ranks.choose(member, asked.prefix if self.holdings is not None else None,
                                  asked.prefix.named)
        known = self._known.targets.get((member.name, rank))
        if known is not None:
            return known
        made = self._known.targets[member.name, rank] = EngineTarget(
            member.name, member.incarnation, member.fingerprint, http=member.http[rank % len(member.http)],
            control=member.control[rank % len(member.control)] if member.control else HostPort(""), member=member,
            dp_rank=_behind_door(member, rank))
        if max(len(member.http), len(member.control)) <= 1:
            self._known.only[member.name] = made
        return made


class Selection(Query, kw_only=True, eq=False):
    """The picks of one request."""

    picker: Picker
    name: str = ""
    """Which model it asks for; empty: any."""
    stays: bool = False
    """It goes to decode alone, which holds nearly all of it."""
    _held: dict[InstanceName, int] = msgspec.field(default_factory=dict)
    """Bytes that those who were chosen held before."""
    _first: Pair | None = None
    """Chosen already, and to be given next."""

    def note(self, member: FleetMember) -> None:
        """It is chosen: what it held until now is what it need not compute."""
        assert self.holdings is not None
        self._held[member.name] = self.holdings.held_bytes(member, self.prefix)

    def first_pair(self) -> Pair | None:
        """The pair that ``pair`` will give first, unless one of the two cannot be picked by then; None: there is none."""
        self._first = self.pair(alone=False)
        return self._first

    def held_bytes(self, instance: InstanceName) -> int:
        """Bytes of the prompt that an instance which was chosen probably held before."""
        return self._held.get(instance, 0)

    def on_pulled(self, pair: Pair) -> None:
        """Prefill of the pair has got what decode held."""
        if pair.prefill is not None:
            self._held[pair.prefill.instance] = self._held.get(pair.decode.instance, 0)

    def _take_first(self, not_prefill: Collection[InstanceName], not_decode: Collection[InstanceName]) -> Pair | None:
        first, self._first = self._first, None
        if first is None or first.prefill is None:
            return None
        for target, unwanted in ((first.decode, not_decode), (first.prefill, not_prefill)):
            member = target.member
            if target.instance in unwanted or not member.pickable or member.incarnation != target.incarnation:
                return None
        return first

    def uncached_tokens(self, instance: InstanceName) -> int:
        """Tokens of the prompt that an instance which was chosen probably has to compute."""
        held = self._held.get(instance, 0)
        return self.tokens - self.tokens * held // len(self.prefix) if held else self.tokens

    def cached(self) -> bool:
        """Whether decode probably holds so much of the prompt that it can go there alone. If so, it will be sent there."""
        picker = self.picker
        self.stays = bool(picker._holders(self, picker._answering(self.name).decodes))
        return self.stays

    def pair(self, *, alone: bool, not_prefill: Collection[InstanceName] = (),
             not_decode: Collection[InstanceName] = ()) -> Pair | None:
        """A decode instance, and unless ``alone`` a prefill instance of its fingerprint.

        Decode instances that have a possible partner come first; where none has, ``prefill`` is None. None: nobody decodes.
        """
        if not alone and (first := self._take_first(not_prefill, not_decode)) is not None:
            return first
        picker = self.picker
        known = picker._answering(self.name)
        if not alone and known.paired:
            paired, sending = _but(known.paired, not_decode) if not_decode else known.paired, known.sending
            if not_prefill:
                paired = tuple(m for m in paired if _but(known.partners_of(m.name, m.fingerprint), not_prefill))
                sending = sum(len(_but(those, not_prefill)) for those in known.partners.values())
            if paired:
                decode = picker._choose(self, paired, sending)
                partners = known.partners_of(decode.name, decode.fingerprint)
                prefill = picker._choose(self, _but(partners, not_prefill), len(paired))
                known_target = known.only.get
                return Pair(known_target(decode.name) or picker._target(decode, self),
                            known_target(prefill.name) or picker._target(prefill, self))
        decodes: Sequence[FleetMember] = _but(known.decodes, not_decode)
        if not decodes:
            return None
        if self.stays:
            decodes = picker._holders(self, decodes) or decodes
        return Pair(picker._target(picker._choose(self, decodes, 1), self), None)

    def prefill_for(self, decode: EngineTarget, not_prefill: Collection[InstanceName] = ()) -> EngineTarget | None:
        """Another prefill instance for a request that waits on ``decode``."""
        picker = self.picker
        partners = picker._answering(self.name).partners_of(decode.instance, decode.fingerprint)
        equal = _but(partners, not_prefill) if decode.control else ()
        return picker._target(picker._choose(self, equal, 1), self) if equal else None

    def why_not(self, role: Role) -> str:
        """Why nobody of a role can be picked."""
        roster = self.picker._roster
        if role is Role.DECODE and roster.pickable(role):
            return "no decode instance that is ready may take this request now"
        return roster.why_not(role)


def _known(decodes: tuple[FleetMember, ...], prefills: tuple[FleetMember, ...],
           targets: dict[tuple[InstanceName, int], EngineTarget], only: dict[InstanceName, EngineTarget]) -> _Known:
    """What is known of these, with targets that were made of them."""
    able = tuple(m for m in prefills if m.control)
    partners = {kind: tuple(m for m in able if m.fingerprint == kind) for kind in {m.fingerprint for m in able}}
    known = _Known(decodes, prefills, partners, len(able), (), _narrowed(decodes, partners), targets, only)
    paired = tuple(m for m in decodes if m.control and known.partners_of(m.name, m.fingerprint))
    return msgspec.structs.replace(known, paired=paired)


def _narrowed(decodes: Sequence[FleetMember], partners: Mapping[Fingerprint, tuple[FleetMember, ...]]
              ) -> dict[InstanceName, tuple[FleetMember, ...]]:
    """Of decode instances that refuse some: the partners that are left."""
    out = {}
    for decode in decodes:
        if decode.refused:
            refused = {(peer.instance, peer.incarnation) for peer in decode.refused}
            out[decode.name] = tuple(m for m in partners.get(decode.fingerprint, ())
                                     if (m.name, m.incarnation) not in refused)
    return out


def _behind_door(member: FleetMember, rank: int) -> int | None:
    """What a rank is called by the server that it shares with others; None where it has one for itself."""
    if len(member.http) == 1:
        return rank if len(member.control) > 1 else None
    door = member.http[rank % len(member.http)]
    return member.http[:rank].count(door) if member.http.count(door) > 1 else None


def _but(candidates: tuple[FleetMember, ...], names: Collection[InstanceName]) -> tuple[FleetMember, ...]:
    return tuple(m for m in candidates if m.name not in names) if names else candidates
