"""``campaign-zero-cluster``: a service of real engines goes to no instances and comes back, five times, on a whole cluster.

Each round begins with none. Twenty clients in a pod ask at once, and wait until one instance of each role has started;
all get the answer that was given before. Nobody asks then, and both go. What is fetched ahead (``model.prefetch``) is on
the node before the first round. Seconds of each round go to bench/results/campaign_zero_cluster.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from group_in_cluster import write
from service_in_cluster import Images, ServiceInCluster
from testcluster.full import FullCluster
from testcluster.kubectl import wait_until

pytestmark = pytest.mark.timeout(5400)
RESULT = "campaign_zero_cluster.json"
ROUNDS, CLIENTS = 5, 20
SEEN_S = 300.0
IDLE_S = 1500.0
"""Three starts of a minute and more, and a drain."""
ASK = """
import json, sys, time, urllib.request
from concurrent.futures import ThreadPoolExecutor

body = {"model": "tiny", "messages": [{"role": "user", "content": "What is xpyd?"}], "max_tokens": 24, "temperature": 0}

def ask(_):
    request = urllib.request.Request(sys.argv[1] + "/chat/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=900))["choices"][0]["message"]["content"]

count, began = int(sys.argv[2]), time.time()
with ThreadPoolExecutor(count) as pool:
    answers = list(pool.map(ask, range(count)))
print(json.dumps({"answers": answers, "seconds": time.time() - began}))
"""


class SleepingService(ServiceInCluster):
    """``sleepy``, which may have no instances."""

    name = "sleepy"
    namespace = "sleeping"

    def document(self) -> dict[str, Any]:
        """1P1D at most."""
        made = super().document()
        spec = made["spec"]
        for role in ("prefill", "decode"):
            spec[role].pop("replicas", None)
            spec[role]["scaling"] = {"min": 0, "max": 1}
        spec["model"]["prefetch"] = True
        router = {"placement": "deployment", "replicas": 1, "hold": "15m"}
        return {**made, "spec": {**spec, "router": router, "planner": {"idleTimeout": "1s"}}}

    def ask(self, count: int) -> dict[str, Any]:
        """The answers to so many equal questions at once, and after how many seconds the last one was there."""
        url = f"http://{self.name}.{self.namespace}.svc:10001/v1"
        said: dict[str, Any] = json.loads(self.python("clients", "ask", ASK, url, str(count), timeout_s=1000))
        return said

    def wanted(self) -> tuple[int, ...]:
        """Instances of prefill and of decode."""
        return tuple(self.get(f"dpool/{self.name}-{role}")["spec"]["replicas"] for role in ("prefill", "decode"))

    def engines(self) -> set[str]:
        """uids of their pods, also of those that end."""
        found = self.get("pods", "-l", f"xpyd.dev/service={self.name},xpyd.dev/role")["items"]
        return {pod["metadata"]["uid"] for pod in found}


@pytest.fixture
def sleepy(operator: FullCluster, images: Images) -> Iterator[SleepingService]:
    service = SleepingService(operator, images)
    try:
        yield service
    finally:
        service.remove()


def test_five_rounds_from_none_and_back(sleepy: SleepingService) -> None:
    try:
        rounds(sleepy)
    except Exception as error:
        raise AssertionError(f"{error}\n{sleepy.story()}") from error


def rounds(sleepy: SleepingService) -> None:
    """All of them."""
    sleepy.apply()
    wait_until(lambda: sleepy.condition("Ready")["reason"] == "AtZero", SEEN_S, "nobody runs, and the router waits")
    wait_until(lambda: sleepy.condition("Prefetched")["status"] == "True", SEEN_S, "the node has the images")
    assert sleepy.condition("Prefetched")["message"] == "images on 1 of 1 nodes"
    expected: list[str] = []
    seen: set[str] = set()
    for number in range(1, ROUNDS + 1):
        assert (sleepy.wanted(), sleepy.engines()) == ((0, 0), set())
        said = sleepy.ask(CLIENTS)
        assert len(said["answers"]) == CLIENTS
        expected = expected or said["answers"][:1]
        assert set(said["answers"]) == set(expected), "whoever serves it, it is the same answer"
        fresh = sleepy.engines() - seen
        assert len(fresh) == 2, "one instance of each role was started"
        seen |= fresh
        began = time.monotonic()
        wait_until(lambda: not sleepy.engines(), IDLE_S, "all have gone")
        took = time.monotonic() - began
        print(f"round {number}: answered after {said['seconds']:.0f} s, gone after {took:.0f} s", flush=True)
        write(RESULT, f"round {number}", answered=said["seconds"], gone=took)
    events = [each["message"] for each in sleepy.get("events")["items"] if each["reason"] == "Woken"]
    assert len(events) >= 1
    sleepy.kubectl("delete", f"dsvc/{sleepy.name}", "--wait=true", timeout_s=SEEN_S)
    wait_until(lambda: not sleepy.left(), SEEN_S, "nothing is left")
