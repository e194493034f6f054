"""Carries out what the machines beside the scheduler say: messages to peers, orders to workers, counts and timelines.

Belongs here: what an instruction means for the outside. Does not belong here: hooks (``scheduler_side``), what peers say
(``control_handler``), decisions (``kv.pairing``, ``kv.offers``). The lock of the scheduler side is held in every call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.contract.legs import Peer
from xpyd_sidecar.engine.reports import FailOrder, LoadOrder, LoadReport, Orders, StepReport, UnclaimedOrder
from xpyd_sidecar.engine.scheduler.recent_transfers import RecentTransfers
from xpyd_sidecar.engine.stats import Stats
from xpyd_sidecar.engine.worker_rpc import WorkerRpc
from xpyd_sidecar.kv import messages, offers, pairing, peers
from xpyd_sidecar.kv.keys import Outcome, Recent
from xpyd_sidecar.kv.messages import Announce, Control, Drop, Ping, TryGone
from xpyd_sidecar.kv.offers import Offers
from xpyd_sidecar.kv.pairing import Pairing
from xpyd_sidecar.session.control import ControlThread

logger = logging.getLogger(__name__)


class SchedulerActions:
    """What is under way because of instructions, and what is to be told with the next step."""

    def __init__(self, pairing: Pairing, offers: Offers, weights: Callable[[], str] = lambda: "") -> None:
        """``weights``: what the engine's weights are called now; empty: nobody has said."""
        self._weights = weights
        self.orders = Orders()
        """To the workers, with the next step."""
        self.loading: dict[str, LoadOrder] = {}
        self.expected: dict[str, list[LoadReport]] = {}
        """By request: what workers have said of loads that vLLM waits for."""
        self.stats = Stats()
        self.ring = RecentTransfers()
        self.greeted: Recent[bytes, peers.PeerTerms] = Recent()
        """Prefill engines that have said HELLO, by connection."""
        self.data: tuple[messages.ListeningRank, ...] = ()
        self.crew: WorkerRpc | None = None
        self.control: ControlThread | None = None
        """Set before the first instruction; so is ``data``."""
        self._pairing = pairing
        self._offers = offers

    def post(self, to: Peer | bytes, message: Control) -> bool:
        """Send a message to a peer; False where the queue is full."""
        assert self.control is not None
        return self.control.post(to, message)

    def look_at_weights(self) -> None:
        """Somebody may have changed the engine's weights: whoever is about to decide by them looks first."""
        version = self._weights()
        self.offer(self._offers.weights_are(version))
        self.pair(self._pairing.weights_are(version))

    def pair(self, steps: list[pairing.Instruction]) -> None:
        """What decode's side of pairing says."""
        for step in steps:
            if isinstance(step, pairing.DropPeer):
                self.post(step.peer, Drop(*step.key, step.outcome, step.reason))
            elif isinstance(step, pairing.StartLoad):
                self._load(step)
            elif isinstance(step, pairing.FailLoad):
                leg = self._pairing.leg(step.request)
                assert leg is not None
                assert leg.failed is not None
                self.orders.fails.append(FailOrder(step.request, leg.key(), *leg.failed))
                self.expected.setdefault(step.request, [])
            elif isinstance(step, pairing.LoadProgress):
                self.orders.progress.append(step.key)
            elif isinstance(step, pairing.Abandon):
                self.orders.abandons.append(step.request)
            else:
                if step.outcome is not Outcome.OK:
                    self.orders.unclaimed.append(UnclaimedOrder(step.key, step.outcome, step.reason))
                self._ended(step, f"load of {step.key} for {step.request}", sends=False)

    def _load(self, step: pairing.StartLoad) -> None:
        leg = self._pairing.leg(step.request)
        met = self.greeted.get(leg.peer) if leg is not None else None
        if step.request in self.expected:
            self.stats.add(metrics.RETRIES, 1)
        self.expected.setdefault(step.request, [])
        if met is None or met.refused or met.ranks != len(step.source.data):  # thousands of peers have greeted since
            reason = "its HELLO is forgotten"
            self.orders.fails.append(FailOrder(step.request, step.source.key, Outcome.INCARNATION, reason))
            return
        order = self.loading[step.request] = self.loading[step.request]._replace(source=step.source, plan=met.plan)
        self.orders.loads.append(order)

    def _ended(self, step: pairing.DecodeLegEnded | offers.PrefillLegEnded, what: str, *, sends: bool) -> None:
        self.stats.count_transfer("send" if sends else "receive", step.outcome)
        self.ring.mark(step.key, "ended", sends=sends, outcome=step.outcome)
        level = logging.INFO if step.outcome is Outcome.OK else logging.WARNING
        logger.log(level, "xpyd: %s: %s %s", what, step.outcome, step.reason)

    def offer(self, steps: list[offers.Instruction]) -> None:
        """What prefill's offers say."""
        for step in steps:
            if isinstance(step, offers.Push):
                self.orders.pushes.append(step)
            elif isinstance(step, offers.Release):
                if step.with_step or self.crew is None or not self.crew.let_go(step):
                    self.orders.releases.append(step)
            elif isinstance(step, offers.SendAnnounce):
                self.ring.mark(step.key, "announced", sends=True)
                if not self.post(step.peer, Announce(*step.key, step.identity, step.prompt, step.tokens, self.data,
                                                     step.cached, step.weights)):
                    self.offer(self._offers.drop(step.key, Outcome.OVERFLOW, "the control queue is full"))
            elif isinstance(step, offers.SendWork):
                self.orders.worked += [one.key for one in step.work]
                self.post(step.peer, Ping(0, step.work))
            elif isinstance(step, offers.SendGone):
                self.post(step.peer, TryGone(*step.key, step.outcome, step.reason, step.retry))
            else:
                self._ended(step, f"push of {step.key} to {step.peer.instance}", sends=True)
                if step.outcome is Outcome.OK:
                    self.stats.add(metrics.PUSHED_BYTES, step.bytes)
                    self.stats.add(metrics.PUSHED_TOKENS, step.tokens)

    def reset(self) -> bool:
        """What was computed so far is of weights, say, that are gone: hand none of it over, take none.

        False: loads are under way, whose KV will be this engine's all the same.
        """
        reason = "caches were reset"
        self.offer(self._offers.reset(reason))
        self.pair(self._pairing.reset(reason))
        self.orders.forget = True
        return not self.expected

    def on_loads_reported(self, loads: Sequence[LoadReport]) -> None:
        """Ranks say how loads have ended."""
        for load in loads:
            if load.request in self.expected:
                self.expected[load.request].append(load)

    def end_on_all_ranks(self, loads: Sequence[LoadReport]) -> None:
        """One that has failed on a rank has failed: the other ranks need not wait for what may never come."""
        self.orders.fails += [FailOrder(load.request, load.key, load.outcome, load.reason) for load in loads
                              if load.outcome is not Outcome.OK and load.request in self.expected]

    def remember(self, report: StepReport) -> None:
        """What ranks have noted of their transfers."""
        for key, noted in report.sent_notes:
            self.ring.side(key, noted, sends=True)
        for key, noted in report.load_notes:
            self.ring.side(key, noted, sends=False)
        for key, noted in report.first_notes:
            self.ring.first(key, noted)
