"""Who may not go, so that what serves of one fingerprint can pair."""

from __future__ import annotations

import pytest
from pod_world import ONE_BY_ONE, wish

from xpyd_operator.api.operation import Rollout
from xpyd_operator.plan.balance import group, lead, may_go_blank, rank, reasons_to_keep
from xpyd_operator.plan.canary import RoleView, view
from xpyd_operator.plan.observed import Instance, Phase
from xpyd_sidecar.contract.ids import Role


def both(
    prefill: str, decode: str, wanted: tuple[int, int] = (9, 9), rollout: Rollout = ONE_BY_ONE
) -> tuple[RoleView, RoleView]:
    """Instances that serve: a letter each, its fingerprint; upper case: of the wanted revision."""
    instances = tuple(
        Instance(
            f"q-{role}{number}",  # type: ignore[arg-type]
            number,
            role,
            "new" if letter.isupper() else "old",  # type: ignore[arg-type]
            Phase.READY,
            fingerprint=letter.lower(),  # type: ignore[arg-type]
        )
        for role, letters in ((Role.PREFILL, prefill), (Role.DECODE, decode))
        for number, letter in enumerate(letters)
    )
    want = wish(*wanted, "new", rollout=rollout)
    return view(Role.PREFILL, want.prefill, instances), view(Role.DECODE, want.decode, instances)


def going(views: tuple[RoleView, RoleView], prefill: int, decode: int) -> tuple[list[Instance], list[Instance]]:
    return list(views[0].stale[:prefill]), list(views[1].stale[:decode])


@pytest.mark.parametrize(
    ("prefill", "decode", "leaves", "stays"),
    [
        ("aa", "aaa", (1, 1), []),
        ("aB", "aaaB", (1, 1), ["q-prefill0"]),
        ("aaaB", "aB", (1, 1), ["q-decode0"]),
        ("aB", "aB", (1, 1), []),
        ("B", "aaB", (0, 1), []),
        ("aA", "aaA", (1, 1), []),
    ],
)
def test_a_group_keeps_both_roles_or_goes_as_a_whole(
    prefill: str, decode: str, leaves: tuple[int, int], stays: list[str]
) -> None:
    views = both(prefill, decode)
    assert sorted(reasons_to_keep(*views, going(views, *leaves))) == stays


def test_the_reason_names_what_would_be_alone() -> None:
    views = both("aB", "aaaB")
    words = "it is the last prefill of a, of which 2 decode serve"
    assert reasons_to_keep(*views, going(views, 1, 1)) == {"q-prefill0": words}


def test_without_prefill_wanted_nobody_is_kept() -> None:
    views = both("a", "aaB", (0, 3))
    assert reasons_to_keep(*views, going(views, 1, 1)) == {}


def test_without_surge_the_only_one_may_go() -> None:
    views = both("a", "aa", rollout=Rollout(max_surge=0, max_unavailable=1))
    assert reasons_to_keep(*views, going(views, 1, 0)) == {}


def test_groups_that_cannot_pair_go_first_then_small_ones() -> None:
    ranks = rank(*both("abb", "aabbc"))
    assert sorted(ranks, key=lambda found: ranks[found]) == ["c", "a", "b"]
    assert rank(*both("abb", "aabbc")[::-1]) == ranks


@pytest.mark.parametrize(
    ("prefill", "decode", "wanted", "most"),
    [
        ("aaaa", "aaaa", (4, 4), 1),
        ("aaa", "aaaa", (4, 4), 0),
        ("aaaa", "aa", (4, 4), 3),
        ("a", "aaaa", (1, 4), 1),
        ("aaaa", "a", (4, 1), 4),
        ("ab", "aabb", (2, 4), 2),
    ],
)
def test_no_role_runs_ahead_by_more_than_an_instance(prefill: str, decode: str, wanted: tuple[int, int], most: int) -> None:
    assert lead(*both(prefill, decode, wanted), 0) == most


@pytest.mark.parametrize(
    ("prefill", "decode", "wanted", "follow", "most"),
    [
        ("aaaa", "aaaa", (4, 4), 3, 4),
        ("aaaa", "aaaaaaaa", (4, 8), 4, 3),
        ("aaa", "aaaa", (4, 4), 1, 1),
        ("aaaa", "aa", (4, 4), 9, 4),
    ],
)
def test_both_roles_go_in_one_step(prefill: str, decode: str, wanted: tuple[int, int], follow: int, most: int) -> None:
    """``follow`` of decode are due as well."""
    assert min(len(prefill), lead(*both(prefill, decode, wanted), follow)) == most


def test_of_two_single_ones_prefill_is_tried_first() -> None:
    prefill, decode = both("a", "a")
    assert may_go_blank(prefill, decode)
    assert not may_go_blank(decode, prefill)
    prefill, decode = both("a", "aaa")
    assert not may_go_blank(prefill, decode)
    assert may_go_blank(prefill, both("a", "aaA")[1])


def test_groups_count_what_serves() -> None:
    assert group(both("aab", "")[0].serving) == {"a": 2, "b": 1}
