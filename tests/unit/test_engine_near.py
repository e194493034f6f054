"""Which way a session may take, as prefill sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from xpyd_sidecar.engine.links import near
from xpyd_sidecar.engine.links.inviting import Arenas, Inviting, NoWay
from xpyd_sidecar.engine.links.near import Ways
from xpyd_sidecar.engine.links.tcp import TcpLink
from xpyd_sidecar.kv.messages import Gpu, LinkChoice

OURS = Gpu("GPU-1", "2.29.7", 8 << 20)
THEIRS = Gpu("GPU-2", "2.29.7", 4 << 20)


@pytest.mark.parametrize(("ways", "theirs", "reason"), [
    (Ways(gpu=OURS), THEIRS, ""),
    (Ways("nccl", gpu=OURS), THEIRS, ""),
    (Ways("tcp", gpu=OURS), THEIRS, "prefill's transport is tcp"),
    (Ways("shm", gpu=OURS), THEIRS, "prefill's transport is shm"),
    (Ways(no_gpu="nccl4py: No module named 'nccl'"), THEIRS, "nccl: nccl4py: No module named 'nccl' at prefill"),
    (Ways(gpu=OURS), None, "nccl: decode has or wants none"),
    (Ways(gpu=OURS), Gpu("GPU-2", "2.30.4", 1), "nccl: version 2.29.7 at prefill, 2.30.4 at decode"),
    (Ways(gpu=OURS), OURS, "nccl: both on one GPU"),
    (Ways(gpu=OURS, one_gpu=True), OURS, ""),
])
def test_why_there_is_no_group(ways: Ways, theirs: Gpu | None, reason: str) -> None:
    assert near.ungrouped(ways, theirs) == reason


@pytest.mark.parametrize(("transport", "group", "host"), [
    ("auto", OURS, True), ("nccl", OURS, False), ("shm", None, True), ("tcp", None, False)])
def test_what_a_side_says_of_itself(transport: str, group: Gpu | None, host: bool) -> None:
    ways = Ways(transport, gpu=OURS)
    assert (ways.group, bool(ways.host)) == (group, host)


def inviting(ways: Ways, pieces: list[int]) -> Inviting:
    def grouped(piece: int) -> TcpLink:
        pieces.append(piece)
        return TcpLink()

    return Inviting(ways, 1 << 20, Arenas(), grouped)  # type: ignore[arg-type]  # a link is enough here


def test_pieces_are_what_both_take_and_nothing_else_is_offered_beside_a_group() -> None:
    pieces: list[int] = []
    way = inviting(Ways(gpu=OURS), pieces)
    assert way.welcome("a host", THEIRS) == (None, "")
    assert way.gpu == OURS
    way.decided(LinkChoice("nccl", ""))
    assert pieces == [4 << 20]


def test_a_group_that_was_not_offered_cannot_be_chosen() -> None:
    way = inviting(Ways(gpu=OURS), [])
    way.welcome("elsewhere", OURS)
    assert way.gpu is None
    with pytest.raises(ValueError, match="chose nccl, which was not offered"):
        way.decided(LinkChoice("nccl", ""))


def test_every_reason_is_told() -> None:
    way = inviting(Ways(gpu=OURS), [])
    assert way.welcome("elsewhere", OURS) == (None, "nccl: both on one GPU; not on one host")
    near_by = inviting(Ways(gpu=OURS), [])
    offered, reason = near_by.welcome(near.host(), OURS)
    assert offered is not None
    assert reason == ""
    near_by.close()


def test_who_insists_is_told_why_not(tmp_path: Path) -> None:
    with pytest.raises(NoWay, match="transport nccl: nccl: decode has or wants none"):
        inviting(Ways("nccl", tmp_path, OURS), []).welcome(near.host(), None)
    way = inviting(Ways("nccl", gpu=OURS), [])
    way.welcome("", THEIRS)
    with pytest.raises(NoWay, match="transport nccl: decode's own"):
        way.decided(LinkChoice("tcp", "decode's own"))
