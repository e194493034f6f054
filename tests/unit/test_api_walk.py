"""The walk agrees with msgspec about what fits, and with the schema about what does not."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from api_documents import document
from api_server import defaulted, pruned, structure
from api_strategies import damaged, objects
from hypothesis import HealthCheck, given, settings

from xpyd_operator.api.pool import DisaggPool
from xpyd_operator.api.schema import schema_of
from xpyd_operator.api.service import DisaggService, ServiceSpec
from xpyd_operator.api.walk import Walk, join

SCHEMA = schema_of(DisaggService)["properties"]["spec"]
UNSEEN = re.compile(r"spec\.(model\.tokenSecret|engine\.env\[\d+\]|(prefill|decode|router)\.resources|"
                    r"router\.gateway\.parentRefs\[\d+\])[.\[]")
"""What is wrong in objects of Kubernetes' own, which the schema takes as they are."""
QUICK = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def walked(obj: Any) -> tuple[Any, list[str]]:
    walk = Walk(strict=True)
    wire = walk.convert(ServiceSpec, obj, "spec")
    return wire, [str(fault) for fault in walk.faults]


@QUICK
@given(objects(ServiceSpec))
def test_what_fits_comes_back_unchanged(obj: dict[str, Any]) -> None:
    wire, faults = walked(obj)
    assert faults == []
    spec = msgspec.convert(wire, ServiceSpec)
    again, faults = walked(msgspec.to_builtins(spec))
    assert faults == []
    assert msgspec.convert(again, ServiceSpec) == spec


@QUICK
@given(objects(DisaggPool))
def test_pools_come_back_unchanged(obj: dict[str, Any]) -> None:
    walk = Walk(strict=True)
    pool = msgspec.convert(walk.convert(DisaggPool, obj, ""), DisaggPool)
    assert walk.faults == []
    assert msgspec.convert(msgspec.to_builtins(pool), DisaggPool) == pool


@settings(QUICK, max_examples=80)
@given(damaged(ServiceSpec))
def test_damage_is_found_by_the_walk_as_by_the_schema_and_never_escapes_as_another_error(obj: Any) -> None:
    wire, faults = walked(obj)
    msgspec.convert(wire, ServiceSpec)
    assert all(fault.startswith("spec") for fault in faults)
    if not any(re.search(r"from [0-9]+m?s to [0-9]+h, not|^spec\.model\.source: .* is not allowed", fault)
               for fault in faults):  # CEL in the schema
        seen = [fault for fault in faults if not UNSEEN.match(fault)]
        assert bool(seen) == bool(structure(SCHEMA, defaulted(SCHEMA, pruned(SCHEMA, obj)))), (obj, faults)


@pytest.mark.parametrize(
    ("path", "name", "joined"),
    [("", "spec", "spec"), ("spec", "kv", "spec.kv"), ("a", "b.c/d", 'a["b.c/d"]'), ("a", 'x"', 'a["x\\""]')],
)
def test_paths(path: str, name: str, joined: str) -> None:
    assert join(path, name) == joined


@pytest.mark.parametrize(
    ("written", "meant"),
    [("replica", "replicas"), ("Replicas", "replicas"), ("paralellism", "parallelism"), ("resource", "resources")],
)
def test_a_near_name_is_suggested(written: str, meant: str) -> None:
    _, faults = walked(document({f"spec.decode.{written}": 1})["spec"])
    assert faults == [f"spec.decode.{written}: unknown field; did you mean {meant}?"]


def test_a_far_name_gets_the_list() -> None:
    _, faults = walked(document(drain={"zzz": 1})["spec"])
    assert faults == ["spec.drain.zzz: unknown field; known here: timeout"]


def test_keys_that_are_no_text_are_faults() -> None:
    _, faults = walked(document({"spec.decode.resources": {"limits": {1: 2}}})["spec"])
    assert faults == ["spec.decode.resources.limits.1: a key must be text, not the number 1; put it in quotes"]
