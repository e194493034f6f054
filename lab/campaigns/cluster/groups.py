"""``campaign-groups-cluster``: an instance of two pods on a whole cluster with real engines.

TP2 over two pods prefills for TP1; strangers try its ports; an engine is killed, a pod is evicted, a node with two groups
is drained, and a kubelet is away, under traffic. Figures go to bench/results/campaign_groups_cluster.json.

Not part of ``make test``: four engines' worth of processes on two cores take minutes to start, several times.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from group_in_cluster import BACK_S, KILL, LATER_S, GroupInCluster, note, served
from service_in_cluster import ASK, CONNECT, Images, asked, listening
from testcluster.full import FullCluster
from testcluster.kubectl import wait_until

from xpyd_sidecar.contract.ids import join_host_port

pytestmark = pytest.mark.timeout(3600)
RESULT = "campaign_groups_cluster.json"
GREETED = """
import socket, sys
for address in sys.argv[1:]:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=4) as sock:
            sock.settimeout(0.5)
            said = sock.recv(10)
    except OSError:  # it says nothing, or listens on an address of the other family alone
        continue
    if said[:1] == b"\\xff" and said[9:] == b"\\x7f":
        print(address)
"""
"""A program that prints the addresses at which ZMQ greets."""
SPEAK = """
import os, pickle, sys, time, zmq

class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/ran",)

context, heard = zmq.Context(), []
for address in sys.argv[1:]:
    for kind in (zmq.DEALER, zmq.SUB, zmq.XSUB, zmq.PUB):
        sock = context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        if kind == zmq.SUB:
            sock.setsockopt(zmq.SUBSCRIBE, b"")
        sock.connect(f"tcp://{address}")
        heard.append((address, kind, sock))
end = time.monotonic() + 20
while time.monotonic() < end:
    for address, kind, sock in heard:
        if kind != zmq.SUB and sock.poll(0, zmq.POLLOUT):
            sock.send((b"\\x01" if kind == zmq.XSUB else b"") + pickle.dumps(Bomb()), zmq.NOBLOCK)
        if kind != zmq.PUB and sock.poll(0):
            print("heard", address, kind, len(sock.recv()), flush=True)
    time.sleep(0.5)
print("done")
"""
"""A program that takes each address for a queue of calls: it tries to be a reader, and to send what would run as code."""


@pytest.fixture(scope="module")
def service(operator: FullCluster, images: Images) -> Iterator[GroupInCluster]:
    with served(GroupInCluster(operator, images)) as service:
        yield service


def test_two_pods_prefill_as_one_engine_and_the_answer_is_that_of_decode_alone(service: GroupInCluster) -> None:
    """Also the first ones of a life, while kernels are compiled."""
    assert service.members() == ["wide-e0-0", "wide-e0-1"]
    life = service.life("wide-e0-0")
    url = service.get(f"dsvc/{service.name}")["status"]["url"]
    (decode,) = service.pods("decode")
    with service.explained():
        through, again = asked(service, f"{url}/v1", f"{url}/v1")
        said = service.kubectl("exec", decode, "-c", "main", "--", "python3", "-c", ASK, "http://127.0.0.1:8000/v1")
        assert through == again == json.loads(said)["choices"][0]["message"]["content"]
        with service.traffic() as ended:
            time.sleep(20)
        note(RESULT, "nothing wrong", ended)
        assert service.metric("wide-e0-0", "xpyd_kv_pushed_bytes_total") > 0, "the leader counts for both ranks"
        assert service.life("wide-e0-0") == life, "nothing has ended"


def test_strangers_reach_no_port_of_a_group_but_the_routers(service: GroupInCluster) -> None:
    """From another namespace, and from a pod of the same one that is none of the service's."""
    pods = service.get("pods", "-l", "xpyd.dev/role=prefill")["items"]
    tried = [address for pod in pods for address in addresses(service, pod)]
    assert len(tried) > 10, "engine, agent, queue, connector and torch listen in both pods"
    for namespace in ("strangers", service.namespace):
        said = service.python(namespace, "probe", CONNECT, *tried, timeout_s=400)
        found = dict(line.split() for line in said.splitlines())
        assert set(found.values()) == {"blocked"}, found


def test_who_is_let_in_by_the_network_reads_and_sends_no_call_without_the_key(service: GroupInCluster) -> None:
    """A pod with the service's label, which the policy takes for one of its own."""
    life = service.life("wide-e0-0")
    (leader,) = [pod for pod in service.get("pods", "-l", "xpyd.dev/role=prefill")["items"]
                 if pod["metadata"]["name"] == "wide-e0-0"]
    # Torch's store and Gloo ask nobody, as docs/groups.md says; what is tried are the queues, by what listens for ZMQ.
    greeted = service.kubectl("exec", "wide-e0-0", "-c", "main", "--", "python3", "-c", GREETED,
                              *addresses(service, leader))
    tried = greeted.split()
    assert tried, "the queue of calls listens"
    said = service.python(service.namespace, "inside", SPEAK, *tried, timeout_s=120,
                       labels={"xpyd.dev/service": service.name})
    assert said.split() == ["done"], said
    for pod in service.members():
        listed = service.kubectl("exec", pod, "-c", "main", "--", "python3", "-c", "import os; print(os.listdir('/tmp'))")
        assert "'ran'" not in listed
    assert service.life("wide-e0-0") == life
    url = service.get(f"dsvc/{service.name}")["status"]["url"]
    first, second = asked(service, f"{url}/v1", f"{url}/v1")
    assert first == second


