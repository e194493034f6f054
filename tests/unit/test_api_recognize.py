"""Which kind a document is meant to be."""

from __future__ import annotations

import pytest

from xpyd_operator.api.recognize import DocumentKind, recognize


@pytest.mark.parametrize(
    ("version", "kind", "expected"),
    [
        ("xpyd.dev/v1beta1", "DisaggService", DocumentKind.SERVICE),
        ("xpyd.dev/v1beta1", "DisaggPool", DocumentKind.POOL),
        ("xpyd.dev/v1", "DisagService", DocumentKind.SERVICE),
        ("xpyd/v1", "Service", DocumentKind.SERVICE),
        ("v1", "DisaggPol", DocumentKind.POOL),
        (None, "DisaggPool", DocumentKind.POOL),
        (None, "Deployment", DocumentKind.SERVICE),
        ("apps/v1", None, DocumentKind.SERVICE),
        ("apps/v1", "Deployment", DocumentKind.OTHER),
        ("v1", "Service", DocumentKind.OTHER),
        ("autoscaling/v2", "HorizontalPodAutoscaler", DocumentKind.OTHER),
    ],
)
def test_kinds(version: str | None, kind: str | None, expected: DocumentKind) -> None:
    assert recognize({"apiVersion": version, "kind": kind}) is expected


def test_what_is_no_object_is_looked_at_as_a_service() -> None:
    assert recognize(["x"]) is DocumentKind.SERVICE
