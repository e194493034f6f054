from __future__ import annotations

from xpyd_operator.plan.desired import revision_of, shape


def test_a_revision_depends_on_values_and_not_on_their_order() -> None:
    first = revision_of({"a": 1, "b": ["x", "y"]})
    assert first == revision_of({"b": ["x", "y"], "a": 1})
    assert first != revision_of({"a": 1, "b": ["y", "x"]})
    assert len(first) == 12


def test_shape() -> None:
    assert shape(1, 3) == "1P3D"
