"""A DisaggService for tests of rendering: the smallest one with given sections."""

from __future__ import annotations

from typing import Any

from xpyd_operator.api.decode import decode_service
from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService


def service(target: Target | None = Target.LOCAL, **spec: Any) -> DisaggService:
    document = {
        "apiVersion": "xpyd.dev/v1beta1",
        "kind": "DisaggService",
        "metadata": {"name": "qwen"},
        "spec": {"model": {"source": "Qwen/Qwen3-8B"}, **spec},
    }
    return decode_service(document, target=target).service
