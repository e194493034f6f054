"""The connector's half beside the scheduler: pairing (decode), offers (prefill), and what they tell peers and workers.

Hooks run on the engine's thread, what peers say on the control thread (``control_handler``). One lock guards the
machines and what carries out their instructions (``scheduler_actions``); it is held for short computations only, never over
I/O.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from xpyd_sidecar.contract import fingerprint as fingerprints
from xpyd_sidecar.contract import legs, metrics, prefix_cuts, record
from xpyd_sidecar.contract.ids import Incarnation, Role
from xpyd_sidecar.contract.legs import Leg
from xpyd_sidecar.contract.membership import Parallel
from xpyd_sidecar.contract.speculation import Speculation
from xpyd_sidecar.engine import compat
from xpyd_sidecar.engine.reports import ExpectOrder, LoadOrder, LoadReport, Orders, RankAddress, StepReport
from xpyd_sidecar.engine.scheduler import prefix_ledger
from xpyd_sidecar.engine.scheduler.control_handler import ControlHandler
from xpyd_sidecar.engine.scheduler.handed_blocks import HandedBlocks, prompt_identity
from xpyd_sidecar.engine.scheduler.multi_connector import MultiConnectorReports
from xpyd_sidecar.engine.scheduler.pair_recorder import PairRecorder
from xpyd_sidecar.engine.scheduler.prefix_ledger import PrefixLedger
from xpyd_sidecar.engine.scheduler.prefix_recorder import PrefixRecorder
from xpyd_sidecar.engine.scheduler.prompt_backlog import PromptBacklog
from xpyd_sidecar.engine.scheduler.scheduler_actions import SchedulerActions
from xpyd_sidecar.engine.scheduler.step_recorder import StepRecorder
from xpyd_sidecar.engine.settings import ConnectorSettings
from xpyd_sidecar.engine.stats import Stats
from xpyd_sidecar.engine.worker_rpc import WorkerRpc
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.kv import mapping, offers, pairing, peers
from xpyd_sidecar.kv.keys import Key, Outcome, Recent
from xpyd_sidecar.kv.leases import Lease
from xpyd_sidecar.kv.load_admission import LoadAdmission
from xpyd_sidecar.kv.offers import Offers
from xpyd_sidecar.kv.pairing import LoadVerdict, Pairing
from xpyd_sidecar.kv.reach import CacheGroup, Reach
from xpyd_sidecar.session.control import ControlThread
from xpyd_sidecar.threads import watched
from xpyd_sidecar.threads.idle_polling import LOOK_S, IdlePolling

logger = logging.getLogger(__name__)

HELD: Final = (metrics.KEPT_BYTES, metrics.BUFFER_USED, metrics.POOL_USED)
"""Gauges of a worker that come to 0 without anybody's request."""
REFUSED_PROMPT: Final = [0]
"""Of the request in whose name vLLM's front end reports a leg that it refused."""


