"""Counts from documents, pools and limits."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_operator.api.operation import Limits
from xpyd_operator.api.roles import RoleSpec, Scaling
from xpyd_operator.api.service import DisaggService
from xpyd_operator.plan.counts import Counts, counts
from xpyd_sidecar.contract.ids import Role


def service(prefill: RoleSpec, decode: RoleSpec, **limits: Any) -> DisaggService:
    document = {
        "apiVersion": "xpyd.dev/v1beta1",
        "kind": "DisaggService",
        "metadata": {"name": "qwen"},
        "spec": {"model": {"source": "Qwen/Qwen3-8B"}},
    }
    made = msgspec.convert(document, DisaggService)
    spec = msgspec.structs.replace(made.spec, prefill=prefill, decode=decode, limits=Limits(**limits))
    return msgspec.structs.replace(made, spec=spec)


def scaled(least: int, most: int) -> RoleSpec:
    return RoleSpec(scaling=Scaling(least, most))


def of(made: DisaggService, prefill: int | None = None, decode: int | None = None) -> Counts:
    out = counts(made, {Role.PREFILL: prefill, Role.DECODE: decode})
    assert bool(out.held) == any(out.limited)
    return msgspec.structs.replace(out, limited=("", ""))


def test_replicas_of_the_document_count_and_pools_do_not() -> None:
    assert of(service(RoleSpec(replicas=2), RoleSpec(replicas=3)), 7, 7) == Counts(2, 3)


def test_with_scaling_the_pool_counts_and_without_one_the_least() -> None:
    made = service(scaled(1, 4), scaled(2, 8))
    assert of(made) == Counts(1, 2)
    assert of(made, 3, 5) == Counts(3, 5)
    assert of(made, 9, 0) == Counts(4, 2, "prefill.scaling.max 4 makes 9 4; decode.scaling.min 2 makes 0 2")


def test_decode_never_goes_below_one() -> None:
    assert of(service(scaled(0, 4), scaled(0, 8)), 0, 0) == Counts(0, 1, "")


def test_the_total_takes_from_who_is_further_above_its_least() -> None:
    made = service(scaled(1, 9), scaled(2, 9), max_instances=8)
    assert of(made, 5, 8) == Counts(4, 4, "limits.maxInstances 8 makes 5P8D 4P4D")
    assert of(made, 9, 2) == Counts(6, 2, "limits.maxInstances 8 makes 9P2D 6P2D")


@given(st.data())
def test_bounds_of_the_roles_always_hold_and_limits_unless_it_says_so(data: st.DataObject) -> None:
    low = [data.draw(st.integers(0, 6)), data.draw(st.integers(1, 6))]
    high = [max(1, least + data.draw(st.integers(0, 8))) for least in low]
    limits = Limits(data.draw(st.none() | st.integers(1, 20)))
    made = service(scaled(low[0], high[0]), scaled(low[1], high[1]))
    made = msgspec.structs.replace(made, spec=msgspec.structs.replace(made.spec, limits=limits))
    asked = [data.draw(st.none() | st.integers(0, 20)) for _ in range(2)]
    out = of(made, *asked)
    assert out == of(made, *asked)
    assert low[0] <= out.prefill <= high[0]
    assert max(1, low[1]) <= out.decode <= high[1]
    kept = limits.max_instances is None or out.prefill + out.decode <= limits.max_instances
    assert kept or "maxInstances cannot be kept" in out.held
    changed = any(want is not None and want != got for want, got in zip(asked, (out.prefill, out.decode), strict=True))
    assert not changed or out.held or asked[1] == 0


@pytest.mark.parametrize("role", list(Role))
def test_counts_by_role(role: Role) -> None:
    assert Counts(1, 2).count_of(role) == (1 if role is Role.PREFILL else 2)


def test_what_is_said_belongs_to_the_role_that_it_holds_back() -> None:
    def limited(made: DisaggService, prefill: int, decode: int) -> tuple[str, str]:
        return counts(made, {Role.PREFILL: prefill, Role.DECODE: decode}).limited

    made = service(scaled(1, 4), scaled(1, 9), max_instances=6)
    assert limited(made, 2, 3) == ("", "")
    assert limited(made, 6, 2) == ("prefill.scaling.max 4 makes 6 4", "")
    assert limited(made, 1, 7) == ("", "limits.maxInstances 6 makes 1P7D 1P5D")
    broken = limited(service(scaled(2, 4), scaled(4, 9), max_instances=5), 2, 4)
    assert broken[0] == broken[1] == "limits.maxInstances cannot be kept with 2P4D: the bounds of the roles leave no room"
