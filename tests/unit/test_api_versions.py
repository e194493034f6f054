"""Both versions of the API take old and new words; what is decoded, and what is hashed of it, shows neither."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_documents import document
from api_server import admit, defaulted
from kube_documents import document as in_cluster

from xpyd_operator.api.crds import crds, to_yaml
from xpyd_operator.api.decode import decode_pool, decode_service
from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService, ServiceSpec
from xpyd_operator.api.words import renamed
from xpyd_operator.errors import SpecError
from xpyd_operator.render.defaults import without_defaults
from xpyd_operator.render.engine import dp_env, engine_revision
from xpyd_operator.render.labels import APPLIED
from xpyd_operator.render.objects import children, pool
from xpyd_operator.render.pod import pod_revision
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract.ids import Role

NEW, OLD = VERSIONS = ("xpyd.dev/v1beta1", "xpyd.dev/v1alpha1")
CRDS = crds()
SERVICE, POOL = CRDS["disaggservices.yaml"], CRDS["disaggpools.yaml"]
RANKS: dict[str, Any] = {"replicas": 1, "parallelism": {"data": 2}}
GOAL = {"ttftP95": "2s"}
SCALED: dict[str, Any] = {"scaling": {"min": 1, "max": 3}}
BOTH: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sidecar": ({"router": {"placement": "Sidecar", "policy": "least_loaded"}},
                {"router": {"placement": "sidecar", "policy": "least_loaded"}}),
    "deployment": ({"router": {"placement": "Deployment", "replicas": 2}},
                   {"router": {"placement": "deployment", "replicas": 2}}),
    "disabled": ({"planner": {"mode": "Off"}}, {"planner": {"mode": "disabled"}}),
    "observe": ({"planner": {"mode": "Observe", "slo": GOAL}}, {"planner": {"mode": "observe", "slo": GOAL}}),
    "auto": ({"planner": {"mode": "Auto", "slo": GOAL}, "decode": SCALED},
             {"planner": {"mode": "auto", "slo": GOAL}, "decode": SCALED}),
    "step sync": ({"engine": {"dpStepSync": "off"}, "decode": RANKS},
                  {"engine": {"dpStepSync": "disabled"}, "decode": RANKS}),
    "a mixed document": ({"router": {"placement": "Deployment"}, "planner": {"mode": "disabled"},
                          "engine": {"dpStepSync": "disabled"}},
                         {"router": {"placement": "deployment"}, "planner": {"mode": "Off"},
                          "engine": {"dpStepSync": "off"}}),
}
"""By what they mean: the words of before, and those of now."""
REVISIONS = {
    "sidecar": ("df67a76be5fb", "df67a76be5fb"), "deployment": ("7817047b8f44", "7817047b8f44"),
    "disabled": ("545ca706845b", "545ca706845b"), "observe": ("545ca706845b", "545ca706845b"),
    "auto": ("545ca706845b", "725c40c23636"), "step sync": ("683e3d7d13ad", "31e61e9d0c70"),
}
"""Of pods of prefill and decode, as the version before v1beta1 had them."""
LOCAL_WITHOUT_STEP_SYNC = "588ae801a106"
APPLIED_BEFORE = {
    "Service/qwen": "2bc39f72d9ef", "Service/qwen-members": "1f1fd31f6473", "NetworkPolicy/qwen": "ee7133761f06",
    "NetworkPolicy/qwen-clients": "d73f34444572", "PodDisruptionBudget/qwen-prefill": "647a20552746",
    "PodDisruptionBudget/qwen-decode": "5f6745aaa63b", "Deployment/qwen-router": "0a23bd7dc867",
    "PodDisruptionBudget/qwen-router": "b8b5ae6c80d5",
}


def decoded(version: str, **spec: Any) -> DisaggService:
    body = in_cluster(**spec) | {"apiVersion": version}
    return decode_service(body, strict=False, target=Target.KUBERNETES).service


@pytest.mark.parametrize("name", BOTH)
def test_both_versions_and_both_spellings_are_decoded_to_one_value(name: str) -> None:
    found = [decoded(version, **spec) for version, spec in itertools.product(VERSIONS, BOTH[name])]
    assert all(each == found[0] for each in found)
    assert found[0].api_version == NEW


@pytest.mark.parametrize("name", BOTH)
def test_the_api_server_takes_both_spellings_in_both_versions(name: str) -> None:
    for version, spec in itertools.product(VERSIONS, BOTH[name]):
        assert admit(SERVICE, document({"apiVersion": version}, **spec)) == []


@pytest.mark.parametrize(("path", "word"), [("router.placement", "SIDECAR"), ("router.placement", "Off"),
                                            ("planner.mode", "off"), ("planner.mode", "OFF"), ("engine.dpStepSync", "Off"),
                                            ("engine.dpStepSync", "Disabled"), ("kv.mode", "Put")])
def test_a_word_that_is_neither_is_refused_in_both_versions(path: str, word: str) -> None:
    for version in VERSIONS:
        obj = document({"apiVersion": version, f"spec.{path}": word})
        assert admit(SERVICE, obj)
        with pytest.raises(SpecError) as caught:
            decode_service(obj)
        assert [fault.path for fault in caught.value.faults] == [f"spec.{path}"]
        assert "must be one of" in str(caught.value)


def test_a_version_that_there_is_not_is_refused() -> None:
    for version in ("xpyd.dev/v1", "xpyd.dev/v1beta2", "xpyd.dev/V1beta1", "v1beta1", "xpyd.dev/v1alpha1 "):
        with pytest.raises(SpecError, match=r"apiVersion: must be xpyd.dev/v1beta1, not"):
            decode_service(document({"apiVersion": version}))


@pytest.mark.parametrize("name", REVISIONS)
def test_no_pod_has_another_revision_than_before(name: str) -> None:
    for version, spec in itertools.product(VERSIONS, BOTH[name]):
        service = decoded(version, **spec)
        assert tuple(pod_revision(service, role, "k") for role in Role) == REVISIONS[name]


def test_no_local_engine_has_another_revision_than_before() -> None:
    for version, spec in itertools.product(VERSIONS, BOTH["step sync"]):
        service = decoded(version, **spec)
        assert engine_revision(service, Role.DECODE, "m") == LOCAL_WITHOUT_STEP_SYNC
        assert dp_env(service, Role.DECODE) == {"XPYD_DP_SYNC": "disabled"}, "it is told the word of now"


@pytest.mark.parametrize("name", ["disabled", "deployment"])
def test_the_digest_of_what_is_applied_is_that_of_before(name: str) -> None:
    for version, spec in itertools.product(VERSIONS, BOTH[name]):
        service = decoded(version, **spec)
        made = children(service, {role: service.spec.replicas(role) for role in Role}, KubeSettings(sidecar_image="s:1"))
        for each in made:
            at = f"{each['kind']}/{each['metadata']['name']}"
            assert each["metadata"]["annotations"][APPLIED] == APPLIED_BEFORE[at], at
            assert each["metadata"]["ownerReferences"][0]["apiVersion"] == NEW, at


def test_the_operator_makes_pools_of_the_stored_version() -> None:
    for version in VERSIONS:
        made = pool(decoded(version), Role.DECODE, 1)
        assert made["apiVersion"] == NEW
        assert decode_pool(made | {"apiVersion": version}).pool.api_version == NEW
        assert admit(POOL, made | {"apiVersion": version}) == []


def words(kind: type, path: str = "") -> dict[str, dict[str, str]]:
    """Each field of the spec with older words, by its path."""
    found = {f"{path}{name}": dict(older) for name, older in renamed(kind).items()}
    for section in ("router", "planner", "engine", "kv", "rollout", "drain", "limits") if kind is ServiceSpec else ():
        found |= words(type(getattr(ServiceSpec(model=None), section)), f"{section}.")  # type: ignore[arg-type]
    return found


def test_the_words_that_were_renamed_are_those_of_the_decision() -> None:
    page = (Path(__file__).parents[2] / "docs/decisions/0024-words-of-the-api.md").read_text()
    found = words(ServiceSpec)
    assert found.keys() == {"router.placement", "planner.mode", "engine.dpStepSync"}
    for path, older in found.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{path}` |"))
        _, _, before, now, _ = row.split("|")
        for old, new in older.items():
            assert f"`{old}`" in before
            assert f"`{new}`" in now
            assert f"`{old}`" not in now


def nodes(schema: Any, path: str = "") -> dict[str, Any]:
    found = {path: schema}
    for key, part in schema.items() if isinstance(schema, dict) else ():
        found |= nodes(part, f"{path}.{key}")
    return found


def test_the_versions_are_one_schema_but_for_defaults_that_were_renamed() -> None:
    new, old = (version["schema"]["openAPIV3Schema"] for version in SERVICE["spec"]["versions"])
    pairs = {path: (part, nodes(old)[path]) for path, part in nodes(new).items() if not isinstance(part, dict)}
    assert nodes(new).keys() == nodes(old).keys()
    differ = {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}
    router, planner = (f".properties.spec.properties.{section}" for section in ("router", "planner"))
    assert differ == {
        f"{router}.properties.placement.default": ("sidecar", "Sidecar"),
        f"{router}.default.placement": ("sidecar", "Sidecar"),
        f"{planner}.properties.mode.default": ("disabled", "Off"),
        f"{planner}.default.mode": ("disabled", "Off"),
    }
    first, second = (version["schema"]["openAPIV3Schema"] for version in POOL["spec"]["versions"])
    assert first == second


@pytest.mark.parametrize("name", CRDS)
def test_both_versions_have_the_same_columns_and_subresources(name: str) -> None:
    new, old = CRDS[name]["spec"]["versions"]
    for part in ("subresources", "additionalPrinterColumns"):
        assert new[part] == old[part]


def test_who_writes_the_first_version_alone_meets_its_words_alone() -> None:
    """Such as an operator of before, which does not know the new ones."""
    for version, placement, mode in ((OLD, "Sidecar", "Off"), (NEW, "sidecar", "disabled")):
        schema = next(each["schema"]["openAPIV3Schema"] for each in SERVICE["spec"]["versions"]
                      if version.endswith(each["name"]))
        spec = defaulted(schema, document({"apiVersion": version}))["spec"]
        assert (spec["router"]["placement"], spec["planner"]["mode"]) == (placement, mode)


@pytest.mark.parametrize("name", CRDS)
def test_the_file_has_the_common_part_once(name: str) -> None:
    text = to_yaml(CRDS[name])
    head, second = text.split("- name: v1alpha1\n")
    assert second.count("\n") < head.count("\n") / 8
    new, old = yaml.safe_load(text)["spec"]["versions"]
    assert new["schema"] is not old["schema"]
    statuses = [each["schema"]["openAPIV3Schema"]["properties"]["status"] for each in (new, old)]
    assert statuses[0] is statuses[1]


def test_what_a_document_states_is_decoded_to_the_same_document() -> None:
    for spec in (spec for pair in BOTH.values() for spec in pair):
        service = decoded(NEW, **spec)
        stated = without_defaults(service)
        assert stated["apiVersion"] == OLD
        assert decode_service(stated, target=Target.KUBERNETES).service == service
