"""With real engines: nothing is named on a healthy 1P1D, and prefill that goes shows in time, and so does its return."""

from __future__ import annotations

import random
import time
import urllib.request

import msgspec
import pytest
from cluster import Cluster
from engines import MODEL_NAME, complete, get

from xpyd_operator.doctor.examine import examine
from xpyd_operator.doctor.learned import LEAST
from xpyd_operator.doctor.reading import Examination, ServiceReading
from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.contract.sample import PATH, PackedSample, Sample, unpack

pytestmark = pytest.mark.engines
TOKENS = 900
PROMISE_S = 30
"""In which a fault shows."""


def prompt(seed: int) -> list[int]:
    """In nobody's cache."""
    draw = random.Random(seed)
    return [draw.randrange(5, 250) for _ in range(TOKENS)]


def stream(cluster: Cluster, seed: int) -> None:
    """One stream, to its end."""
    body = {"model": MODEL_NAME, "prompt": prompt(seed), "max_tokens": 16, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(f"{cluster.url}/v1/completions", msgspec.json.encode(body),
                                     {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert b"[DONE]" in answer.read()


def sample_of(cluster: Cluster) -> Sample:
    token = keys.admin_token(keys.read(cluster.key_file))
    answer = get(f"http://127.0.0.1:{cluster.admin_port}{PATH}", 60, {"Authorization": f"Bearer {token}"})
    return unpack(msgspec.json.decode(answer, type=PackedSample))


def told(cluster: Cluster, reason: str, begin: int) -> float:
    """Ask for prompts until the router says so; seconds that it took."""
    began, seed = time.monotonic(), begin
    while time.monotonic() - began < 240:
        complete(cluster.url, prompt(seed), 2)
        seed += 1
        if cluster.fleet().disaggregation.reason == reason:
            return time.monotonic() - began
        time.sleep(0.2)
    raise AssertionError(cluster.fleet().disaggregation)


def reading(fleet: Fleet, sample: Sample) -> Examination:
    """Without the host, which is whatever runs the tests."""
    return Examination(None, ServiceReading(fleet, sample))


def test_nothing_is_named_on_a_healthy_pair(cluster: Cluster) -> None:
    for seed in range(2 * LEAST):
        stream(cluster, seed)
    told(cluster, "Receiving", 10_000)
    fleet, every = cluster.fleet(), sample_of(cluster)
    # Other tests have asked the same engines for short prompts; the slower the machine, the longer those that do not pay.
    sample = msgspec.structs.replace(every, requests=tuple(one for one in every.requests if one.prompt == TOKENS))
    assert fleet.disaggregation.share is not None
    assert fleet.disaggregation.share > 0.95
    assert {one.link for one in fleet.disaggregation.links} == {"shm"}
    assert len([one for one in sample.requests if one.prefill > 0]) >= 2 * LEAST
    diagnosis = examine(reading(fleet, sample))
    assert diagnosis.findings == ()
    assert diagnosis.compared is not None


def test_prefill_that_goes_shows_within_the_promise_and_so_does_its_return(cluster: Cluster) -> None:
    told(cluster, "Receiving", 20_000)
    cluster.prefill[0].engine.kill()
    assert told(cluster, "NoPrefill", 30_000) < PROMISE_S
    found = examine(reading(cluster.fleet(), sample_of(cluster))).findings
    assert [one.name for one in found if one.level == "broken"][:1] == ["no-prefill"]
    cluster.repair()
    assert told(cluster, "Receiving", 40_000) < PROMISE_S
