"""Decode's half beside a worker: what it asks the receiver for, and when it reports a load."""

from __future__ import annotations

import time

import pytest
import torch

from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, TransferId
from xpyd_sidecar.engine.reports import ExpectOrder, FailOrder, LoadOrder, LoadReport, Orders
from xpyd_sidecar.engine.stats import LINK
from xpyd_sidecar.engine.worker.kv_cache import KvCache
from xpyd_sidecar.engine.worker.loading import UNHEARD_STEPS, BlockLoader
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.mapping import geometry, plan
from xpyd_sidecar.kv.messages import Announce, ListeningRank
from xpyd_sidecar.kv.reach import LayerGroup, TableSpan
from xpyd_sidecar.kv.receiving import Cancel, Confirm, Instruction, Receiving, WantTry
from xpyd_sidecar.memory.marks import NOW, CopyMark
from xpyd_sidecar.session.receiver import BrokenSource, FetchedBlocks, Withdraw
from xpyd_sidecar.session.transfer_trace import Forwards
from xpyd_sidecar.threads.idle_polling import NAP_S, Inbox

BLOCKS = 32
KEY = Key(TransferId("ab" * 16), Attempt(1), 1)
SPAN = TableSpan(0, (7, 8, 9))
RANK = ListeningRank(HostPort("10.0.0.1:4000"), Incarnation("cd" * 16))
SOURCE = Announce(*KEY, b"prompt", 40, 39, (RANK,))


class ListedReceiver:
    """A receiver that lists what it is asked for."""

    def __init__(self) -> None:
        self.inbox: Inbox[FetchedBlocks | BrokenSource] = Inbox()
        self.steps: list[Instruction | Withdraw] = []
        self.closed: list[str] = []
        self.moments: list[CopyMark | None] = []
        self.written: set[str] = set()
        """Requests into whose blocks something is being written."""

    def carry_out(self, step: Instruction | Withdraw, moment: CopyMark | None = None) -> None:
        """Take one."""
        self.steps.append(step)
        self.moments.append(moment)

    def close(self, request: str) -> None:
        """Nothing more is to be written."""
        self.closed.append(request)

    def is_settled(self, request: str) -> bool:
        """Whether nothing is."""
        return request not in self.written


class Rank:
    """A rank of two layers in two groups, and a prefill instance of the same shape."""

    def __init__(self, *, ahead: bool = True) -> None:
        caches = {name: torch.zeros(BLOCKS, 2, 16, 8) for name in ("a", "b")}
        memory = KvCache(caches, BLOCKS, {"a": LayerGroup(0), "b": LayerGroup(1)})
        shape = geometry(1, [memory.arrays({})])
        self.plan = plan(shape, shape)
        self.receiver = ListedReceiver()
        self.loading = BlockLoader(0, memory, self.receiver, Receiving(load_s=30.0, grace_s=0.0), ahead=ahead,  # type: ignore[arg-type]
                               forwards=Forwards())

    def start(self, moment: CopyMark | None = None, *, request: str = "r", source: Announce = SOURCE) -> None:
        """Begin a load of three blocks of one group, and two of the other."""
        tables = SPAN, TableSpan(1, (4, 5))
        self.loading.start(Orders(loads=[LoadOrder(request, source, tables, 39, self.plan)]), moment)

    def fetched(self, *blocks: tuple[int, int, int], key: Key = KEY) -> None:
        """Blocks of the first source are in their places."""
        self.receiver.inbox.append(FetchedBlocks(key, 0, blocks, 100, "tcp", time.monotonic()))


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_where_its_blocks_may_be_written_from_is_told_with_a_load_and_with_nothing_else(rank: Rank) -> None:
    rank.start(NOW)
    rank.loading.start(Orders(abandons=["r"]))
    assert rank.receiver.moments == [NOW, None]


