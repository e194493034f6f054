from __future__ import annotations

from pathlib import Path

from xpyd_operator.api.roles import Parallelism, ResourceClaim, Resources, RoleSpec
from xpyd_operator.local import gpus


def test_counted_by_the_drivers_folder(tmp_path: Path) -> None:
    assert gpus.count(tmp_path / "none") == 0
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert gpus.count(tmp_path) == 2


def test_least_used_first_and_shared_when_there_are_too_few() -> None:
    one = RoleSpec()
    assert gpus.assign(one, 2, []) == (0,)
    assert gpus.assign(one, 2, [(0,)]) == (1,)
    assert gpus.assign(one, 2, [(0,), (1,)]) == (0,)
    assert gpus.assign(RoleSpec(parallelism=Parallelism(tensor=2)), 4, [(0,), (2,)]) == (1, 3)


def test_members_have_equal_shares_or_all_of_what_is_too_little() -> None:
    assert gpus.shares((0, 1, 2, 3), 2) == [(0, 1), (2, 3)]
    assert gpus.shares((0, 1), 1) == [(0, 1)]
    assert gpus.shares((), 2) == [(), ()]
    assert gpus.shares((0,), 2) == [(0,), (0,)]


def test_none_where_there_are_none_or_none_is_asked_for() -> None:
    assert gpus.assign(RoleSpec(), 0, []) == ()
    assert gpus.assign(RoleSpec(resources=Resources()), 2, []) == ()


def test_a_limit_of_memory_takes_no_gpu_away_and_devices_of_others_bring_none() -> None:
    assert gpus.assign(RoleSpec(resources=Resources(limits={"memory": "8Gi"})), 2, []) == (0,)
    assert gpus.assign(RoleSpec(parallelism=Parallelism(device="none")), 2, []) == ()
    assert gpus.assign(RoleSpec(resources=Resources(limits={"amd.com/gpu": 1})), 2, []) == ()
    assert gpus.assign(RoleSpec(resources=Resources(claims=(ResourceClaim(name="gpu"),))), 2, []) == (0,)
