"""The Helm chart says what the manifests say: for equal settings it renders the same objects, and it refuses bad values."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts import load

from xpyd_operator.kube.__main__ import parse
from xpyd_operator.render.labels import NAME, OPERATOR

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts/xpyd"
KEPT = "helm.sh/resource-policy"
WHOLE = {"namespace": {"create": True}, "crds": {"keep": False}}
"""What `install.yaml` has and a release leaves to others."""
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The CRDs are long, and the loader in Python takes a second for them."""
Document = dict[str, Any]
Key = tuple[str, str, str]


SCRIPT = load(ROOT / "scripts/manifests.py")
HELM: str | None = os.environ.get("HELM") or SCRIPT.built("helm")
KUBECTL: str | None = SCRIPT.kubectl()
needs_helm = pytest.mark.skipif(HELM is None or KUBECTL is None, reason="the test cluster's programs are not built")


def helm(*arguments: str, values: Document | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    given = ("--values", "-") if values is not None else ()
    return subprocess.run([HELM, *arguments, *given], input=yaml.safe_dump(values) if values is not None else stdin,
                          capture_output=True, text=True, check=False, timeout=60)


def template(values: Document) -> list[Document]:
    done = helm("template", "xpyd", str(CHART), "--namespace=xpyd-system", "--kube-version=v1.34.4", values=values)
    assert done.returncode == 0, done.stderr
    return [each for each in load(done.stdout) if each]


def load(text: str) -> list[Document]:
    return list(yaml.load_all(text, Loader=LOADER))


def kustomize(folder: str) -> list[Document]:
    assert KUBECTL is not None
    done = subprocess.run([KUBECTL, "kustomize", str(ROOT / folder)], capture_output=True, text=True, check=True)
    return load(done.stdout)


def keyed(documents: list[Document]) -> dict[Key, Document]:
    """By kind, namespace and name; lists whose order means nothing are sorted."""
    found: dict[Key, Document] = {}
    for each in documents:
        if each["kind"] == "Deployment":
            for container in each["spec"]["template"]["spec"]["containers"]:
                container["env"].sort(key=lambda variable: str(variable["name"]))
        key = (each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"])
        assert key not in found, key
        found[key] = each
    return found


def same(rendered: list[Document], shipped: list[Document]) -> None:
    mine, theirs = keyed(rendered), keyed(shipped)
    assert mine.keys() == theirs.keys()
    for key, each in theirs.items():
        assert mine[key] == each, key


@needs_helm
def test_by_default_it_is_install_yaml() -> None:
    same(template(WHOLE), load((ROOT / "manifests/install.yaml").read_text()))


@needs_helm
def test_what_a_release_leaves_to_others() -> None:
    whole, plain = keyed(template(WHOLE)), keyed(template({}))
    assert whole.keys() - plain.keys() == {("Namespace", "", "xpyd-system")}
    kept = {key for key, each in plain.items() if each["metadata"].get("annotations", {}).get(KEPT) == "keep"}
    assert kept == {key for key in plain if key[0] == "CustomResourceDefinition"}


OVERLAYS: dict[str, Document] = {
    "images": {"image": {"repository": "registry.example/team/xpyd-operator", "tag": "0.1.0"},
               "sidecar": {"image": {"repository": "registry.example/team/xpyd-sidecar", "tag": "0.1.0"}}},
    "namespaced": {"namespaces": ["default"]},
    "openshift": {"podSecurityContext": {"runAsUser": None, "runAsGroup": None}, "operator": {"podUser": "assigned"}},
    "dev": {"replicas": 1, "podDisruptionBudget": {"enabled": False}, "image": {"pullPolicy": "Never"},
            "sidecar": {"image": {"pullPolicy": "Never"}}, "operator": {"logLevel": "debug", "logFormat": "text"}},
}


def test_every_overlay_has_its_values() -> None:
    assert OVERLAYS.keys() == {path.name for path in (ROOT / "manifests/overlays").iterdir()}


@needs_helm
@pytest.mark.parametrize("name", OVERLAYS)
def test_with_an_overlays_settings_it_is_that_overlay(name: str) -> None:
    same(template(WHOLE | OVERLAYS[name]), kustomize(f"manifests/overlays/{name}"))


@needs_helm
def test_a_digest_stands_in_place_of_a_tag() -> None:
    digest = f"sha256:{'a' * 64}"
    found = keyed(template({"image": {"tag": "0.1.0", "digest": digest}, "sidecar": {"image": {"digest": digest}}}))
    container = found["Deployment", "xpyd-system", "xpyd-operator"]["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == f"xpyd-operator@{digest}"
    assert {"name": "XPYD_SIDECAR_IMAGE", "value": f"xpyd-sidecar@{digest}"} in container["env"]


@needs_helm
def test_monitoring_is_that_of_the_manifests() -> None:
    on = {"enabled": True}
    rendered = template({"metrics": {"serviceMonitor": on, "podMonitor": on}, "prometheusRule": on, "dashboards": on})
    plain = keyed(template({}))
    more = [each for key, each in keyed(rendered).items() if key not in plain]
    same(more, kustomize("manifests/observability"))


@needs_helm
def test_what_else_can_be_set_arrives() -> None:
    values: Document = {
        "commonLabels": {"team": "serving"}, "commonAnnotations": {"argocd.argoproj.io/sync-wave": "-1"},
        "podLabels": {"pod": "yes"}, "podAnnotations": {"a": "b"}, "imagePullSecrets": [{"name": "registry"}],
        "nodeSelector": {"role": "system"}, "tolerations": [{"operator": "Exists"}], "priorityClassName": "high",
        "affinity": {"nodeAffinity": {}}, "resources": {"limits": {"memory": "1Gi"}},
        "serviceAccount": {"annotations": {"c": "d"}}, "crds": {"annotations": {"e": "f"}},
        "operator": {"clusterDomain": "cluster.example", "httpPort": 9090, "env": [{"name": "XPYD_RESYNC", "value": "9"}]},
    }
    found = keyed(template(values))
    for key, each in found.items():
        assert each["metadata"]["labels"]["team"] == "serving", key
        assert each["metadata"]["annotations"]["argocd.argoproj.io/sync-wave"] == "-1", key
    crd = found["CustomResourceDefinition", "", "disaggservices.xpyd.dev"]["metadata"]["annotations"]
    assert (crd["e"], crd[KEPT]) == ("f", "keep")
    assert found["ServiceAccount", "xpyd-system", "xpyd-operator"]["metadata"]["annotations"]["c"] == "d"
    deployment = found["Deployment", "xpyd-system", "xpyd-operator"]["spec"]
    assert deployment["selector"]["matchLabels"] == {NAME: OPERATOR}, "it cannot be changed later"
    pod = deployment["template"]
    assert pod["metadata"]["labels"] == {NAME: OPERATOR, "team": "serving", "pod": "yes"}
    assert (pod["metadata"]["annotations"]["a"], pod["spec"]["priorityClassName"]) == ("b", "high")
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert (pod["spec"]["nodeSelector"], pod["spec"]["tolerations"]) == ({"role": "system"}, [{"operator": "Exists"}])
    container, = pod["spec"]["containers"]
    assert container["resources"]["limits"]["memory"] == "1Gi"
    settings, _, _ = parse([], {each["name"]: each.get("value", "pod") for each in container["env"]})
    assert (settings.cluster_domain, settings.http_port, settings.resync_s) == ("cluster.example", 9090, 9.0)
    assert container["ports"] == [{"name": "http", "containerPort": 9090}]
    assert found["Service", "xpyd-system", "xpyd-operator-metrics"]["spec"]["ports"][0]["port"] == 9090


@needs_helm
def test_security_contexts_can_be_set_and_left_to_the_cluster() -> None:
    def of(values: Document) -> tuple[Document | None, Document | None]:
        spec = keyed(template(values))["Deployment", "xpyd-system", "xpyd-operator"]["spec"]["template"]["spec"]
        return spec.get("securityContext"), spec["containers"][0].get("securityContext")

    pod, container = of({"podSecurityContext": {"runAsUser": 1000, "fsGroup": 7}, "securityContext": {"privileged": False}})
    profile = {"type": "RuntimeDefault"}
    assert pod == {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 65532, "fsGroup": 7, "seccompProfile": profile}
    assert container == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "privileged": False,
                         "capabilities": {"drop": ["ALL"]}}
    pod, _ = of({"podSecurityContext": {"runAsUser": None, "runAsGroup": None}})
    assert pod == {"runAsNonRoot": True, "seccompProfile": profile}


@needs_helm
@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"replica": 2}, "replica"),
        ({"replicas": -1}, "replicas"),
        ({"replicas": "two"}, "replicas"),
        ({"image": {"repository": ""}}, "image/repository"),
        ({"image": {"repository": "xpyd", "tag": "a b"}}, "image/tag"),
        ({"image": {"digest": "sha256:1"}}, "image/digest"),
        ({"image": {"pullPolicy": "Sometimes"}}, "image/pullPolicy"),
        ({"sidecar": {"image": {"pullPolicy": "sometimes"}}}, "sidecar/image/pullPolicy"),
        ({"namespaces": ["Default"]}, "namespaces/0"),
        ({"namespaces": "default"}, "namespaces"),
        ({"operator": {"logLevel": "trace"}}, "operator/logLevel"),
        ({"operator": {"httpPort": 80}}, "operator/httpPort"),
        ({"operator": {"podUser": "65532"}}, "operator/podUser"),
        ({"podSecurityContext": [1]}, "podSecurityContext"),
        ({"operator": {"env": [{"name": "XPYD_NAMESPACE", "value": "a"}]}}, "operator/env/0"),
        ({"resources": {"limit": {}}}, "resources"),
        ({"commonLabels": {"team": "a b"}}, "commonLabels/team"),
        ({"metrics": {"podMonitor": {"interval": "soon"}}}, "metrics/podMonitor/interval"),
        ({"crds": {"keep": "yes"}}, "crds/keep"),
    ],
    ids=str,
)
def test_bad_values_are_refused_by_their_field(values: Document, field: str) -> None:
    done = helm("template", "xpyd", str(CHART), "--kube-version=v1.34.4", values=values)
    assert done.returncode != 0
    assert field.rpartition("/")[0] in done.stderr, done.stderr
    assert field.rpartition("/")[2] in done.stderr, done.stderr
    assert "---" not in done.stdout


