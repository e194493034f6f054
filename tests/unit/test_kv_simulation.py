"""The five machines against each other, over channels that lose, delay and break, in many random orders.

Held in every order: a committed load has exactly the prompt's blocks in its slots; nothing is written into blocks that are
no longer held; every request ends; nothing stays open and every copy is freed once.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, TransferId
from xpyd_sidecar.kv import fetch_steps, offers, pairing, publishing, receiving
from xpyd_sidecar.kv.array_layout import ArrayLayout, ArrayPart
from xpyd_sidecar.kv.buddy import Buddy
from xpyd_sidecar.kv.buffer import Buffer
from xpyd_sidecar.kv.fetch_steps import Fetch, FetchPlan
from xpyd_sidecar.kv.fetching import Fetching
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.leases import Lease
from xpyd_sidecar.kv.manifests import Ask, Manifest, ManifestTaken
from xpyd_sidecar.kv.messages import Announce, Drop, ListeningRank, TryGone
from xpyd_sidecar.kv.offers import Offers
from xpyd_sidecar.kv.pairing import LoadVerdict, Pairing
from xpyd_sidecar.kv.publishing import Publishing
from xpyd_sidecar.kv.reach import CacheGroup, Reach, TableSpan
from xpyd_sidecar.kv.receiving import LoadSource, Order, Receiving
from xpyd_sidecar.kv.ring import Ring

BLOCK = 4
GROUPS = (CacheGroup(Reach("all", BLOCK), BLOCK),)
REGIONS = 2
WHOLE = FetchPlan((ArrayLayout(1, 256, 1),) * REGIONS, {at: ArrayPart(at, 0, 1, 0) for at in range(REGIONS)}, 1)
ME = Incarnation("d" * 32)
DECODE = legs.Peer(InstanceName("d"), Incarnation("d" * 32), HostPort("d:1"))


@dataclass(eq=False)
class Block:
    """A copy's bytes: which prompt's blocks they are, and how often they were freed."""

    prompt: int
    region: int
    first: int
    blocks: int
    freed: int = 0


@dataclass
class Link:
    """One ordered connection from D to a P."""

    number: int
    to_p: deque[tuple[str, Key, object]] = field(default_factory=deque)
    to_d: deque[tuple[str, Key, object]] = field(default_factory=deque)


class Prefill:
    def __init__(self, sim: Sim, name: str) -> None:
        self.sim, self.name, self.alive = sim, name, True
        self.offers = Offers(groups=GROUPS, ranks=1)
        self.publishing = Publishing[Block](keep_s=20 if sim.lossy else 1e9, send_s=30, grace_s=2)
        self.told: dict[tuple[Key, int], Block] = {}
        """By the number of its manifest."""
        self.to_d: deque[Announce | TryGone] = deque()
        self.from_d: deque[Drop] = deque()
        self.running: dict[str, list[int]] = {}
        self.links: dict[int, Link] = {}
        self.ended: list[offers.PrefillLegEnded] = []

    def start(self, request: str, key: Key, prompt: int, tokens: int) -> None:
        self.offers.register(request, key, DECODE, bytes([prompt]) * 32, (tokens + 1, tokens))
        self.running[request] = [prompt, tokens, 0]
        self.offer(self.offers.on_allocated(request, 0))

    def step(self, request: str) -> None:
        prompt, tokens, done = self.running[request]
        done = min(tokens, done + self.sim.random.randrange(1, 3 * BLOCK))
        self.running[request][2] = done
        ids = list(range(1, 1 + -(-tokens // BLOCK)))
        for one in self.offers.step(request, [ids], computed=done):
            assert isinstance(one, offers.Push)
            for region in range(REGIONS):
                block = Block(prompt, region, one.first, len(one.ids))
                self.sim.copies.append(block)
                if self.sim.random.random() < 0.02:  # over the budget: never made
                    self.sim.copies.remove(block)
                    self.send(self.publishing.release(one.key, Outcome.OVERFLOW, "full"))
                    break

                def manifest(number: int, block: Block = block, key: Key = one.key) -> Manifest:
                    self.told[key, number] = block
                    return Manifest(number, block.region, 1, block.first, block.blocks, 0)

                self.send(self.publishing.publish(one.key, manifest, (block, 1), self.sim.now))
        if done == tokens:
            self.end(request)

    def end(self, request: str) -> None:
        del self.running[request]
        self.offer(self.offers.end(request))

    def offer(self, steps: list[offers.Instruction]) -> None:
        for one in steps:
            if isinstance(one, offers.Release):
                self.send(self.publishing.release(one.key, one.outcome, one.reason, retry=one.outcome is Outcome.ABORTED))
            elif isinstance(one, offers.SendAnnounce):
                rank = ListeningRank(HostPort(self.name), Incarnation(""))
                self.to_d.append(Announce(*one.key, one.identity, one.prompt, one.tokens, (rank,), one.cached))
            elif isinstance(one, offers.SendGone):
                self.to_d.append(TryGone(*one.key, one.outcome, one.reason, one.retry))
            else:
                assert isinstance(one, offers.PrefillLegEnded)
                self.ended.append(one)

    def send(self, steps: list[publishing.Step[Block]]) -> None:
        for one in steps:
            if isinstance(one, publishing.FreeCopy):
                one.data.freed += 1
            elif isinstance(one, publishing.PublishEnded):
                self.offer(self.offers.rank_ended(0, one.key, one.outcome, one.reason, 1 if one.confirmed else 0))
            elif one.link not in self.links:
                raise AssertionError("said over a session that has ended")
            elif isinstance(one, publishing.Tell):
                self.links[one.link].to_d.append(("manifest", one.key, one.manifest))
            elif isinstance(one, publishing.RefuseTry):
                self.links[one.link].to_d.append(("gone", one.key, (one.outcome, one.retry)))

    def hear(self, link: Link) -> None:
        _, key, body = link.to_p.popleft()
        if isinstance(body, Ask):
            self.send(self.publishing.ask(link.number, ME, key, body, self.sim.now))
        elif isinstance(body, ManifestTaken):
            self.send(self.publishing.on_taken(link.number, ME, key, body.number))
        elif body == "done":
            self.send(self.publishing.on_done(link.number, ME, key))
        else:
            self.send(self.publishing.cancel(link.number, ME, key, Outcome.ABORTED, "cancelled"))

    def tick(self) -> None:
        self.send(self.publishing.tick(self.sim.now))


class Decode:
    def __init__(self, sim: Sim, *, recompute: bool) -> None:
        self.sim, self.recompute = sim, recompute
        self.pairing = Pairing(recompute=recompute, unclaimed_s=20)
        self.receiving = Receiving(load_s=15, grace_s=1)
        self.fetching = Fetching(Ring(0), Buffer(Buddy(0), Buddy(0), ttl_s=60), piece=512, window=1024, cover=False)
        self.links: dict[str, Link] = {}
        self.wants: dict[Key, receiving.WantTry] = {}
        self.flights: dict[int, Fetch] = {}
        self.again: set[Key] = set()
        """Tries whose session has ended, of which nothing has come since."""
        self.waiting: dict[str, tuple[int, int, int]] = {}  # request → prompt, tokens, first missing block
        self.held: dict[str, tuple[int, ...]] = {}
        self.aborted: set[str] = set()
        self.result: dict[str, str] = {}
        self.cache: dict[tuple[int, int], tuple[Key, int, int, int]] = {}
        self.slots = 0
        self.finished: dict[str, int] = {}
        self.inbox: deque[fetch_steps.BlocksArrived] = deque()
        self.orders: deque[Callable[[], None]] = deque()
        """To the worker, which hears of them with a step."""
        self.reports: deque[receiving.LoadFinished] = deque()
        """From the worker, which the scheduler hears of after that step, and perhaps after it has ordered the next one."""
        self.ids: dict[str, tuple[int, ...]] = {}
        self.switched = 0

    def start(self, request: str, key: Key, prompt: int, tokens: int) -> None:
        self.waiting[request] = (prompt, tokens, self.sim.random.randrange(-(-tokens // BLOCK)))
        self.pair(self.pairing.register(request, key.transfer, key.attempt, identity=bytes([prompt]) * 32,
                                        tokens=tokens + 1, handed=tokens, lease=Lease.start(self.sim.now, 10)))

    def step(self) -> None:
        if self.sim.random.random() < 0.2:
            self.listen()
        for request in list(self.waiting):
            verdict = self.pairing.ask(request, self.sim.now)
            if verdict is LoadVerdict.WAIT or self.sim.random.random() < 0.3:  # asked again later, nothing allocated
                continue
            prompt, tokens, first = self.waiting.pop(request)
            if verdict is LoadVerdict.COMPUTE:
                self.result[request] = "computed"
                self.pair(self.pairing.on_allocated(request, 0))
                continue
            count = -(-tokens // BLOCK) - first
            self.held[request] = self.ids[request] = tuple(range(self.slots, self.slots + count))
            self.slots += count
            self.order = (first, prompt)
            self.pair(self.pairing.on_allocated(request, tokens - first * BLOCK))
        newer = self.pairing.newer()
        self.switched += len(newer)
        self.pair(newer)
        self.receive(self.receiving.tick(self.sim.now))

    def abort(self, request: str) -> None:
        self.waiting.pop(request, None)
        if request in self.held:
            self.aborted.add(request)
        else:
            self.result.setdefault(request, "aborted")
        self.pair(self.pairing.end(request))

    def pair(self, steps: list[pairing.Instruction]) -> None:
        for one in steps:
            if isinstance(one, pairing.DropPeer):
                prefill = self.sim.prefills[one.peer.decode()]
                if prefill.alive:
                    prefill.from_d.append(Drop(*one.key, one.outcome, one.reason))
            elif isinstance(one, pairing.StartLoad):
                known = self.sim.first_of.setdefault(one.request, self.order)
                rank = one.source.data[0]
                order = Order(one.request, one.source.key, (TableSpan(known[0], self.ids[one.request]),),
                              (LoadSource(rank.address, rank.incarnation, WHOLE),))
                self.orders.append(lambda order=order: self.receive(self.receiving.load(order, self.sim.now)))
            elif isinstance(one, pairing.FailLoad):
                none = Key(TransferId("0" * 32), Attempt(1), 1)
                self.orders.append(lambda name=one.request, key=none: self.receive(
                    self.receiving.fail(name, key, Outcome.DEADLINE, "")))
            elif isinstance(one, pairing.Abandon):
                self.orders.append(lambda name=one.request: self.receive(self.receiving.abandon(name)))

    def receive(self, steps: list[receiving.Instruction]) -> None:
        for one in steps:
            if isinstance(one, receiving.WantTry):
                self.wants[one.key] = one
                self.ask(one)
                assert one.tables is not None
                if one.key in self.wants:
                    self.fetch(self.fetching.allot(one.ident, one.tables))
            elif isinstance(one, receiving.LoadFinished):
                self.finish(one)
            else:
                want = self.wants.pop(one.key, None)
                if want is not None and (link := self.links.get(want.address)) is not None:
                    link.to_p.append(("", one.key, "done" if isinstance(one, receiving.Confirm) else "cancel"))
                self.fetch(self.fetching.cancel((one.key, one.source)))

    def ask(self, want: receiving.WantTry) -> None:
        """Ask over the session with its source, which is begun where there is none."""
        link = self.connect(want.address)
        if link is None:
            self.broken(want.key, (Outcome.PEER_LOST, "refused"), final=False)
        else:
            self.fetch(self.fetching.begin(want.ident, link.number, want.plan, self.sim.now))

    def broken(self, key: Key, why: tuple[Outcome, str], *, final: bool) -> None:
        if self.wants.pop(key, None) is not None:
            self.again.discard(key)
            self.fetch(self.fetching.cancel((key, 0)))
            self.orders.append(lambda: self.receive(self.receiving.on_source_lost(key, 0, why, self.sim.now, final=final)))

    def fetch(self, steps: list[fetch_steps.Step]) -> None:
        for one in steps:
            if isinstance(one, Fetch):
                self.flights[one.number] = one
            elif isinstance(one, fetch_steps.BlocksArrived):
                self.again.discard(one.key)
                self.inbox.append(one)
            elif isinstance(one, fetch_steps.SayFrame):
                link = next((link for link in self.links.values() if link.number == one.link), None)
                if link is not None:
                    link.to_p.append(("", one.key, one.body))
            else:
                pytest.fail(f"neither a ring nor sums are here: {one}")

    def land(self) -> None:
        """A fetch has an end. What it writes goes into blocks only while their load is open."""
        number = self.sim.random.choice(list(self.flights))
        flight = self.flights.pop(number)
        want = self.wants.get(flight.key)
        link = self.links.get(want.address) if want is not None else None
        if want is None or link is None or link.number != flight.link:
            self.fetch(self.fetching.on_fetch_failed(number))
            return
        block = self.sim.prefills[want.address].told[flight.key, flight.manifest]
        assert block.freed == 0, "a copy was freed under a fetch"
        if want.request not in self.held:
            self.fetch(self.fetching.on_fetch_failed(number))
            return
        assert want.tables is not None
        (table,) = want.tables
        for piece in flight.batch:
            for at in range(piece.packed.first, piece.packed.first + piece.packed.blocks):
                slot = table.ids[at - table.first]
                assert slot not in self.sim.sealed, "wrote into a block that is no longer held"
                self.cache[piece.region, slot] = (flight.key, block.prompt, block.region, at)
        self.fetch(self.fetching.on_fetched(number))

    def connect(self, name: str) -> Link | None:
        prefill = self.sim.prefills[name]
        if name not in self.links and prefill.alive:
            self.sim.link_count += 1
            self.links[name] = prefill.links[self.sim.link_count] = Link(self.sim.link_count)
        return self.links.get(name)

    def finish(self, one: receiving.LoadFinished) -> None:
        assert one.request not in self.finished, "reported twice"
        self.finished[one.request] = 1
        slots = self.held[one.request]
        if one.outcome is Outcome.OK:
            first, prompt = self.sim.first_of[one.request]
            for region in range(REGIONS):
                got = [self.cache.get((region, slot)) for slot in slots]
                assert got == [(one.key, prompt, region, first + at) for at in range(len(slots))], "committed a wrong block"
        for slot in slots:  # freed or handed to the engine: nobody may write here any more
            self.sim.sealed.add(slot)
        del self.held[one.request]
        self.reports.append(one)
        if one.request in self.aborted:
            self.result[one.request] = "aborted"
        elif one.outcome is Outcome.OK:
            self.result[one.request] = "loaded"
        else:
            self.result[one.request] = "computed" if self.recompute else "failed"

    def hear(self, link: Link) -> None:
        what, key, body = link.to_d.popleft()
        want = self.wants.get(key)
        if what == "gone":
            outcome, retry = body  # type: ignore[misc]
            if want is not None and self.links.get(want.address) is link:
                self.broken(key, (outcome, "gone"), final=not retry)
            link.to_p.append(("", key, "cancel"))
        else:
            assert isinstance(body, Manifest)
            self.fetch(self.fetching.on_manifest(link.number, (key, 0), body))

    def poll(self) -> None:
        """A step at the worker, which takes what its I/O thread has fetched, also of tries that are cancelled by now."""
        while self.orders:
            self.orders.popleft()()
        while self.inbox:
            one = self.inbox.popleft()
            self.receive(self.receiving.on_arrived(one.key, one.source, one.blocks, one.size))

    def listen(self) -> None:
        """The scheduler hears of what the worker has reported."""
        while self.reports:
            one = self.reports.popleft()
            self.pair(self.pairing.on_load_finished(one.request, one.outcome, one.reason, [one.key]))

    def cut(self, name: str, outcome: Outcome) -> None:
        """A session ends; what was taken over it is asked for once more, if that is no fault of prefill's."""
        link = self.links.pop(name, None)
        if link is None:
            return
        prefill = self.sim.prefills[name]
        del prefill.links[link.number]
        prefill.send(prefill.publishing.on_session_lost(link.number, self.sim.now))
        for key, _ in self.fetching.on_session_lost(link.number):
            if outcome is Outcome.PEER_LOST and key not in self.again and key in self.wants:
                self.again.add(key)
                self.ask(self.wants[key])
            else:
                self.broken(key, (outcome, "cut"), final=outcome is Outcome.CHECKSUM)


