"""The connector's half beside the scheduler: pairing (decode), offers (prefill), and what they tell peers and workers.

Hooks run on the engine's thread, ``Handler`` methods on the control thread. One lock guards the machines; it is held for
short computations only, never over I/O.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from xpyd_sidecar.contract import fingerprint as fingerprints
from xpyd_sidecar.contract import legs, metrics, record
from xpyd_sidecar.contract.ids import Incarnation, Role
from xpyd_sidecar.contract.legs import Leg, Peer
from xpyd_sidecar.contract.membership import Parallel
from xpyd_sidecar.contract.timeline import Asked, Told
from xpyd_sidecar.engine import compat, fingerprint
from xpyd_sidecar.engine.control import ControlThread
from xpyd_sidecar.engine.crew import Crew
from xpyd_sidecar.engine.nap import Nap
from xpyd_sidecar.engine.notes import clock
from xpyd_sidecar.engine.reports import ExpectOrder, FailOrder, LoadOrder, LoadReport, Orders, RankAddress, Report
from xpyd_sidecar.engine.ring import Ring
from xpyd_sidecar.engine.settings import Settings
from xpyd_sidecar.engine.stats import Stats
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv import identity, mapping, messages, offers, pairing, peers
from xpyd_sidecar.kv.keys import Key, Outcome, Recent
from xpyd_sidecar.kv.leases import Lease
from xpyd_sidecar.kv.messages import Announce, Control, Drop, Gone, Hello, Ping, Pong, Prefix, Reject, ToDecode, Welcome
from xpyd_sidecar.kv.offers import Offers
from xpyd_sidecar.kv.pairing import Pairing, Verdict

logger = logging.getLogger(__name__)

HELD: Final = (metrics.KEPT_BYTES, metrics.BUFFER_USED, metrics.POOL_USED)
"""Gauges of a worker that come to 0 without anybody's request."""
REFUSED_PROMPT: Final = [0]
"""Of the request in whose name vLLM's front end reports a leg that it refused."""