@needs_helm
def test_what_cannot_work_together_is_refused() -> None:
    values = {"metrics": {"service": {"enabled": False}, "serviceMonitor": {"enabled": True}}}
    done = helm("template", "xpyd", str(CHART), "--kube-version=v1.34.4", values=values)
    assert done.returncode != 0
    assert "metrics.serviceMonitor.enabled needs metrics.service.enabled" in done.stderr


@needs_helm
def test_an_old_kubernetes_is_refused() -> None:
    done = helm("template", "xpyd", str(CHART), "--kube-version=v1.32.0", values={})
    assert done.returncode != 0
    assert "1.33" in done.stderr


@needs_helm
def test_lint_has_nothing_to_say() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_chart_carries_the_version_of_the_packages() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = importlib.metadata.version("xpyd-operator")
    assert (chart["version"], chart["appVersion"]) == (version, version)


def fields(schema: Document, value: Any, at: str = "") -> Iterator[tuple[str, bool, bool]]:
    """Each field of closed sections: its path, whether the schema has it, whether the values do."""
    if schema.get("additionalProperties") is not False:
        return
    for name in sorted(schema["properties"].keys() | value.keys()):
        path = f"{at}/{name}"
        yield path, name in schema["properties"], name in value
        if name in schema["properties"] and isinstance(value.get(name), dict):
            yield from fields(schema["properties"][name], value[name], path)


def test_schema_and_values_know_the_same_fields() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    found = list(fields(schema, yaml.safe_load((CHART / "values.yaml").read_text())))
    assert len(found) > 50
    assert [path for path, in_schema, in_values in found if not (in_schema and in_values)] == \
        ["/global", "/resources/claims"]


@pytest.mark.parametrize("name", ["crds", "observability"])
def test_what_the_chart_shares_with_the_manifests_is_no_copy(name: str) -> None:
    """Helm follows links, also when it packs a chart."""
    link = CHART / "files" / name
    assert link.is_symlink()
    assert link.resolve() == ROOT / {"crds": "crds", "observability": "manifests/observability"}[name]
