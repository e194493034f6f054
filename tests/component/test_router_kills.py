"""Real engines are killed, and real clients leave: every answer that ends is right, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
from aborts import abort_real
from cluster import PATIENT, Cluster, Instance
from real_kills import kill_real

from xpyd_sidecar.contract.ids import Role

pytestmark = pytest.mark.engines
KILLS = 5
GONE_S = PATIENT.claim_s / 2
"""Below what would let go of what nobody is told of. How much below, only a quiet machine can show: see
``campaign-router``."""


@pytest.fixture
def victims(cluster: Cluster) -> Iterator[list[Instance]]:
    """Decode engines to be killed, beside the cluster's own; started together, since starts cost processor time alone."""
    made = [cluster.add(Role.DECODE) for _ in range(KILLS)]
    try:
        for one in made:
            one.start()
        cluster.wait_ready()
        yield made
    finally:
        for one in made:
            one.kill()
            with contextlib.suppress(ValueError):
                cluster.instances.remove(one)


def test_of_100_clients_that_leave_at_random_moments_nothing_is_left(cluster: Cluster) -> None:
    report = asyncio.run(abort_real(cluster, count=100, seed=3, gone_s=GONE_S))
    print(report.told())
    report.check()
    assert report.aborts == 100


def test_after_5_kills_of_decode_engines_every_stream_went_on_exactly(cluster: Cluster, victims: list[Instance]) -> None:
    report = asyncio.run(kill_real(cluster, victims, seed=4))
    print(report.told())
    report.check()
    assert report.kills == KILLS
    assert report.killed >= KILLS, "each was killed while it decoded"
