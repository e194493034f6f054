"""What decode finds of its peers is in a file for its agent: whose KV it cannot take, and links that could be better."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from connector_sides import Engine, decode_leg, idle, making, prefill, prefill_leg, request, until

from xpyd_sidecar.contract import metrics, pair_notes
from xpyd_sidecar.contract.pair_notes import PairNotes


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    with making(lambda name, **options: Engine(name, tmp_path, **options)) as build:
        yield build


def notes(engine: Engine) -> PairNotes:
    """What its agent reads."""
    found = pair_notes.read(engine.folder, 0)
    return found if found is not None else PairNotes(engine.scheduler._incarnation)


def hand_over(p: Engine, d: Engine) -> Any:
    """Prefill computes a prompt; decode's request for it, as it was then."""
    transfer = uuid.uuid4().hex
    ours, theirs = request(decode_leg(transfer)), request(prefill_leg(transfer, d))
    d.scheduler.new_request(ours)
    prefill(p, theirs, [1, 2, 3])
    p.scheduler.on_request_ended(theirs)
    return ours


def test_a_peer_that_computes_other_kv_is_told(make: Callable[..., Engine]) -> None:
    p, d = make("p", model={"model": "another"}), make("d")
    ours = hand_over(p, d)
    until(lambda: d.scheduler.match_tokens(ours, 0) == (0, False), p, d)
    until(lambda: notes(d).refused, p, d)
    found = notes(d)
    assert found.incarnation == d.scheduler._incarnation
    [peer] = found.refused
    assert (peer.instance, peer.incarnation) == ("p", p.scheduler._incarnation)
    assert peer.reason.startswith("fingerprint: model: ")
    assert notes(p).refused == ()


def test_a_peer_to_which_there_is_no_link_is_told_by_what_its_ranks_were_announced_as(make: Callable[..., Engine]) -> None:
    p, d = make("p", transport="tcp"), make("d", transport="shm")
    ours = hand_over(p, d)
    until(lambda: d.scheduler.match_tokens(ours, 0)[0], p, d)
    d.scheduler.on_allocated(ours, ([8, 7, 6],), 40)
    until(lambda: notes(d).refused, p, d)
    [peer] = notes(d).refused
    assert (peer.instance, peer.incarnation) == ("p", p.scheduler._incarnation)
    assert "transport shm: prefill has welcomed over tcp, which is not at decode" in peer.reason
    until(lambda: idle(d), p, d)
    assert d.failed == [ours.request_id]


def test_a_prompt_of_other_weights_is_no_pair_that_cannot_be(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
                                                              ) -> None:
    p, d = make("p"), make("d")
    monkeypatch.setattr(p.scheduler._carrying, "_weights", lambda: "new")
    monkeypatch.setattr(d.scheduler._carrying, "_weights", lambda: "old")
    ours = hand_over(p, d)
    until(lambda: d.scheduler.match_tokens(ours, 0) == (0, False), p, d)
    until(lambda: p.counts.get("send/incompatible"), p, d)
    until(lambda: pair_notes.path_of(d.folder, 0).exists(), p, d)
    assert notes(d) == PairNotes(d.scheduler._incarnation)


def test_a_link_that_could_be_expected_is_counted_and_said_while_its_session_lives(
        make: Callable[..., Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    p, d = (make(name, transport="auto", shared_folder=str(folder)) for name, folder in zip("pd", folders, strict=True))
    ours = hand_over(p, d)
    until(lambda: d.scheduler.match_tokens(ours, 0) == (40, True), p, d)
    d.scheduler.on_allocated(ours, ([8, 7, 6],), 40)
    until(lambda: d.recved, p, d)
    assert (d.failed, d.counts["link:tcp"] > 0) == ([], True)
    assert d.counts[f"{metrics.LINKS_REFUSED}:shm"] == 1
    words = "blocks come over tcp: shm: decode's mailbox: No such file or directory"
    until(lambda: notes(d).links, p, d)
    assert notes(d) == PairNotes(d.scheduler._incarnation, (), (words,))
    p.stop()
    until(lambda: d.workers[0]._receiver.links.words == (), d)


