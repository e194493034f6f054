from __future__ import annotations

from itertools import islice

import pytest

from xpyd_operator.plan.names import free_ordinals, instance_name, ordinal_of
from xpyd_sidecar.contract.ids import ServiceName

QWEN = ServiceName("qwen")


@pytest.mark.parametrize("ordinal", [0, 1, 10, 999])
def test_name_and_ordinal_are_inverse(ordinal: int) -> None:
    assert ordinal_of(QWEN, instance_name(QWEN, ordinal)) == ordinal


@pytest.mark.parametrize("name", ["qwen", "qwen-e", "qwen-e01", "qwen-e1x", "qwen2-e1", "other-e1", "qwen-router"])
def test_foreign_names_have_no_ordinal(name: str) -> None:
    assert ordinal_of(QWEN, name) is None


def test_lowest_free_ordinals_first() -> None:
    assert list(islice(free_ordinals([0, 2, 5]), 4)) == [1, 3, 4, 6]