class SchedulerSide:
    """One engine (one DP rank of it)."""

    def __init__(self, config: Any, settings: Settings, *, recompute: bool) -> None:
        """Bind the control socket.

        Raises:
            ConfigError: the port cannot be bound.
        """
        self._config = config
        self._settings = settings
        self._incarnation = Incarnation(compat.common_id(config) or secrets.token_hex(16))
        self._block_size = int(config.cache_config.block_size)
        tensor, pipeline, data = compat.sizes(config)
        self._parallel = Parallel(tensor, pipeline, data)
        self._ranks = tensor * pipeline
        self._lock = threading.RLock()
        options = settings.options
        self._pairing = Pairing(recompute=recompute, unclaimed_s=options.claim_s)
        self._offers = Offers(block_size=self._block_size, ranks=self._ranks)
        self._data: tuple[messages.Rank, ...] = ()
        self._self: peers.Self | None = None
        self._crew: Crew | None = None
        self._greeted: Recent[bytes, peers.Met] = Recent()
        self._orders = Orders()
        self._loading: dict[str, LoadOrder] = {}
        self._expected: dict[str, list[LoadReport]] = {}
        self._stats = Stats()
        self._gauges: dict[str, int] = {}
        self._levels: dict[int, dict[str, int]] = {}
        self._invited: Recent[Key, None] = Recent()
        self._ring = Ring()
        self._loaded_now: dict[str, Key] = {}
        """By request: loads that are over, of requests that have not run since."""
        self._waiting_since: dict[str, float] = {}
        """By request."""
        port = options.control_port + compat.dp_rank(config) if options.control_port else 0
        self._nap = Nap() if data == 1 else None
        """Ranks that step together do not sleep alone."""
        self.calm = False
        """The engine takes naps."""
        self._control = ControlThread(self, settings.key, host=settings.host, port=port,
                                      peer_timeout_s=options.peer_timeout_s)

    # --- start and end ---

    def workers_are(self, addresses: Iterable[RankAddress]) -> None:
        """All workers have started: make this engine known and begin to listen.

        Raises:
            ConfigError: ranks of one pipeline stage do not have the same arrays.
        """
        ranks = sorted(addresses, key=lambda one: one.rank)
        assert [one.rank for one in ranks] == list(range(self._ranks)), f"ranks {[one.rank for one in ranks]}"
        fields = fingerprint.collect(self._config)
        self._data = tuple(one.data for one in ranks)
        try:
            geometry = mapping.geometry(self._parallel.tensor, [one.arrays for one in ranks])
        except mapping.Unmappable as error:
            raise ConfigError(f"kv connector: {error}") from None
        self._self = peers.Self(self._settings.instance, self._incarnation, fields, self._parallel, geometry)
        self._crew = Crew([one.place for one in ranks], host=self._settings.host, key=self._settings.key,
                          run_dir=self._settings.run_dir, give_back=self._not_called)
        self._control.start()
        if self._settings.run_dir is not None:
            record.write(self._settings.run_dir, record.EngineRecord(
                record.VERSION, compat.dp_rank(self._config), self._incarnation, self._control.address, fields,
                self._parallel, compat.max_model_len(self._config), os.getpid(), time.time()))
        logger.info("xpyd: control %s, data %s, incarnation %s, fingerprint %s", self._control.address,
                    ", ".join(one.address for one in self._data), self._incarnation, fingerprints.digest(fields))

    def stop(self) -> None:
        """End the threads."""
        if self._crew is not None:
            self._crew.stop()
        self._control.stop()

    # --- hooks, on the engine's thread ---

    def new_request(self, request: Any) -> None:
        """A request has arrived."""
        params = request.kv_transfer_params
        if not params:
            return
        try:
            leg = legs.decode(params)
            prompt = _identity(request)
        except (ValueError, TypeError) as error:
            logger.warning("xpyd: request %s is served as an ordinary one: %s", request.request_id, error)
            return
        with self._lock:
            key = Key(leg.transfer, leg.attempt, 1)
            self._ring.mark(key, "arrived", sends=leg.role is Role.PREFILL, tokens=request.num_prompt_tokens)
            if leg.role is Role.PREFILL and leg.peer is not None:
                self._offers.register(request.request_id, key, leg.peer, prompt, request.num_prompt_tokens)
            else:
                self._register_decode(request, leg, prompt)

    def _register_decode(self, request: Any, leg: Leg, prompt: bytes) -> None:
        self._waiting_since[request.request_id] = time.monotonic()
        self._pair(self._pairing.register(
            request.request_id, leg.transfer, leg.attempt, identity=prompt, tokens=request.num_prompt_tokens,
            lease=Lease.of(time.monotonic(), leg.remaining_s),
            withdrawn=list(request.prompt_token_ids[:2]) == REFUSED_PROMPT))

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``computed`` come from a prefill engine; None: ask again later."""
        with self._lock:
            verdict = self._pairing.ask(request.request_id, time.monotonic())
        if verdict is Verdict.WAIT:
            return None, False
        if verdict is Verdict.LOAD:
            return request.num_prompt_tokens - computed, True
        # The smallest load there is, only so that it can be reported as failed: vLLM has no other way to fail a request.
        return (1, True) if verdict is Verdict.FAIL else (0, False)

    def allocated(self, request: Any, ids: list[int], external: int) -> None:
        """Blocks have been allocated for a request."""
        name = request.request_id
        with self._lock:
            self._offer(self._offers.allocated(name))
            if external > 0:
                first = (request.num_prompt_tokens - external) // self._block_size
                last = -(-request.num_prompt_tokens // self._block_size)
                leg = self._pairing.leg(name)
                if leg is not None and leg.source is not None:
                    self._loading[name] = LoadOrder(name, leg.source, first, tuple(ids[first:last]))
                    self._ring.mark(leg.source.key, "allocated", sends=False)
            self._pair(self._pairing.allocated(name, external))

    def build_orders(self, output: Any) -> Orders:
        """What the workers are to do in this step."""
        with self._lock:
            self._pair(self._pairing.newer())
            self._expect()
            self._orders.tokens = sum(output.num_scheduled_tokens.values())
            for request in output.scheduled_new_reqs:
                if (loaded := self._loaded_now.pop(request.req_id, None)) is not None:
                    self._ring.mark(loaded, "admitted", sends=False)
                    self._orders.firsts.append(loaded)
                if self._offers.tracks(request.req_id):
                    self._offer(self._offers.step(
                        request.req_id, request.block_ids[0], reset=True,
                        computed=request.num_computed_tokens + output.num_scheduled_tokens[request.req_id]))
            cached = output.scheduled_cached_reqs
            for at, name in enumerate(cached.req_ids):
                if self._offers.tracks(name):
                    new = cached.new_block_ids[at]
                    self._offer(self._offers.step(
                        name, new[0] if new else (), reset=name in cached.resumed_req_ids,
                        computed=cached.num_computed_tokens[at] + output.num_scheduled_tokens[name]))
            orders, self._orders = self._orders, Orders()
            loading = bool(self._expected)
            idle = orders.idle and self._pairing.open > 0 and not self._offers.open
        if self._crew is not None:
            orders.crew = self._crew.handle()
        if self._nap is not None:
            orders.calm = self.calm = self._nap.step(idle=idle, loading=loading)
        return orders

    def _expect(self) -> None:
        """Whose request has no blocks yet, although they were asked for, may have to be kept in the buffer.

        Rank goes to rank: prefill offers nothing where the sizes of the two differ.
        """
        for source in self._pairing.without_blocks():
            if source.key not in self._invited and len(source.data) == self._ranks:
                self._invited.put(source.key, None)
                self._orders.expects.append(ExpectOrder(source, -(-source.tokens // self._block_size)))

    def heard(self, output: Any) -> None:
        """Workers report. Ids that vLLM does not wait for are taken out: it would end over them."""
        report = output.kv_connector_worker_meta
        with self._lock:
            if isinstance(report, Report):
                for send in report.sends:
                    self._offer(self._offers.rank_ended(*send))
                for link, size in report.moved.items():
                    self._stats.moved(link, size)
                for name, amount in report.counts.items():
                    self._stats.add(name, amount)
                self._levels |= report.levels
                self._remember(report)
                for load in report.loads:
                    if load.request in self._expected:
                        self._expected[load.request].append(load)
            known = {name for name in output.finished_recving or () if name in self._expected}
            for name in known:
                self._loaded(name, self._expected.pop(name))
            output.finished_recving = known or None
            output.finished_sending = None

    def _remember(self, report: Report) -> None:
        for key, noted in report.sent_notes:
            self._ring.side(key, noted, sends=True)
        for key, noted in report.load_notes:
            self._ring.side(key, noted, sends=False)
        for key, noted in report.first_notes:
            self._ring.first(key, noted)

    def _loaded(self, name: str, reports: list[LoadReport]) -> None:
        order = self._loading.pop(name, None)
        bad = next((one for one in reports if one.outcome is not Outcome.OK), None)
        leg = self._pairing.leg(name)
        if bad is None and order is not None and leg is not None and leg.state is pairing.State.LOADING:
            self._stats.add(metrics.LOADED_BYTES, sum(one.size for one in reports))
            self._stats.add(metrics.LOADED_TOKENS, leg.tokens - order.first * self._block_size)
            if (since := self._waiting_since.pop(name, None)) is not None:
                self._stats.add(metrics.WAIT_SECONDS, time.monotonic() - since)
            self._ring.mark(order.source.key, "loaded", sends=False)
            self._loaded_now[name] = order.source.key
        self._pair(self._pairing.finished(name, bad.outcome if bad else Outcome.OK, bad.reason if bad else "",
                                          tries=len({one.key for one in reports})))

    def ended(self, request: Any) -> None:
        """A request has ended."""
        with self._lock:
            self._loaded_now.pop(request.request_id, None)
            self._waiting_since.pop(request.request_id, None)
            self._offer(self._offers.end(request.request_id))
            self._pair(self._pairing.end(request.request_id))

    def pending(self) -> bool:
        """Whether the engine must keep stepping although it has no requests.

        Sends are open, something is to be told, or KV is still held in host memory: copies may leave after their transfer
        has ended, and what waits to be claimed runs out, which the workers can only say in a step.
        """
        with self._lock:
            orders = self._orders
            return bool(self._offers.open or orders.releases or orders.abandons or self._stats.data or self._gauges_moved()
                        or any(levels.get(name) for levels in self._levels.values() for name in HELD))

    def take_stats(self) -> Stats | None:
        """What has been counted since the last call."""
        with self._lock:
            moved = self._gauges_moved()
            self._gauges |= moved
            stats, self._stats = self._stats, Stats()
        stats.data.update(moved)
        return None if stats.is_empty() else stats

    def _gauges_moved(self) -> dict[str, int]:
        now = {metrics.SENDS_OPEN: self._offers.open, metrics.RECEIVES_OPEN: self._pairing.open}
        for name in (metrics.KEPT_BYTES, metrics.BUFFER_USED, metrics.POOL_USED, metrics.NCCL_GROUPS, metrics.NCCL_BYTES):
            now[name] = sum(levels.get(name, 0) for levels in self._levels.values())
        return {name: value for name, value in now.items() if self._gauges.get(name) != value}

    # --- instructions of the machines; the lock is held ---

    def _pair(self, steps: list[pairing.Instruction]) -> None:
        for step in steps:
            if isinstance(step, pairing.DropPeer):
                self._control.post(step.peer, Drop(*step.key, step.outcome, step.reason))
            elif isinstance(step, pairing.Load):
                self._load(step)
            elif isinstance(step, pairing.FailLoad):
                leg = self._pairing.leg(step.request)
                assert leg is not None
                assert leg.failed is not None
                self._orders.fails.append(FailOrder(step.request, leg.key(), *leg.failed))
                self._expected.setdefault(step.request, [])
            elif isinstance(step, pairing.Abandon):
                self._orders.abandons.append(step.request)
            else:
                self._received(step)

    def _load(self, step: pairing.Load) -> None:
        leg = self._pairing.leg(step.request)
        met = self._greeted.get(leg.peer) if leg is not None else None
        if step.request in self._expected:
            self._stats.add(metrics.RETRIES, 1)
        self._expected.setdefault(step.request, [])
        if met is None:  # thousands of peers have greeted since
            reason = "its HELLO is forgotten"
            self._orders.fails.append(FailOrder(step.request, step.source.key, Outcome.INCARNATION, reason))
            return
        order = self._loading[step.request] = self._loading[step.request]._replace(source=step.source, plan=met.plan)
        self._orders.loads.append(order)

    def _received(self, step: pairing.Ended) -> None:
        self._stats.ended("receive", step.outcome)
        self._ring.mark(step.key, "ended", sends=False, outcome=step.outcome)
        level = logging.INFO if step.outcome is Outcome.OK else logging.WARNING
        logger.log(level, "xpyd: load of %s for %s: %s %s", step.key, step.request, step.outcome, step.reason)

    def _offer(self, steps: list[offers.Instruction]) -> None:
        for step in steps:
            if isinstance(step, offers.Push):
                self._orders.pushes.append(step)
            elif isinstance(step, offers.Release):
                if self._crew is None or not self._crew.let_go(step):
                    self._orders.releases.append(step)
            elif isinstance(step, offers.SendAnnounce):
                self._ring.mark(step.key, "announced", sends=True)
                if not self._control.post(step.peer, Announce(*step.key, step.identity, step.tokens, self._data)):
                    self._offer(self._offers.drop(step.key, Outcome.OVERFLOW, "the control queue is full"))
            elif isinstance(step, offers.SendGone):
                self._control.post(step.peer, Gone(*step.key, step.outcome, step.reason, step.retry))
            else:
                self._pushed(step)

    def _pushed(self, step: offers.Ended) -> None:
        self._stats.ended("send", step.outcome)
        self._ring.mark(step.key, "ended", sends=True, outcome=step.outcome)
        if step.outcome is Outcome.OK:
            self._stats.add(metrics.PUSHED_BYTES, step.bytes)
            self._stats.add(metrics.PUSHED_TOKENS, step.tokens)
        level = logging.INFO if step.outcome is Outcome.OK else logging.WARNING
        logger.log(level, "xpyd: push of %s to %s: %s %s", step.key, step.peer.instance, step.outcome, step.reason)

    def _not_called(self, releases: list[offers.Release]) -> None:
        """Workers could not be called, on the crew's thread: it goes with the next step."""
        with self._lock:
            self._orders.releases += releases

    # --- Handler, on the control thread ---

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """The lock; the engine's thread looks at what has changed when it is given back."""
        with self._lock:
            yield
        if self._nap is not None:
            self._nap.wake()

    def from_prefill(self, peer: bytes, message: Control) -> None:
        """A prefill engine says something."""
        ours = self._self
        assert ours is not None
        with self._awake():
            if isinstance(message, Hello):
                met = peers.meet(ours, message)
                self._greeted.put(peer, met)
                if met.refused:
                    logger.warning("xpyd: refused prefill engine %s: %s", message.instance, met.refused[1])
                    self._control.post(peer, Reject(*met.refused))
                else:
                    self._control.post(peer, Welcome(ours.instance, ours.incarnation))
            elif isinstance(message, Ping):
                self._control.post(peer, Pong(message.seq, ours.incarnation))
            elif isinstance(message, Asked):
                self._control.post(peer, Told(ours.instance, time.monotonic(), clock(), self._ring.told(message.transfers)))
            elif (known := self._greeted.get(peer)) is None:
                self._control.post(peer, Reject(Outcome.INCARNATION, "no HELLO on this connection"))
            elif isinstance(message, Announce):
                self._ring.mark(message.key, "announced", sends=False)
                self._pair(self._pairing.announce(peer, message, time.monotonic(), ranks=known.ranks,
                                                  refused=known.refused))
            elif isinstance(message, Gone):
                self._pair(self._pairing.gone(message))
            else:
                self._control.post(peer, Reject(Outcome.PROTOCOL, f"{type(message).__name__} is not for decode"))

    def unreadable(self, peer: bytes, prefix: Prefix) -> None:
        """A prefill engine of another wire version says something."""
        reason = f"control wire version {messages.WIRE_VERSION} here, {prefix.version} there"
        with self._awake():
            self._pair(self._pairing.refuse(prefix.transfer, prefix.attempt, Outcome.INCOMPATIBLE, reason))
        self._control.post(peer, Reject(Outcome.INCOMPATIBLE, reason))

    def from_decode(self, peer: Peer, message: Control) -> None:
        """A decode engine answers."""
        if isinstance(message, Drop):
            with self._awake():
                self._offer(self._offers.drop(message.key, message.outcome, message.reason))

    def decode_lost(self, peer: Peer, outcome: Outcome, reason: str) -> None:
        """A decode engine refuses, does not answer, or lives another life."""
        logger.warning("xpyd: decode engine %s (%s): %s", peer.instance, peer.control, reason)
        with self._awake():
            self._offer(self._offers.peer_lost(peer, outcome, reason))

    def wanted(self) -> set[Peer]:
        """Decode engines that have transfers open."""
        with self._lock:
            return self._offers.peers()

    def greeting(self, peer: Peer) -> ToDecode:
        """The first message to a decode engine."""
        assert self._self is not None
        return self._self.hello(peer.incarnation)

    def tick(self, now: float) -> None:
        """Time passes."""
        with self._lock:
            self._pair(self._pairing.tick(now))


def _identity(request: Any) -> bytes:
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise ValueError("prompts given as embeddings have no token ids to be paired by")
    media = [identity.MediaItem(str(one.identifier), int(one.mm_position.offset), int(one.mm_position.length))
             for one in request.mm_features or ()]
    lora = request.lora_request
    return identity.identity(request.prompt_token_ids, media, (lora.lora_name, lora.lora_path) if lora else None,
                             request.cache_salt)
