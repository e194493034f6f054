"""What a document states, without defaults."""

from __future__ import annotations

from typing import Any

import pytest
from render_service import service

from xpyd_operator.render.defaults import without_defaults


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, {"model": {"source": "Qwen/Qwen3-8B"}}),
        ({"router": {"ports": {"http": 10001}, "hold": "30s"}}, {"model": {"source": "Qwen/Qwen3-8B"}}),
        (
            {"router": {"ports": {"http": 9001, "members": 30001}}, "engine": {"env": [{"name": "A", "value": "1"}]}},
            {
                "model": {"source": "Qwen/Qwen3-8B"},
                "router": {"ports": {"http": 9001}},
                "engine": {"env": [{"name": "A", "value": "1"}]},
            },
        ),
        (
            {"decode": {"resources": {}, "template": {"spec": {"x": [{"y": 1}]}}}},
            {"model": {"source": "Qwen/Qwen3-8B"}, "decode": {"resources": {}, "template": {"spec": {"x": [{"y": 1}]}}}},
        ),
    ],
)
def test_defaults_are_left_out_written_or_not(spec: dict[str, Any], expected: dict[str, Any]) -> None:
    assert without_defaults(service(**spec).spec) == expected