def test_a_killed_worker_ends_the_round_and_the_group_comes_back_in_its_pods(service: GroupInCluster) -> None:
    before = {pod: standing(service, pod) for pod in service.members()}
    life = service.life("wide-e0-0")
    with service.explained(), service.traffic() as ended:
        began = time.monotonic()
        service.kubectl("exec", "wide-e0-1", "-c", "main", "--", "python3", "-c", KILL)
        wait_until(lambda: service.life("wide-e0-0") != life, 60, "the round is over")
        wait_until(service.answers, BACK_S, "the group is back")
        back_s = time.monotonic() - began
    note(RESULT, "a killed worker", ended, back_s=back_s, start_s=service.start_s)
    assert back_s <= service.start_s + LATER_S
    assert {pod: standing(service, pod) for pod in service.members()} == before
    assert service.life("wide-e0-0") not in ("", life)


def test_an_evicted_follower_takes_its_group_along_and_no_request_fails(service: GroupInCluster) -> None:
    named = {"name": "wide-e0-1", "namespace": service.namespace}
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": named}
    path = f"/api/v1/namespaces/{service.namespace}/pods/wide-e0-1/eviction"
    with service.explained(), service.traffic() as ended:
        began = time.monotonic()
        service.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
        wait_until(lambda: not {"wide-e0-0", "wide-e0-1"} & set(service.members()), 60, "both are to go")
        wait_until(lambda: len(service.members()) == 2 and service.answers(), BACK_S, "another group serves")
        back_s = time.monotonic() - began
    note(RESULT, "an evicted follower", ended, back_s=back_s)


def test_a_drained_node_gives_up_one_group_after_the_other_and_no_request_fails(service: GroupInCluster) -> None:
    """``kubectl drain``. There is one node, which takes new pods again at once, as another node would."""
    service.want(2)
    before = service.member_uids()
    (node,) = service.cluster.kubectl.get("nodes")["items"]
    name = node["metadata"]["name"]
    drain = ("drain", name, f"--pod-selector=xpyd.dev/service={service.name},xpyd.dev/member", "--delete-emptydir-data",
             f"--timeout={2 * BACK_S}s")
    least = 2
    with service.explained(), service.traffic() as ended, ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        drained = pool.submit(service.cluster.kubectl, *drain, timeout_s=2 * BACK_S + 10.0)
        wait_until(lambda: service.cluster.kubectl.get(f"node/{name}")["spec"].get("unschedulable"), 30, "it is cordoned")
        service.cluster.kubectl("uncordon", name)
        while not drained.done():
            least = min(least, sum(service.ready().values()))
            time.sleep(1.0)
        drained.result()
        assert not before & service.member_uids(), "all of them were evicted"
        wait_until(lambda: service.answers(2), BACK_S, "both groups are back")
        back_s = time.monotonic() - began
    note(RESULT, "a drained node", ended, seconds=back_s, fewest_groups=least)
    assert least == 1, "the other group served all the time, and the drain was seen"
    service.want(1)


def test_while_the_kubelet_is_away_a_group_that_serves_stays_and_one_that_does_not_is_made_anew(
    service: GroupInCluster
) -> None:
    """A node that does not answer (NodeLost). Engines and network live on, so that only what was killed is missing.

    There is one node, so no Service has an endpoint meanwhile, that of DNS neither: the router is asked by its address.
    """
    before = service.member_uids()
    spaces = [service.kubectl("exec", pod, "-c", "main", "--", "readlink", "/proc/1/ns/pid").strip()
              for pod in service.members()]
    (decode,) = service.get("pods", "-l", "xpyd.dev/role=decode")["items"]
    with service.explained(), service.traffic(host=decode["status"]["podIP"]) as ended:
        service.cluster.stop("kubelet")
        try:
            wait_until(lambda: not any(service.ready().values()), 120, "the node is lost")
            time.sleep(30)
            assert service.member_uids() == before, "it serves, so nothing is done to it"
            for pid in of_namespaces(spaces):
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: len(service.members()) == 2 and not before & service.member_uids(ending=False), 120,
                       "a new group")
        finally:
            service.cluster.start("kubelet")
        wait_until(service.answers, BACK_S, "the new group serves")
    note(RESULT, "a lost kubelet", ended)
    wait_until(lambda: not before & service.member_uids(), 120, "the old one is gone")


def addresses(service: GroupInCluster, pod: Any) -> list[str]:
    """Of everything that listens in an engine's pod."""
    return [join_host_port(each["ip"], port) for each in pod["status"]["podIPs"]
            for port in listening(service, pod["metadata"]["name"])]


def of_namespaces(spaces: list[str]) -> list[int]:
    """Processes of this host, all containers' among them, that are in one of these namespaces of process ids."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and os.readlink(folder / "ns/pid") in spaces:
                found.append(int(folder.name))
    return found


def standing(service: GroupInCluster, pod: str) -> tuple[str, int]:
    """Of a pod, and how often its engine's container began again."""
    found = service.get("pod", pod)
    (main,) = [each for each in found["status"]["containerStatuses"] if each["name"] == "main"]
    return str(found["metadata"]["uid"]), int(main["restartCount"])
