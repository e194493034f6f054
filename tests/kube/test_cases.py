"""Every example of the pages about clusters, before a real API server: all its objects, and all that is made of them.

Where the first lines of an example say ``# Pod Security: LEVEL`` its namespace enforces that, else "restricted".
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kube_cluster import start_light
from testcluster.errors import CommandFailed
from testcluster.kubectl import wait_until
from testcluster.light import LightCluster

from xpyd_operator.api.decode import decode_service
from xpyd_operator.api.load import documents
from xpyd_operator.api.rule import Target
from xpyd_operator.render.objects import manifests
from xpyd_operator.render.settings import KubeSettings, PodUser
from xpyd_operator.render.unsupported import kube_refusals

pytestmark = pytest.mark.timeout(1200)  # the first run on a machine builds Kubernetes
ROOT = Path(__file__).parents[2]
PAGES = ("kubernetes", "openshift", "istio", "kueue")
FOREIGN = frozenset({"ScaledObject"})
"""Kinds whose definitions the cluster does not have."""
USERS: tuple[PodUser, ...] = ("fixed", "assigned")
_numbers = itertools.count()


def examples() -> Iterator[tuple[str, str]]:
    """Names and texts."""
    for path in sorted((ROOT / "examples/kubernetes/cases").glob("*.yaml")):
        yield path.name, path.read_text()
    for page in PAGES:
        text = (ROOT / f"docs/{page}.md").read_text()
        for number, block in enumerate(re.findall(r"^```yaml\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)):
            if re.search(r"^apiVersion: ", block, flags=re.MULTILINE):  # others are parts of another tool's settings
                yield f"{page}.md, {number}", block


EXAMPLES = dict(examples())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightCluster]:
    with start_light(tmp_path_factory) as running:
        yield running


def namespace(cluster: LightCluster, level: str) -> str:
    """A new one, in which pods may be made."""
    name = f"case-{next(_numbers)}"
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("label", "namespace", name, f"pod-security.kubernetes.io/enforce={level}")
    account = ("get", "serviceaccount", "default", "-n", name)
    wait_until(lambda: bool(cluster.kubectl(*account)), 240, "the namespace has a service account")
    return name


def taken(ask: Callable[[], str]) -> str:
    """The answer, once the API server has heard of the quotas and priorities that it has taken itself a moment ago."""
    end = time.monotonic() + 240
    while True:
        try:
            return ask()
        except CommandFailed as error:
            if time.monotonic() > end or not re.search("status unknown for quota|no PriorityClass with name", str(error)):
                raise
        time.sleep(0.1)


def listed(items: tuple[dict[str, Any], ...]) -> str:
    return msgspec.json.encode({"apiVersion": "v1", "kind": "List", "items": items}).decode()


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_api_server_takes_it_and_all_that_is_made_of_it(cluster: LightCluster, name: str) -> None:
    text = EXAMPLES[name]
    level = re.search(r"^# Pod Security: (\w+)", text, flags=re.MULTILINE)
    where = namespace(cluster, level[1] if level else "restricted")
    found = [each.value for each in documents(text)]
    assert found
    strict = ("-n", where, "--validate=strict", "--warnings-as-errors", "-f", "-")
    for each in found:  # a quota first, so that it counts
        if each["kind"] not in FOREIGN:
            cluster.kubectl("apply", "--server-side", *strict, stdin=msgspec.json.encode(each).decode())
    for each in found:
        if each["kind"] != "DisaggService":
            continue
        live = cluster.kubectl.get("disaggservice", each["metadata"]["name"], "-n", where)
        service = decode_service(live, target=Target.KUBERNETES).service
        assert list(kube_refusals(service)) == []
        for user in USERS:
            made = manifests(service, KubeSettings(sidecar_image="xpyd-sidecar:1", pod_user=user))
            create = ("create", "--dry-run=server", *strict)
            answer = taken(lambda: cluster.kubectl(*create, stdin=listed(made)))  # noqa: B023 (called here)
            assert answer.count("(server dry run)") == len(made)


def test_every_page_has_examples_and_every_file_is_named_on_a_page() -> None:
    text = "".join((ROOT / f"docs/{page}.md").read_text() for page in PAGES)
    files = {name for name in EXAMPLES if name.endswith(".yaml")}
    assert len(files) > 10
    assert {name for name in files if f"cases/{name}" not in text} == set()
    assert set(re.findall(r"cases/([\w-]+\.yaml)", text)) == files