class Sim:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.lossy = self.random.random() < 0.5
        """Messages of control get lost. Else no sender's own deadline is needed for it to let go."""
        self.copies: list[Block] = []
        self.sealed: set[int] = set()
        self.first_of: dict[str, tuple[int, int]] = {}
        self.link_count = 0
        self.prefills = {name: Prefill(self, name) for name in ("p1", "p2")}
        self.decode = Decode(self, recompute=self.random.random() < 0.5)
        self.requests = 0

    def new_transfer(self) -> None:
        prompt = self.requests = self.requests + 1
        tokens = self.random.randrange(1, 30)
        transfer = TransferId(f"{prompt:032x}")
        plan = [lambda: self.decode.start(f"d{prompt}", Key(transfer, Attempt(1), 1), prompt, tokens)]
        for attempt in range(1, self.random.choice((1, 2, 3, 3)) + 1):
            name = self.random.choice(("p1", "p2"))
            other = prompt if self.random.random() < 0.97 else 200  # another prompt's KV, by mistake
            plan.append(lambda a=attempt, n=name, o=other: self.prefills[n].alive and self.prefills[n].start(
                f"p{prompt}.{a}", Key(transfer, Attempt(a), 1), o, tokens))
        if self.random.random() < 0.3:
            self.random.shuffle(plan)
        self.plans.append(deque(plan))

    plans: list[deque[object]]

    def act(self) -> None:
        pick = self.random.random()
        decode, names = self.decode, list(self.prefills)
        name = self.random.choice(names)
        prefill = self.prefills[name]
        self.now += self.random.random() * 0.2
        if self.plans and pick < 0.12:
            plan = self.random.choice(self.plans)
            plan.popleft()()  # type: ignore[operator]
            self.plans = [one for one in self.plans if one]
        elif pick < 0.45:
            if prefill.running:
                prefill.step(self.random.choice(list(prefill.running)))
        elif pick < 0.55:
            if prefill.to_d:
                self.deliver(prefill)
        elif pick < 0.62:
            if prefill.from_d:
                drop = prefill.from_d.popleft()
                prefill.offer(prefill.offers.drop(drop.key, drop.outcome, drop.reason))
        elif pick < 0.7:
            decode.step()
        elif pick < 0.75:
            decode.poll()
        elif pick < 0.95:
            link = decode.links.get(name)
            if decode.flights and self.random.random() < 0.3:
                decode.land()
            elif link is not None and link.to_p and self.random.random() < 0.5:
                prefill.hear(link)
            elif link is not None and link.to_d:
                decode.hear(link)
        elif pick < 0.96:
            decode.cut(name, self.random.choice((Outcome.PEER_LOST, Outcome.CHECKSUM)))
        elif pick < 0.97:
            if prefill.running:
                prefill.end(self.random.choice(list(prefill.running)))
        elif pick < 0.98:
            alive = [r for r in [*decode.waiting, *decode.held] if r not in decode.aborted]
            if alive:
                decode.abort(self.random.choice(alive))
        elif pick < 0.983:
            self.kill(prefill)
        else:
            self.now += self.random.random() * 3
            prefill.tick()
            decode.pair(decode.pairing.tick(self.now))

    def deliver(self, prefill: Prefill) -> None:
        message = prefill.to_d.popleft()
        if self.lossy and self.random.random() < 0.03:
            return  # lost with a broken connection
        peer = prefill.name.encode()
        if isinstance(message, Announce):
            self.decode.pair(self.decode.pairing.announce(peer, message, self.now, ranks=1))
        else:
            self.decode.pair(self.decode.pairing.on_gone(message))

    def kill(self, prefill: Prefill) -> None:
        prefill.alive = False
        prefill.running.clear()
        prefill.to_d.clear()
        prefill.from_d.clear()
        self.decode.cut(prefill.name, Outcome.PEER_LOST)

    def settle(self) -> None:
        """No more faults: everything must come to its end by itself."""
        for _ in range(4000):
            self.now += 0.2
            for plan in self.plans:
                plan.popleft()()  # type: ignore[operator]
            self.plans = [one for one in self.plans if one]
            for prefill in self.prefills.values():
                for request in list(prefill.running):
                    prefill.step(request)
                while prefill.to_d:
                    self.deliver(prefill)
                while prefill.from_d:
                    drop = prefill.from_d.popleft()
                    prefill.offer(prefill.offers.drop(drop.key, drop.outcome, drop.reason))
                prefill.tick()
            for name, link in list(self.decode.links.items()):
                while link.to_p:
                    self.prefills[name].hear(link)
                while link.to_d:
                    self.decode.hear(link)
            while self.decode.flights:
                self.decode.land()
            self.decode.poll()
            self.decode.listen()
            self.decode.step()
            self.decode.pair(self.decode.pairing.tick(self.now))
            decode = self.decode
            if not (self.plans or decode.waiting or decode.held or decode.orders or decode.reports or any(
                    p.alive and (p.running or p.offers.open) for p in self.prefills.values()) or any(
                    link.to_p or link.to_d for link in decode.links.values())):
                return
        raise AssertionError("did not come to an end")


@pytest.mark.parametrize("block", range(20))
def test_no_order_of_events_commits_a_wrong_block_or_leaves_anything_behind(block: int) -> None:
    loaded = switched = 0
    for seed in range(block * 40, block * 40 + 40):
        sim = Sim(seed)
        sim.plans = []
        for _ in range(sim.random.randrange(1, 5)):
            sim.new_transfer()
        for _ in range(sim.random.randrange(20, 400)):
            sim.act()
        sim.settle()
        decode = sim.decode
        for request in [r for r in decode.result if decode.pairing.leg(r) is not None]:
            decode.pair(decode.pairing.end(request))
        assert decode.pairing.open == decode.receiving.open == 0, seed
        assert set(decode.result) == {f"d{n + 1}" for n in range(sim.requests)}, seed
        switched += decode.switched
        loaded += sum(result == "loaded" for result in decode.result.values())
        for prefill in sim.prefills.values():
            if prefill.alive:
                assert prefill.offers.open == prefill.publishing.open == 0, seed
        dead = not all(p.alive for p in sim.prefills.values())
        assert all(c.freed == 1 or (dead and c.freed == 0) for c in sim.copies), seed
    assert loaded > 12  # the orders are not all of failures
    assert switched > 2  # nor without loads that change their source
