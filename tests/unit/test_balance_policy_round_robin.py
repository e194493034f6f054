from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from members import member

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.balance import policies
from xpyd_sidecar.router.balance.policies import Query


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 3), (2, 1), (2, 2), (2, 4), (3, 2), (4, 6), (5, 5)])
@pytest.mark.parametrize("seed", [0, 7, 12345])
def test_every_pair_gets_the_same_share(n: int, m: int, seed: int) -> None:
    policy = policies.make("round_robin", {}, Random(seed).random)
    prefills = [member(f"p{i}", Role.PREFILL) for i in range(n)]
    decodes = [member(f"d{i}") for i in range(m)]
    pairs = Counter[tuple[int, int]]()
    for _ in range(3 * n * m):
        decode = policy.choose(Query(), decodes, n)
        prefill = policy.choose(Query(), prefills, m)
        pairs[prefill, decode] += 1
    assert pairs == {(p, d): 3 for p in range(n) for d in range(m)}


def test_roles_have_counters_of_their_own() -> None:
    policy = policies.make("round_robin", {}, float)
    decodes = [member("d0"), member("d1")]
    prefills = [member("p0", Role.PREFILL), member("p1", Role.PREFILL)]
    assert [policy.choose(Query(), decodes) for _ in range(3)] == [0, 1, 0]
    assert [policy.choose(Query(), prefills) for _ in range(2)] == [0, 1]
