"""Fifty random hand-overs with faults: some on the shared engines, the others over real sockets without engines.

``lab/campaigns/scenarios.py`` runs thousands, with relays between the engines and with signals.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cluster import PATIENT, Cluster
from real_scenarios import Host, Run, cases
from scenario import LEGS, Fault, Report, draw, summed
from scripted_scenarios import run_life
from traffic import plain_answers

from xpyd_sidecar.transport.tcp import cipher

WAVES, AT_ONCE = 3, 5
ENGINES: dict[Fault, int] = {fault: weight for fault, weight in LEGS.items() if fault is not Fault.NO_DECODE}
"""Without the one that nobody ever claims."""
LEAK_S = PATIENT.claim_s + 15.0
"""A try that is announced when decode's leg has had its answer of another one is not claimed: another leg could ask for it.
The rest is let go at once, or is not before ``keep_ttl_s``."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_faults_between_connectors_change_no_answer_and_leave_nothing_behind(tmp_path: Path, seed: int, late: bool) -> None:
    roomy: dict[str, Any] = {"keep_bytes": 1 << 20} if late else {}  # with less, row A2 fails nearly all loads
    report = run_life(tmp_path, seed, 0, 18 - seed % 2, leak_s=30.0, late=late, **roomy)
    assert report.clean, report.examples
    assert report.outcomes["loaded"] > 0


def test_what_is_told_goes_through_json_and_adds_up() -> None:
    report = Report(outcomes=Counter(answered=1), transfers=Counter(ok=1), links=Counter(tcp=8))
    told = json.loads(json.dumps(report.told()))
    assert summed(told, told) == told | {
        "outcomes": {"answered": 2}, "transfers": {"ok": 2}, "links": {"tcp": 16}}


@pytest.mark.timeout(300)
def test_the_judge_sees_what_nothing_checks(tmp_path: Path) -> None:
    """Blocks that are ruined on their way change what decode has, where nothing is encrypted and checksums are off."""
    report = run_life(tmp_path, 3, 0, 12, {Fault.CORRUPT: 1}, checksum="disabled", encryption="disabled", transport="tcp",
                      tensor=1)
    assert report.wrong > 0


@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(cipher.lack()), reason="there is no libcrypto here")
def test_where_kv_is_encrypted_nothing_that_was_ruined_is_taken_though_nothing_else_checks(tmp_path: Path) -> None:
    ruins = {Fault.CORRUPT: 2, Fault.CORRUPT_HEADER: 1, Fault.HALF_FRAME: 1, Fault.CUT: 1}
    report = run_life(tmp_path, 3, 0, 12, ruins, checksum="disabled", transport="tcp", tensor=1, encryption="enabled",
                      leak_s=30.0)
    assert report.clean, report.examples
    assert report.outcomes["loaded"] > 0


@pytest.mark.engines
@pytest.mark.timeout(900)
def test_faults_between_engines_change_no_answer_and_leave_nothing_behind(cluster: Cluster) -> None:
    source, report = random.Random(4), Report()
    scenarios = draw(source, 0, WAVES * AT_ONCE, ENGINES)
    hosts = [Host(one.engine) for one in cluster.instances]
    some = cases()[::8]
    run = Run(hosts, asyncio.run(plain_answers(cluster.plain_url, some)), report, source, leak_s=LEAK_S)
    try:
        for at in range(0, len(scenarios), AT_ONCE):
            run.wave(scenarios[at:at + AT_ONCE])
    finally:
        run.close()
    assert report.clean, report.examples
    assert report.outcomes["answered"] > 5
