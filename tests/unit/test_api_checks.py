"""Each rule: the Python check and its CEL twin give the same verdict on the same section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from api_documents import MALFORMED, document
from api_server import admit, defaulted, holds, pruned
from api_strategies import objects
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xpyd_operator.api.checks import RULES, sections
from xpyd_operator.api.crds import service_crd
from xpyd_operator.api.decode import decode_service
from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService, ServiceSpec
from xpyd_operator.api.walk import Walk
from xpyd_operator.errors import SpecError

CRD = service_crd()
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "kubernetes").glob("*.yaml"))
ARGUMENTS = st.sampled_from(["--port", "--por", "--pool", "-tp=2", "-t", "-x 3", "a b", "--no_data-p", "-_", "--_"])
FOR_ONE_TARGET = [
    document({"spec.adapters": [{"name": "sql", "source": "./sql"}]}),
    document({"spec.model.source": "../weights"}),
    document({"spec.model.source": "pvc://claim/x"}),
    document(kv={"transport": "shm"}),
    document({"spec.engine.env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}]}),
    document(decode={"parallelism": {"tensor": 2, "pods": 2}}, networkPolicy={"enabled": False}),
]


def well_formed(obj: Any) -> DisaggService | None:
    """The struct, when no field is faulty by itself."""
    walk = Walk(strict=True)
    wire = walk.convert(DisaggService, obj, "")
    return None if walk.faults else msgspec.convert(wire, DisaggService)


def section_of(obj: dict[str, Any], path: str) -> Any:
    value: Any = defaulted(SCHEMA, pruned(SCHEMA, obj))
    for name in filter(None, path.split(".")):
        value = value[name]
    return value


def verdicts(obj: dict[str, Any]) -> list[tuple[str, bool, bool]]:
    """For each rule with a twin: where, whether Python is content, whether CEL is."""
    service = well_formed(obj)
    found = []
    for rule, at, section in sections(service) if service else ():
        if rule.cel:
            wire = section_of(obj, f"{at}.{rule.cel_at}" if rule.cel_at else at)
            found.append((f"{at}: {rule.says}", not list(rule.wrong(section)), holds(rule.cel, wire)))
    return found


def test_twins_agree_on_malformed_documents() -> None:
    for name, case in MALFORMED.items():
        for rule, python, cel in verdicts(case.obj):
            assert python == cel, (name, rule)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(objects(ServiceSpec), st.data())
def test_twins_agree_on_any_well_formed_document(spec: dict[str, Any], data: st.DataObject) -> None:
    spec["engine"] = spec.get("engine", {}) | {"args": data.draw(st.lists(ARGUMENTS, max_size=2))}
    for rule, python, cel in verdicts(document() | {"spec": spec}):
        assert python == cel, rule


def test_the_api_server_refuses_what_we_refuse() -> None:
    for name, case in MALFORMED.items():
        assert bool(admit(CRD, case.obj)) == case.server, name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_api_server_admits_the_examples(path: Path) -> None:
    for obj in yaml.safe_load_all(path.read_text()):
        if obj["kind"] == "DisaggService":
            assert admit(CRD, obj) == []
            decode_service(obj, target=Target.KUBERNETES)


def test_rules_for_kubernetes_stand_in_the_crd_and_those_for_local_do_not() -> None:
    for index in (0, 1, 3, 5):
        assert admit(CRD, FOR_ONE_TARGET[index])
    assert admit(CRD, FOR_ONE_TARGET[2]) == admit(CRD, FOR_ONE_TARGET[4]) == []


def test_every_rule_is_broken_by_some_document() -> None:
    """So that no rule stands untested."""
    broken = set()
    for obj in [case.obj for case in MALFORMED.values()] + FOR_ONE_TARGET:
        service = well_formed(obj)
        broken |= {id(rule) for rule, _, section in sections(service) if list(rule.wrong(section))} if service else set()
    assert [rule.wrong.__name__ for rule in RULES if id(rule) not in broken] == []


def test_a_rule_without_a_twin_says_why() -> None:
    for rule in RULES:
        assert bool(rule.cel) != bool(rule.no_twin), rule.wrong.__name__
        assert bool(rule.cel) == bool(rule.says), rule.wrong.__name__


def test_what_a_rule_reads_are_fields() -> None:
    """A misspelled path would silently ask a rule about a faulty field."""
    for rule in RULES:
        for at in rule.at:
            for path in (at, *(f"{at}.{field}" for field in rule.reads)):
                node = SCHEMA
                for name in path.split("."):
                    if node.get("x-kubernetes-preserve-unknown-fields"):
                        break  # what is in an object of Kubernetes' own only Python knows
                    assert name in node["properties"], f"{rule.wrong.__name__}: {path}"
                    node = node["properties"][name]


def test_findings_point_to_fields_of_the_section() -> None:
    for case in MALFORMED.values():
        service = well_formed(case.obj)
        for rule, at, section in sections(service) if service else ():
            for path, message in rule.wrong(section):
                assert message
                assert path == "" or path.split(".")[0].split("[")[0] in type(section).__struct_encode_fields__, (at, path)


def test_faults_carry_the_section_and_the_field() -> None:
    with pytest.raises(SpecError) as caught:
        decode_service(document(rollout={"maxSurge": 0}))
    assert str(caught.value).startswith("spec.rollout.maxUnavailable: must be at least 1")
