"""The pressure on a sender's budget: what one look at it costs."""

from __future__ import annotations

from rows import fails

from xpyd_sidecar.contract.ids import Attempt, TransferId
from xpyd_sidecar.engine.bounds import NOW, Budget
from xpyd_sidecar.engine.sender import Kept
from xpyd_sidecar.engine.spilling import Spilling
from xpyd_sidecar.kv.copies import Copy
from xpyd_sidecar.kv.keys import Key
from xpyd_sidecar.kv.sending import Sending
from xpyd_sidecar.kv.stores import Expect

REGIONS, TRANSFERS = 4, 50


class Weighed:
    """Memory of a copy. Who asks for its size is counted."""

    asked = 0

    def __len__(self) -> int:
        Weighed.asked += 1
        return 1000


@fails("B2", "each look adds up all copies on offer, so answering for each of them once is quadratic")
def test_a_look_at_a_full_budget_costs_the_same_however_much_is_on_offer() -> None:
    machine = Sending[Kept](keep_s=60, send_s=60, regions=REGIONS, block_bytes=1000 * REGIONS, cover=True)
    budget = Budget(1 << 30)
    spilling = Spilling(machine, budget)
    for number in range(TRANSFERS):
        key = Key(TransferId(f"{number:032x}"), Attempt(1), 1)
        machine.expect(1, key, Expect(REGIONS, 1000 * REGIONS, checksum=True))
        for region in range(REGIONS):
            machine.copy(key, Copy(region, 0, 1, Kept(Weighed(), NOW)), 0.0)  # type: ignore[arg-type]
    assert budget.reserve(budget.bound)
    assert len(spilling.relieve()) == REGIONS * TRANSFERS
    before = Weighed.asked
    assert spilling.relieve() == []
    assert Weighed.asked - before <= REGIONS
