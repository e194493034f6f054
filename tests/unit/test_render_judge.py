"""The judge itself; that everybody asks it is in test_one_judge."""

from __future__ import annotations

from typing import Any

import pytest
from api_documents import MALFORMED, document

from xpyd_operator.api.rule import Target
from xpyd_operator.errors import SpecError
from xpyd_operator.render.judge import judge

OFFLOAD = {"offload": {"store": {"connector": "LMCacheMPConnector"}}}
"""Supported by no target for instances that are spread."""


def spread() -> dict[str, Any]:
    return {"replicas": 1, "parallelism": {"data": 4, "pods": 2}}


def paths(found: object) -> list[str]:
    return [fault.path for fault in found]  # type: ignore[attr-defined]


def test_rules_and_what_is_unsupported_are_said_at_once() -> None:
    stuck = {"maxSurge": 0, "maxUnavailable": 0}
    found = judge(document(rollout=stuck, kv=OFFLOAD, decode=spread()), Target.KUBERNETES)
    assert paths(found.unsupported) == ["spec.kv.offload"]
    assert paths(found.faults) == ["spec.rollout.maxUnavailable"]
    assert found.refusals == (*found.faults, *found.unsupported)
    with pytest.raises(SpecError) as caught:
        found.accepted_service()
    assert caught.value.faults == found.refusals


def test_without_its_form_nothing_else_is_looked_for() -> None:
    found = judge(document({"spec.decode.replicas": "three"}, kv=OFFLOAD, decode=spread()), Target.KUBERNETES)
    assert (found.service, paths(found.refusals)) == (None, ["spec.decode.replicas"])


def test_an_unknown_field_hides_nothing_and_is_no_fault_where_a_newer_version_may_have_it() -> None:
    given = document({"spec.decode.replica": 3}, kv=OFFLOAD, decode=spread())
    strict, lenient = judge(given, Target.KUBERNETES), judge(given, Target.KUBERNETES, strict=False)
    assert paths(strict.refusals) == ["spec.decode.replica", "spec.kv.offload"]
    assert (paths(lenient.ignored), paths(lenient.refusals)) == (["spec.decode.replica"], ["spec.kv.offload"])


def test_what_a_rule_found_is_not_said_twice() -> None:
    template = {"spec": {"containers": [{"name": "main", "image": "x"}]}}
    (only,) = judge(document(decode={"template": template}), Target.KUBERNETES).refusals
    assert only.message.startswith("xpyd starts the container main")


def test_without_a_target_what_one_of_them_refuses_is_a_note() -> None:
    found = judge(document(router={"ports": {"http": 8000}}), None)
    assert found.refusals == ()
    (note,) = found.notes
    assert (note.path, note.message.startswith("not for kubernetes: 8000 is the engine's own port")) == (
        "spec.router.ports.http", True)
    assert paths(judge(document(kv=OFFLOAD, decode=spread()), None).refusals) == ["spec.kv.offload"]


def test_what_only_hosts_without_gpus_refuse() -> None:
    given = document(kv={"transport": "nccl"})
    with_gpus, without = (judge(given, Target.LOCAL, gpus=gpus) for gpus in (1, 0))
    assert [(note.path, note.message.split(":")[0]) for note in with_gpus.notes] == [
        ("spec.kv.transport", "not for a host without GPUs")]
    assert with_gpus.refusals == ()
    assert paths(without.refusals) == ["spec.kv.transport"]
    assert not any("host without" in note.message for note in without.notes)


def test_warnings_are_there_with_refusals_and_without() -> None:
    args = {"args": ["--tokens-only"]}
    assert paths(judge(document(engine=args), None).warnings) == ["spec.engine.args[0]"]
    both = judge(document(engine=args, kv=OFFLOAD, decode=spread()), Target.KUBERNETES)
    assert (paths(both.warnings), paths(both.refusals)) == (["spec.engine.args[0]"], ["spec.kv.offload"])
    assert judge(document(engine=args), None).accepted_service().spec.engine.args == ("--tokens-only",)


@pytest.mark.parametrize("target", [None, *Target], ids=str)
def test_it_judges_whatever_it_is_given(target: Target | None) -> None:
    for name, bad in MALFORMED.items():
        strict, lenient = (judge(bad.obj, target, strict=way, gpus=0) for way in (True, False))
        assert strict.refusals, name
        assert {fault.path for fault in lenient.refusals} <= {fault.path for fault in strict.refusals}, name