def test_a_load_asks_each_source_for_its_part_and_ends_with_the_last_block(rank: Rank) -> None:
    rank.start()
    [want] = rank.receiver.steps
    assert isinstance(want, WantTry)
    assert (want.request, want.address, want.incarnation, want.ident) == ("r", RANK.address, RANK.incarnation, (KEY, 0))
    assert (want.tables, want.plan.identity, want.plan.slots) == ((SPAN, TableSpan(1, (4, 5))), b"prompt", 0)
    assert {region: (part.into, part.table) for region, part in want.plan.parts.items()} == {0: (0, 0), 1: (1, 1)}
    rank.fetched((0, 0, 3))
    assert rank.loading.poll(calm=False) == (set(), set())
    rank.fetched((1, 0, 3))
    assert rank.loading.poll(calm=False) == ({"r"}, set())
    assert rank.receiver.steps[1:] == [Confirm(KEY, 0, 200)]
    assert rank.receiver.closed == ["r"]
    assert rank.loading.report.loads == [LoadReport(0, "r", KEY, Outcome.OK, "", 200)]
    assert rank.loading.report.counts == {LINK + "tcp": 200}
    assert len(rank.loading.report.load_notes) == 1


def test_nothing_is_reported_while_something_is_written_into_the_blocks(rank: Rank) -> None:
    rank.receiver.written.add("r")
    rank.start()
    rank.fetched((0, 0, 3), (1, 0, 3))
    assert rank.loading.poll(calm=False) == (set(), set())
    assert rank.loading.report.loads == []
    rank.receiver.written.clear()
    assert rank.loading.poll(calm=False) == ({"r"}, set())


def test_a_load_whose_source_is_lost_fails_and_so_does_one_that_is_to(rank: Rank) -> None:
    rank.start()
    rank.receiver.inbox.append(BrokenSource(KEY, 0, Outcome.PEER_LOST, "gone", final=False))
    assert rank.loading.poll(calm=False) == ({"r"}, {"r"})
    other = KEY._replace(transfer=TransferId("ef" * 16))
    rank.loading.start(Orders(fails=[FailOrder("s", other, Outcome.DEADLINE, "late")]), None)
    assert rank.loading.poll(calm=False) == ({"s"}, {"s"})
    assert [(one.request, one.outcome, one.size) for one in rank.loading.report.loads] == [
        ("r", Outcome.PEER_LOST, 0), ("s", Outcome.DEADLINE, 0)]


def test_a_load_that_is_abandoned_tells_its_source(rank: Rank) -> None:
    rank.start()
    rank.loading.start(Orders(abandons=["r"]), None)
    assert isinstance(rank.receiver.steps[-1], Cancel)
    assert rank.loading.poll(calm=False) == ({"r"}, {"r"})


@pytest.mark.parametrize("ahead", [True, False])
def test_a_try_without_blocks_is_asked_for_with_what_all_of_it_has(ahead: bool) -> None:
    rank = Rank(ahead=ahead)
    rank.loading.start(Orders(expects=[ExpectOrder(SOURCE, (3, 2), rank.plan)]), None)
    [want] = rank.receiver.steps
    assert isinstance(want, WantTry)
    assert (want.tables, want.plan.slots, want.plan.ahead, want.ident) == (None, 5, ahead, (KEY, 0))


def test_a_calm_engine_sleeps_until_something_comes_and_not_for_longer_than_a_nap(rank: Rank) -> None:
    rank.start()
    began = time.monotonic()
    rank.loading.poll(calm=True)
    assert time.monotonic() - began >= NAP_S
    rank.fetched((0, 0, 3), (1, 0, 3))
    assert rank.loading.poll(calm=True) == ({"r"}, set())


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of each nap that is taken from here on: a clock would count what a full machine takes, too."""
    taken: list[float] = []
    monkeypatch.setattr(Inbox, "nap", lambda _, seconds: taken.append(seconds))
    return taken


def test_no_step_naps_while_the_scheduler_may_not_have_heard_of_a_load_that_is_over(rank: Rank, naps: list[float]) -> None:
    rank.start()
    rank.start(request="other", source=Announce(TransferId("cd" * 16), *KEY[1:], b"other", 40, 39, (RANK,)))
    rank.fetched((0, 0, 3), (1, 0, 3))
    assert rank.loading.poll(calm=True) == ({"r"}, set())
    for _ in range(UNHEARD_STEPS):
        rank.loading.poll(calm=True)
    assert naps == []
    rank.loading.poll(calm=True)
    assert naps


def test_a_calm_engine_that_loads_nothing_does_not_sleep(rank: Rank, naps: list[float]) -> None:
    assert rank.loading.poll(calm=True) == (set(), set())
    assert naps == []
