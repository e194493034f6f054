"""What agents tell routers of caches: whatever is lost, a router soon believes what is there."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from beats import beat
from more_cases import more

from xpyd_sidecar.agent.prefix_teller import MOST_BEATS, MOST_MESSAGES, PrefixTeller
from xpyd_sidecar.contract import held_prefixes
from xpyd_sidecar.contract.held_prefixes import HeldPrefixes
from xpyd_sidecar.contract.ids import AgentId, Incarnation, InstanceName
from xpyd_sidecar.contract.membership import MAX_PREFIXES, AgentMessage, Heartbeat, PrefixChanges
from xpyd_sidecar.router.balance.candidates import PrefixCacheIndex
from xpyd_sidecar.router.balance.told_prefixes import ToldPrefixes
from xpyd_sidecar.router.fleet.member import BeatRefused
from xpyd_sidecar.router.fleet.roster import Roster

NAME = InstanceName("d0")


class PlayedRouter:
    """A roster, and what is believed of one instance."""

    def __init__(self, *, takes: bool = True) -> None:
        self.roster = Roster(beat("d0").service, started=0.0, settle_s=1.0, missed_beats=3)
        self.holdings, self.takes = PrefixCacheIndex(), takes
        self.told = ToldPrefixes(self.roster, self.holdings)

    def on_beat(self, one: Heartbeat) -> int:
        """Returns what the acknowledgement says of prefixes."""
        self.roster.on_message(0.0, one)
        member = self.roster.find(NAME, one.incarnation)
        assert member is not None
        return member.prefixes_seq if self.takes else -1

    @property
    def believed(self) -> set[int]:
        (member,) = self.roster.members()
        bit = self.holdings._bits.get((member.name, member.incarnation), 0)
        return {key for nodes in (self.holdings._young, self.holdings._old) for key, mask in nodes.items() if mask & bit}


def keys(*which: int) -> HeldPrefixes:
    return HeldPrefixes(frozenset(which))


def exchange(teller: PrefixTeller, router: PlayedRouter, seq: int, now: HeldPrefixes, **fields: object) -> int:
    """One beat, what goes behind it, and its acknowledgement. Returns the messages."""
    one = beat("d0", seq=seq, **fields)
    taken, changes = router.on_beat(one), teller.changes(one, now)
    for each in changes:
        router.told.take(each)
    teller.on_ack(seq, taken)
    return len(changes)


def test_a_router_is_told_once_it_says_that_it_takes_it_and_then_what_changes() -> None:
    teller, router = PrefixTeller(), PlayedRouter()
    assert exchange(teller, router, 1, keys(1, 2)) == 0, "nobody has acknowledged anything"
    assert exchange(teller, router, 2, keys(1, 2)) == 1
    assert router.believed == {1, 2}
    assert exchange(teller, router, 3, keys(1, 2)) == 0, "nothing has changed"
    assert exchange(teller, router, 4, HeldPrefixes(frozenset({2, 3}), frozenset({1, 9}))) == 1
    assert router.believed == {2, 3}
    assert exchange(teller, router, 5, HeldPrefixes(frozenset({2, 3}), frozenset({1, 9}))) == 0


def test_a_router_that_takes_none_is_told_nothing() -> None:
    teller, router = PrefixTeller(), PlayedRouter(takes=False)
    assert [exchange(teller, router, seq, keys(seq)) for seq in range(9)] == [0] * 9


def test_what_it_believed_of_a_prompt_that_was_sent_ends_when_it_is_told_absent() -> None:
    teller, router = PrefixTeller(), PlayedRouter()
    exchange(teller, router, 1, keys())
    exchange(teller, router, 2, keys())
    (member,) = router.roster.members()
    router.holdings._add(router.holdings._bit(member), [7, 8])
    exchange(teller, router, 3, HeldPrefixes(frozenset({8}), frozenset({7})))
    assert router.believed == {8}


def test_a_router_that_begins_anew_knows_all_within_two_beats() -> None:
    teller, router = PrefixTeller(), PlayedRouter()
    held = keys(*range(1, held_prefixes.MOST + 1))
    for seq in range(1, 6):
        exchange(teller, router, seq, held)
    assert router.believed == held.held
    router = PlayedRouter()
    exchange(teller, router, 6, held)
    counts = [exchange(teller, router, seq, held) for seq in (7, 8)]
    assert router.believed == held.held
    assert counts[0] == MOST_MESSAGES
    assert [exchange(teller, router, seq, held) for seq in (9, 10, 11)] == [0, 0, 0]


def test_messages_are_small_and_few_with_a_beat() -> None:
    teller, router = PrefixTeller(), PlayedRouter()
    exchange(teller, router, 1, keys())
    one = beat("d0", seq=2)
    changes = teller.changes(one, keys(*range(2**63, 2**63 + 50_000)))
    assert len(changes) == MOST_MESSAGES
    assert all(len(each.added) == MAX_PREFIXES * held_prefixes.KEY_BYTES for each in changes)
    assert all(len(msgspec.msgpack.encode(each)) < 1 << 15 for each in changes)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(changes[0]), type=AgentMessage) == changes[0]
    for seq in range(3, 1000):
        teller.changes(beat("d0", seq=seq), keys())
    assert len(teller._seq_at) == MOST_BEATS


def test_an_engine_that_began_anew_and_another_agent_tell_all_anew() -> None:
    teller, router = PrefixTeller(), PlayedRouter()
    for seq in (1, 2):
        exchange(teller, router, seq, keys(1, 2))
    for seq in (3, 4, 5):
        exchange(teller, router, seq, keys(3), incarnation=Incarnation("b" * 32))
    assert router.believed == {3}
    teller = PrefixTeller()
    for seq in (1, 2, 3):
        exchange(teller, router, seq, keys(4), incarnation=Incarnation("b" * 32), agent=AgentId("z"))
    assert router.believed == {4}


def test_of_who_does_not_speak_for_an_instance_nothing_is_believed() -> None:
    teller, router = PrefixTeller(), PlayedRouter()
    exchange(teller, router, 1, keys())
    (right,) = teller.changes(beat("d0", seq=2), keys(1))
    for wrong in ({"agent": AgentId("other")}, {"incarnation": Incarnation("c" * 32)}, {"instance": InstanceName("d9")}):
        router.told.take(msgspec.structs.replace(right, **wrong))
    assert router.believed == set()
    for refused in ({"service": "another"}, {"v": 99}, {"added": b"half"}):
        with pytest.raises(BeatRefused):
            router.told.take(msgspec.structs.replace(right, **refused))
    assert router.believed == set()


@pytest.mark.parametrize("seed", [*range(10), *more(range(10, 200))])
def test_whatever_is_lost_a_router_soon_believes_what_is_there(seed: int) -> None:
    """Beats, messages and acknowledgements are lost, acknowledgements come late, routers and agents begin anew."""
    random = Random(seed)
    teller, router, agent = PrefixTeller(), PlayedRouter(), 0
    now, seq = keys(), 0
    acks: list[tuple[int, int]] = []
    for _ in range(200):
        seq += 1
        held = set(now.held) ^ {random.randrange(60) for _ in range(random.randrange(4))}
        now = HeldPrefixes(frozenset(held), frozenset(random.sample(range(60, 90), 5)))
        one = beat("d0", seq=seq, agent=AgentId(f"{agent:03}"))
        if random.random() < 0.05:
            router = PlayedRouter()
        elif random.random() < 0.05:
            teller, agent, acks = PrefixTeller(), agent + 1, []
        arrives = random.random() < 0.8
        if arrives:
            acks.append((seq, router.on_beat(one)))
        changes: list[PrefixChanges] = teller.changes(one, now)
        for each in changes:
            if random.random() < 0.1:
                teller.on_lost()
                break
            if arrives and random.random() < 0.9 and router.roster.members():
                router.told.take(each)
        if random.random() < 0.3:
            acks = acks[1:]
        while acks and random.random() < 0.6:
            teller.on_ack(*acks.pop(0))
    for _ in range(4):  # nothing is lost any more
        for ack in acks:
            teller.on_ack(*ack)
        seq += 1
        one = beat("d0", seq=seq, agent=AgentId(f"{agent:03}"))
        acks = [(seq, router.on_beat(one))]
        for each in teller.changes(one, now):
            router.told.take(each)
    assert router.believed == now.held
