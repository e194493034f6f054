"""The shipped manifests: rendered without drift, consistent with the code, and no broader than said."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pod_security import violations
from scripts import load

from xpyd_operator.kube.__main__ import parse
from xpyd_operator.kube.app import PROCESS_S
from xpyd_operator.kube.client.api import RESOURCES
from xpyd_operator.kube.client.cache import KINDS, OWNER_KIND
from xpyd_operator.render.labels import NAME, OPERATOR

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/manifests.py"
OVERLAYS = sorted(path.name for path in (ROOT / "manifests/overlays").iterdir())
Document = dict[str, Any]


KUBECTL: str | None = load(SCRIPT).kubectl()
needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl on this machine")


def installed() -> list[Document]:
    return list(yaml.safe_load_all((ROOT / "manifests/install.yaml").read_text()))


def overlay(name: str) -> list[Document]:
    assert KUBECTL is not None
    command = [KUBECTL, "kustomize", str(ROOT / "manifests/overlays" / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


def one(documents: list[Document], kind: str, name: str) -> Document:
    found, = (each for each in documents if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


def operator_container(documents: list[Document]) -> Document:
    container, = one(documents, "Deployment", "xpyd-operator")["spec"]["template"]["spec"]["containers"]
    return dict(container)


def environment(container: Document) -> dict[str, str]:
    return {each["name"]: each.get("value", "from-the-pod") for each in container["env"]}


@needs_kubectl
def test_the_rendered_file_is_what_the_base_says() -> None:
    assert subprocess.run([sys.executable, str(SCRIPT), "--check"], check=False).returncode == 0


@needs_kubectl
def test_drift_is_noticed() -> None:
    """With a kustomize that renders something else."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], env=os.environ | {"KUBECTL": "/bin/echo"},
                          capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "make generate" in done.stderr


def test_the_prometheus_rule_holds_the_alerts() -> None:
    rule = yaml.safe_load((ROOT / "manifests/observability/prometheusrule.yaml").read_text())
    assert rule["spec"] == yaml.safe_load((ROOT / "manifests/observability/alerts.yaml").read_text())


def test_images_carry_the_version_of_the_packages() -> None:
    version = importlib.metadata.version("xpyd-operator")
    container = operator_container(installed())
    assert container["image"] == f"xpyd-operator:{version}"
    assert environment(container)["XPYD_SIDECAR_IMAGE"] == f"xpyd-sidecar:{version}"


def test_the_deployment_says_what_the_process_understands() -> None:
    settings, _, elect = parse([], environment(operator_container(installed())))
    assert elect
    assert (settings.lease_name, settings.lease_namespace) == ("xpyd-operator", "from-the-pod")
    port, = operator_container(installed())["ports"]
    assert port["containerPort"] == settings.http_port
    role = one(installed(), "Role", "xpyd-operator-lease")
    assert role["rules"][1]["resourceNames"] == [settings.lease_name]


def test_pods_are_found_by_the_label_that_services_let_in() -> None:
    deployment = one(installed(), "Deployment", "xpyd-operator")
    assert deployment["spec"]["template"]["metadata"]["labels"][NAME] == OPERATOR
    selectors = [deployment["spec"]["selector"]["matchLabels"],
                 one(installed(), "PodDisruptionBudget", "xpyd-operator")["spec"]["selector"]["matchLabels"],
                 one(installed(), "NetworkPolicy", "xpyd-operator")["spec"]["podSelector"]["matchLabels"],
                 one(installed(), "Service", "xpyd-operator-metrics")["spec"]["selector"]]
    assert selectors == [{NAME: OPERATOR}] * 4


