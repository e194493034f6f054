"""Which kind a document is meant to be."""

from __future__ import annotations

import pytest

from xpyd_operator.api.recognize import Kind, recognize


@pytest.mark.parametrize(
    ("version", "kind", "expected"),
    [
        ("xpyd.dev/v1alpha1", "DisaggService", Kind.SERVICE),
        ("xpyd.dev/v1beta1", "DisaggService", Kind.SERVICE),
        ("xpyd.dev/v1beta1", "DisaggPool", Kind.POOL),
        ("xpyd.dev/v1", "DisagService", Kind.SERVICE),
        ("xpyd/v1alpha1", "Service", Kind.SERVICE),
        ("v1", "DisaggPol", Kind.POOL),
        (None, "DisaggPool", Kind.POOL),
        (None, "Deployment", Kind.SERVICE),
        ("apps/v1", None, Kind.SERVICE),
        ("apps/v1", "Deployment", Kind.OTHER),
        ("v1", "Service", Kind.OTHER),
        ("autoscaling/v2", "HorizontalPodAutoscaler", Kind.OTHER),
    ],
)
def test_kinds(version: str | None, kind: str | None, expected: Kind) -> None:
    assert recognize({"apiVersion": version, "kind": kind}) is expected


def test_what_is_no_object_is_looked_at_as_a_service() -> None:
    assert recognize(["x"]) is Kind.SERVICE