class SchedulerSide:
    """One engine (one DP rank of it)."""

    def __init__(self, config: Any, settings: ConnectorSettings, *, recompute: bool, blocks: int = 0,
                 groups: Mapping[int, CacheGroup] | None = None, states: str = "", beside: bool = False,
                 speculation: Speculation | None = None, weights: Callable[[], str] = lambda: "") -> None:
        """Bind the control socket. ``blocks`` of each rank's cache, of which loads may hold half; 0: they are not counted.
        ``beside``: other connectors are told the same as this one.

        ``groups``: by vLLM's number, those that are moved; None: one, of layers that reach over all. ``states``: what those
        of them that have states keep, in words. ``weights``: what the engine's weights are called now.

        Raises:
            ConfigError: the port cannot be bound.
        """
        self._config = config
        self._settings = settings
        self._speculation = speculation or Speculation()
        self._incarnation = Incarnation(compat.common_id(config) or secrets.token_hex(16))
        block_size = int(config.cache_config.block_size)
        self._blocks = HandedBlocks(groups or {0: CacheGroup(Reach("all", block_size), block_size)}, compat.backoff(config))
        self._states = states
        tensor, pipeline, data = compat.sizes(config)
        self._parallel = Parallel(tensor, pipeline, data)
        self._ranks = tensor * pipeline
        self._lock = threading.RLock()
        options = settings.options
        self._pairing = Pairing(recompute=recompute, unclaimed_s=options.claim_s)
        self._offers = Offers(groups=self._blocks.groups, ranks=self._ranks, blocks=blocks)
        self._room = LoadAdmission(blocks)
        self._siblings = MultiConnectorReports(self._ranks) if beside else None
        self._tell_s = min(options.peer_timeout_s / 4, options.load_timeout_s / 8)
        """Between two words of work for transfers, each said in a step."""
        self._told_at = -math.inf
        self._gauges: dict[str, int] = {}
        self._levels: dict[int, dict[str, int]] = {}
        self._invited: Recent[Key, None] = Recent()
        self._loaded_now: dict[str, Key] = {}
        """By request: loads that are over, of requests that have not run since."""
        self._waiting_since: dict[str, float] = {}
        """By request."""
        self._loading: dict[str, Any] = {}
        """vLLM's requests that wait for a load, by name."""
        port = options.control_port + compat.dp_rank(config) if options.control_port else 0
        self._nap = IdlePolling() if data == 1 else None
        """Ranks that step together do not sleep alone."""
        self._calm = False
        """The engine takes naps."""
        self._pushing = False
        """The step that workers do now computes KV that leaves."""
        self._carrying = SchedulerActions(self._pairing, self._offers, weights)
        self._pairs = PairRecorder(settings.run_dir, compat.dp_rank(config), self._incarnation)
        self._prompts = PromptBacklog()
        self._steps = StepRecorder(settings.run_dir, compat.dp_rank(config), self._incarnation, self._prompts)
        self._prefixes: PrefixLedger | None = None
        """Which prefixes are in the cache; None: nobody asks, or it cannot be told."""
        self._recorder: PrefixRecorder | None = None
        self._links: dict[int, tuple[str, ...]] = {}
        """By rank: what is to be said of its links."""
        self._hearing = ControlHandler(self._lock, self._pairing, self._offers, self._carrying, nap=self._nap,
                                       pairs=self._pairs)
        self._control = ControlThread(self._hearing, settings.key, host=settings.host, port=port,
                                      peer_timeout_s=options.peer_timeout_s)
        self._carrying.control = self._control

    # --- start and end ---

    def workers_are(self, addresses: Iterable[RankAddress]) -> None:
        """All workers have started: make this engine known and begin to listen.

        Raises:
            ConfigError: ranks of one pipeline stage do not have the same arrays.
        """
        ranks = sorted(addresses, key=lambda one: one.rank)
        assert [one.rank for one in ranks] == list(range(self._ranks)), f"ranks {[one.rank for one in ranks]}"
        fields = compat.fingerprint(self._config, self._states)
        self._carrying.data = tuple(one.data for one in ranks)
        try:
            geometry = mapping.geometry(self._parallel.tensor, [one.arrays for one in ranks])
        except mapping.Unmappable as error:
            raise ConfigError(f"kv connector: {error}") from None
        self._hearing.ours = peers.Self(self._settings.instance, self._incarnation, fields, self._parallel, geometry,
                                        self._speculation)
        self._carrying.crew = WorkerRpc([one.place for one in ranks], host=self._settings.host, key=self._settings.key,
                                        run_dir=self._settings.run_dir, give_back=self._not_called,
                                        abandon=watched.end_process if self._settings.life else None)
        self._control.start()
        self._steps.start()
        if self._settings.run_dir is not None:
            record.write(self._settings.run_dir, record.EngineRecord(
                record.VERSION, compat.dp_rank(self._config), self._incarnation, self._control.address, fields,
                self._parallel, compat.max_model_len(self._config), os.getpid(),
                peers.SPOKEN, compat.sampling(self._config), self._speculation))
        logger.info("xpyd: control %s, data %s, incarnation %s, fingerprint %s", self._control.address,
                    ", ".join(one.address for one in self._carrying.data), self._incarnation, fingerprints.digest(fields))

    def stop(self) -> None:
        """End the threads of the scheduler side."""
        if self._carrying.crew is not None:
            self._carrying.crew.stop()
        self._control.stop()
        self._steps.stop()
        if self._recorder is not None:
            self._recorder.stop()

    # --- hooks, on the engine's thread ---

    def watch_cache(self, pool: Any) -> None:
        """From now on the agent is told which prefixes are among the cached blocks of vLLM's ``pool``, where it has a cache
        of prefixes and they can be judged by blocks.
        """
        run_dir, groups, tokens = self._settings.run_dir, self._blocks.by_number, compat.hashed_tokens(pool)
        if run_dir is None or not tokens or not prefix_ledger.can_compare(groups.values(), tokens):
            return
        self._prefixes = ledger = PrefixLedger(groups, tokens, compat.block_key)
        self._recorder = PrefixRecorder(run_dir, compat.dp_rank(self._config), self._incarnation, ledger,
                                        lambda: compat.cached_keys(pool))
        self._recorder.start()

    def new_request(self, request: Any) -> None:
        """A request has arrived."""
        params = request.kv_transfer_params
        if isinstance(params, dict) and prefix_cuts.FIELD in params:
            self._add_prefixes(request, params[prefix_cuts.FIELD])
            if len(params) == 1:
                params = None
        if not isinstance(params, dict) or not params.get(legs.REMOTE):
            self._prompts.arrives(request.request_id, int(request.num_prompt_tokens))
        if not params:
            return
        try:
            leg = legs.decode(params)
            prompt = prompt_identity(request)
        except (ValueError, TypeError) as error:
            logger.warning("xpyd: request %s is served as an ordinary one: %s", request.request_id, error)
            return
        tokens = self._blocks.tokens(request)
        withdrawn = list(request.prompt_token_ids[:2]) == REFUSED_PROMPT
        if not tokens and not withdrawn:
            return  # prefill has nothing that decode does not compute itself
        with self._lock:
            self._carrying.look_at_weights()
            key = Key(leg.transfer, leg.attempt, 1)
            self._carrying.ring.mark(key, "arrived", sends=leg.role is Role.PREFILL, tokens=request.num_prompt_tokens)
            if leg.role is not Role.PREFILL or leg.peer is None:
                self._register_decode(request, leg, prompt, tokens, withdrawn=withdrawn)
            elif tokens:
                of = int(request.num_prompt_tokens), tokens
                if self._offers.register(request.request_id, key, leg.peer, prompt, of):
                    self._blocks.shorten(request, tokens)

    def _add_prefixes(self, request: Any, text: object) -> None:
        if self._prefixes is None:
            return
        try:
            cuts = prefix_cuts.decode(text)
        except ValueError as error:
            logger.warning("xpyd: request %s: %s", request.request_id, error)
            return
        self._prefixes.add(request.request_id, cuts, int(request.num_prompt_tokens), request.block_hashes)

    def _register_decode(self, request: Any, leg: Leg, prompt: bytes, tokens: int, *, withdrawn: bool) -> None:
        self._waiting_since[request.request_id] = time.monotonic()
        self._carrying.pair(self._pairing.register(
            request.request_id, leg.transfer, leg.attempt, identity=prompt, tokens=request.num_prompt_tokens,
            handed=tokens, lease=Lease.start(time.monotonic(), leg.remaining_s),
            ends=Lease.start(time.monotonic(), math.inf if leg.limit_s is None else leg.limit_s),
            withdrawn=withdrawn))

    def match_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """(tokens beyond ``computed`` that come from a prefill engine, whether they come later); None: ask again later."""
        with self._lock:
            self._carrying.look_at_weights()
            if not self._offers.may_begin(request.request_id):
                return None, False
            verdict = self._pairing.ask(request.request_id, time.monotonic())
            leg = self._pairing.leg(request.request_id)
            more = leg.handed - computed if leg is not None else 0
            if more <= 0 and verdict in {LoadVerdict.LOAD, LoadVerdict.WAIT}:
                return 0, False  # all that prefill hands over is in this engine's own cache
            blocks = self._blocks.count_wanted(leg.handed, computed) if leg is not None else 0
            if verdict is LoadVerdict.LOAD and not self._room.may_begin(request.request_id, blocks):
                verdict = LoadVerdict.WAIT
        if verdict is LoadVerdict.WAIT:
            return None, False
        if verdict is LoadVerdict.LOAD:
            return more, True
        # The smallest load there is, only so that it can be reported as failed: vLLM has no other way to fail a request.
        return (1, True) if verdict is LoadVerdict.FAIL else (0, False)

    def on_allocated(self, request: Any, tables: Sequence[Sequence[int]], external: int) -> None:
        """Blocks have been allocated for a request: ``tables`` by vLLM's groups, of which ``external`` tokens are
        loaded.
        """
        name = request.request_id
        with self._lock:
            self._carrying.offer(self._offers.on_allocated(name, compat.cached_tokens(request)))
            if external > 0:
                self._loading[name] = request
                leg = self._pairing.leg(name)
                if leg is not None and leg.source is not None and leg.asked is LoadVerdict.LOAD:
                    spans = self._blocks.destinations(tables, leg.handed, leg.handed - external)
                    if spans is None:
                        self._pairing.unplaceable(name, f"decode has no blocks for {external} tokens of {leg.handed}")
                    else:
                        self._carrying.loading[name] = LoadOrder(name, leg.source, spans, external,
                                                                 limit_s=leg.ends.seconds_left(time.monotonic()))
                    self._room.on_load_begun(name, self._blocks.count_wanted(leg.handed, leg.handed - external))
                    self._carrying.ring.mark(leg.source.key, "allocated", sends=False)
            else:
                self._room.on_request_left(name)
            self._carrying.pair(self._pairing.on_allocated(name, external))

    def build_orders(self, output: Any) -> Orders:
        """What the workers are to do in this step.

        Raises:
            ThreadEnded: a thread that this side cannot do without has died.
        """
        tokens = sum(output.num_scheduled_tokens.values())
        self._steps.begins(tokens)
        crew = self._carrying.crew
        watched.check(self._control.thread, crew.thread if crew is not None else None)
        with self._lock:
            if self._siblings is not None:
                self._siblings.begin(self._carrying.orders, loads=output.has_sync_kv_loads)
            self._carrying.look_at_weights()
            self._carrying.pair(self._pairing.newer())
            self._expect()
            self._carrying.orders.tokens = tokens
            for name in output.preempted_req_ids or ():
                if (key := self._offers.uncopied_transfer(name)) is not None:
                    self._carrying.orders.reclaims.append(key)
            for request in output.scheduled_new_reqs:
                if (loaded := self._loaded_now.pop(request.req_id, None)) is not None:
                    self._carrying.ring.mark(loaded, "admitted", sends=False)
                    self._carrying.orders.firsts.append(loaded)
                self._prompts.begins(request.req_id, request.num_computed_tokens)
                self._computes(output, request.req_id, request.num_computed_tokens)
            self._prompts.runs(output.num_scheduled_tokens)
            cached = output.scheduled_cached_reqs
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                self._computes(output, name, computed)
            self._room.on_step()
            self._tell_of_work(output.num_scheduled_tokens)
            orders, self._carrying.orders = self._carrying.orders, Orders()
            loading = bool(self._carrying.expected)
            sending = self._offers.open > 0 or self._holds()
            idle = orders.idle and (sending or self._pairing.open > 0)
        if crew is not None:
            orders.crew = crew.handle()
        self._pushing = bool(orders.pushes)
        if self._nap is not None:
            orders.calm = self._calm = self._nap.step(idle=idle, loading=loading, sending=sending)
        return orders

    def _computes(self, output: Any, name: str, computed: int) -> None:
        """A request runs in this step. Its tables are asked of vLLM: blocks that have left a window are gone from them."""
        if (key := self._offers.tracks(name)) is not None:
            tables = self._blocks.moved_tables(output.kv_connector_block_state.get_block_ids(name))
            if self._siblings is not None:
                self._siblings.on_transfer_ran(key, tables)
            self._carrying.offer(self._offers.step(name, tables, computed=computed + output.num_scheduled_tokens[name]))

    def _tell_of_work(self, tokens: Mapping[str, int]) -> None:
        """Only here, in a step: whatever else in this process lives on, an engine that hangs says nothing of work."""
        self._offers.on_step(tokens)
        now = time.monotonic()
        if now - self._told_at >= self._tell_s:
            self._told_at = now
            self._carrying.offer([*self._offers.take_progress()])

    def rests(self, looked_s: float) -> bool:
        """Whether workers' answer, which was looked for so long, is waited for now.

        A step that computes a prompt takes long. One that makes tokens does not, and would pay for the notice each time.
        """
        return self._calm or (self._pushing and looked_s > LOOK_S)

    def _expect(self) -> None:
        """Whose request has no blocks yet, although they were asked for, is told of all the same, and may be fetched ahead.

        A state is final when prefill is done, so nothing is gained by having it earlier.
        """
        if self._blocks.cuts:
            return
        for peer, source in self._pairing.without_blocks():
            met = self._carrying.greeted.get(peer)
            if source.key not in self._invited and met is not None and not met.refused and met.ranks == len(source.data):
                self._invited.put(source.key, None)
                blocks = tuple(map(len, self._blocks.wanted_blocks(source.handed, 0)))
                self._carrying.orders.expects.append(ExpectOrder(source, blocks, met.plan))

    def on_worker_output(self, output: Any) -> None:
        """Workers report. Ids that vLLM does not wait for are taken out: it would end over them."""
        report = output.kv_connector_worker_meta
        loads = report.loads if isinstance(report, StepReport) else ()
        with self._lock:
            if isinstance(report, StepReport):
                for copied in report.copied:
                    self._offers.on_copied(*copied)
                for send in report.sends:
                    self._carrying.offer(self._offers.rank_ended(*send))
                for name, amount in report.counts.items():
                    self._carrying.stats.add(name, amount)
                self._levels |= report.levels
                for rank in report.refused:
                    self._hearing.on_rank_refused(rank)
                if report.links:
                    self._links |= report.links
                    self._pairs.links(self._links)
                self._carrying.remember(report)
            self._carrying.on_loads_reported(loads)
            known = {name for name in output.finished_recving or () if name in self._carrying.expected}
            for name in known:
                self._loaded(name, self._carrying.expected.pop(name))
            self._carrying.end_on_all_ranks(loads)
            if self._siblings is None:
                output.finished_recving = known or None
                output.finished_sending = self._offers.take_copied() or None
            else:
                for key in self._siblings.on_step_output(report, output.invalid_block_ids):
                    self._carrying.offer(self._offers.on_spoiled(key, "a store beside could not load blocks of its prompt"))
                output.finished_recving = self._siblings.finished_names(output.finished_recving or (), loads, known) or None
                self._carrying.orders.copied += self._offers.take_copied()

    def _loaded(self, name: str, reports: list[LoadReport]) -> None:
        self._room.on_load_over(name)
        order = self._carrying.loading.pop(name, None)
        bad = next((one for one in reports if one.outcome is not Outcome.OK), None)
        leg = self._pairing.leg(name)
        if (request := self._loading.pop(name, None)) is not None:
            if bad is not None:
                compat.show_own_cached(request)
            elif leg is not None and leg.source is not None:
                compat.show_cached(request, leg.source.cached)
        if bad is None and order is not None and leg is not None and leg.state is pairing.DecodeLegState.LOADING:
            self._carrying.stats.add(metrics.LOADED_BYTES, sum(one.size for one in reports))
            self._carrying.stats.add(metrics.LOADED_TOKENS, order.tokens)
            if (since := self._waiting_since.pop(name, None)) is not None:
                self._carrying.stats.add(metrics.WAIT_SECONDS, time.monotonic() - since)
            tries = {one.key for one in reports}
            loaded = tries.pop() if len(tries) == 1 else order.source.key  # ranks that took it from several: the newest
            self._carrying.ring.on_loaded(loaded)
            self._loaded_now[name] = loaded
        self._carrying.pair(self._pairing.on_load_finished(
            name, bad.outcome if bad else Outcome.OK, bad.reason if bad else "", [one.key for one in reports]))

    def answer(self, request: Any) -> dict[str, Any] | None:
        """What the answer of a request that has ended says to the router, where that is prefill's. Before
        ``on_request_ended``.
        """
        cached, params = self._prompts.remove(request.request_id), request.kv_transfer_params
        # vLLM takes such words of one connector alone; a store beside may have its own.
        tells = self._siblings is None and isinstance(params, dict) and params.get("role") == Role.PREFILL.value
        return {legs.CACHED: cached} if tells and cached >= 0 else None

    def on_request_ended(self, request: Any) -> bool:
        """A request has ended. Returns whether its blocks are still needed, until ``on_worker_output`` releases them."""
        if self._prefixes is not None:
            self._prefixes.end(request.request_id)
        with self._lock:
            self._loaded_now.pop(request.request_id, None)
            self._loading.pop(request.request_id, None)
            self._waiting_since.pop(request.request_id, None)
            self._room.on_request_left(request.request_id)
            self._carrying.offer(self._offers.end(request.request_id))
            self._carrying.pair(self._pairing.end(request.request_id))
            return self._offers.holds(request.request_id)

    def pending(self) -> bool:
        """Whether the engine must keep stepping although it has no requests.

        Sends are open, something is to be told, or KV is still held in host memory: copies may leave after their transfer
        has ended, and what waits to be claimed runs out, which the workers can only say in a step.
        """
        with self._lock:
            orders, counted = self._carrying.orders, self._carrying.stats.data
            return bool(self._offers.open or orders.releases or orders.abandons or counted or self._gauges_moved()
                        or self._holds() or orders.copied or orders.forget)

    def _holds(self) -> bool:
        """Whether a worker keeps KV in host memory."""
        return any(levels.get(name) for levels in self._levels.values() for name in HELD)

    def reset(self) -> bool:
        """Reset what is carried of requests. Returns as ``SchedulerActions.reset`` does."""
        with self._lock:
            return self._carrying.reset()

    def take_stats(self) -> Stats | None:
        """What has been counted since the last call. vLLM asks once at the end of each step."""
        self._steps.ends()
        with self._lock:
            moved = self._gauges_moved()
            self._gauges |= moved
            stats, self._carrying.stats = self._carrying.stats, Stats()
        stats.data.update(moved)
        return None if stats.is_empty() else stats

    def _gauges_moved(self) -> dict[str, int]:
        now = {metrics.SENDS_OPEN: self._offers.open, metrics.RECEIVES_OPEN: self._pairing.open}
        for name in (metrics.KEPT_BYTES, metrics.BLOCKS_WAITING, metrics.BUFFER_USED, metrics.POOL_USED,
                     metrics.NCCL_GROUPS, metrics.NCCL_BYTES):
            now[name] = sum(levels.get(name, 0) for levels in self._levels.values())
        return {name: value for name, value in now.items() if self._gauges.get(name) != value}

    def _not_called(self, releases: list[offers.Release]) -> None:
        """Workers could not be called, on the crew's thread: it goes with the next step."""
        with self._lock:
            self._carrying.orders.releases += releases