def test_the_operator_is_restricted_and_has_time_to_end() -> None:
    spec = one(installed(), "Deployment", "xpyd-operator")["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    security = operator_container(installed())["securityContext"]
    assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert spec["terminationGracePeriodSeconds"] > PROCESS_S
    labels = one(installed(), "Namespace", "xpyd-system")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_the_role_lets_it_watch_what_it_caches_and_has_no_wildcard() -> None:
    rules = one(installed(), "ClusterRole", "xpyd-operator")["rules"]
    held = {(group, resource, verb) for rule in rules for group in rule["apiGroups"] for resource in rule["resources"]
            for verb in rule["verbs"]}
    assert not any("*" in triple for triple in held)
    for kind in KINDS:
        group = RESOURCES[kind].version.rpartition("/")[0]
        assert {(group, RESOURCES[kind].plural, verb) for verb in ("list", "watch")} <= held
    service = RESOURCES[OWNER_KIND].plural
    assert {verb for _, resource, verb in held if resource == service} == {"list", "watch"}
    assert {verb for _, resource, verb in held if resource == "secrets"} == {"create"}


def test_the_only_secret_that_it_may_read_is_its_own() -> None:
    settings, _, _ = parse([], environment(operator_container(installed())))
    roles = [each for each in installed() if each["kind"] in ("ClusterRole", "Role")]
    rules = [(each["kind"], rule) for each in roles for rule in each["rules"]
             if "secrets" in rule["resources"] and "get" in rule["verbs"]]
    assert rules == [("Role", {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [settings.master_secret],
                               "verbs": ["get"]})]
    role, binding = (one(installed(), kind, "xpyd-operator-keys") for kind in ("Role", "RoleBinding"))
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "xpyd-system"


def test_users_get_their_rights_by_aggregation() -> None:
    edit, view = (one(installed(), "ClusterRole", name) for name in ("xpyd-edit", "xpyd-view"))
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert all(set(rule["verbs"]) == {"get", "list", "watch"} for rule in view["rules"])


@needs_kubectl
@pytest.mark.parametrize("name", OVERLAYS)
def test_overlays_render_and_keep_the_operator(name: str) -> None:
    settings, _, _ = parse([], environment(operator_container(overlay(name))))
    assert settings.sidecar_image.rpartition("/")[2].startswith("xpyd-sidecar:")


@needs_kubectl
def test_the_namespaced_overlay_grants_nothing_across_the_cluster_but_discovery() -> None:
    documents = overlay("namespaced")
    bindings = [each["metadata"]["name"] for each in documents if each["kind"] == "ClusterRoleBinding"]
    assert bindings == ["xpyd-operator-discovery"]
    settings, _, _ = parse([], environment(operator_container(documents)))
    assert settings.namespaces == (one(documents, "RoleBinding", "xpyd-operator")["metadata"]["namespace"],)
    verbs = {verb for rule in one(documents, "ClusterRole", "xpyd-operator-discovery")["rules"] for verb in rule["verbs"]}
    assert verbs == {"list", "watch"}


@needs_kubectl
def test_the_openshift_overlay_names_no_user_and_stays_restricted() -> None:
    documents = overlay("openshift")
    spec = one(documents, "Deployment", "xpyd-operator")["spec"]["template"]["spec"]
    assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert "runAsUser" not in operator_container(documents)["securityContext"]
    assert list(violations(spec)) == []
    settings, _, _ = parse([], environment(operator_container(documents)))
    assert settings.pod_user == "assigned"


@needs_kubectl
def test_the_images_overlay_sets_both_images() -> None:
    container = operator_container(overlay("images"))
    registry = container["image"].partition("/xpyd-operator")[0]
    assert "/" in registry
    assert environment(container)["XPYD_SIDECAR_IMAGE"].startswith(f"{registry}/xpyd-sidecar:")
    assert (ROOT / "manifests/overlays/images/images.yaml").read_text() == (ROOT / "manifests/base/images.yaml").read_text()


def test_the_crds_are_the_generated_ones() -> None:
    crds = {each["spec"]["names"]["plural"]: each for each in installed() if each["kind"] == "CustomResourceDefinition"}
    assert set(crds) == {"disaggservices", "disaggpools"}
    for plural, crd in crds.items():
        generated = yaml.safe_load((ROOT / f"crds/{plural}.yaml").read_text())
        assert crd["spec"] == generated["spec"]
