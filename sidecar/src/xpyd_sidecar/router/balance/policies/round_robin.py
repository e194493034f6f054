"""round_robin: each in turn."""

from __future__ import annotations

import math

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.balance.policies import NoOptions, Query, register


@register("round_robin")
class RoundRobin:
    """One counter per role.

    Two counters in step would pair instance i with instance i for ever and never use the other pairs: with n prefill and m
    decode instances the pairs repeat after lcm(n, m) requests, while there are n·m = lcm·gcd. So prefill's turn is moved
    by one more in each such round, gcd rounds long, and any n·m requests use every pair once:

        2P2D     request  0  1  2  3        prefill = (k + (k div lcm) mod gcd) mod n
                 prefill  0  1  1  0
                 decode   0  1  0  1        decode  =  k mod m
    """

    holds = False

    def __init__(self, seed: int, _: NoOptions) -> None:
        self._turn = dict.fromkeys(Role, seed % 2**16)  # several routers begin at different places

    def choose(self, query: Query) -> int:
        """Index of the next in turn."""
        n = len(query.candidates)
        k = self._turn[query.role]
        self._turn[query.role] = k + 1
        if query.role is Role.PREFILL and query.partners > 1:
            k += k // math.lcm(n, query.partners) % math.gcd(n, query.partners)
        return k % n
