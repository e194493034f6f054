from __future__ import annotations

import msgspec

from xpyd_operator.plan.desired import Revision
from xpyd_operator.plan.drain import victims
from xpyd_operator.plan.observed import Instance, ObservedUnit, Phase
from xpyd_sidecar.contract.ids import InstanceName, Role


def instance(ordinal: int, phase: Phase, *, load: int = 0, since: float = 0.0, crashes: int = 0) -> Instance:
    unit = ObservedUnit("engine", phase is not Phase.CRASHED, crashes)
    return Instance(InstanceName(f"q-e{ordinal}"), ordinal, Role.DECODE, Revision("r"), phase, since, load, (unit,))


def test_crashed_then_youngest_start_then_least_loaded() -> None:
    order = victims(
        [
            instance(0, Phase.READY, load=1),
            instance(1, Phase.READY, load=9),
            instance(2, Phase.READY, load=1),
            instance(3, Phase.STARTING, since=5),
            instance(4, Phase.STARTING, since=9),
            instance(5, Phase.CRASHED, crashes=1),
            instance(6, Phase.CRASHED, crashes=4),
        ]
    )
    assert [victim.ordinal for victim in order] == [6, 5, 4, 3, 2, 0, 1]


def test_load_and_cached_prefixes_count_against_their_means() -> None:
    def loaded(ordinal: int, load: int, cached: int) -> Instance:
        return msgspec.structs.replace(instance(ordinal, Phase.READY, load=load), cached=cached)

    # Means 4 and 100: costs 0.5 + 2.4, 1 + 0, 1.5 + 0.6.
    assert [one.ordinal for one in victims([loaded(0, 2, 240), loaded(1, 4, 0), loaded(2, 6, 60)])] == [1, 2, 0]
    assert [one.ordinal for one in victims([loaded(0, 0, 9), loaded(1, 0, 3)])] == [1, 0], "no load at all"


def test_who_routes_for_clients_goes_last() -> None:
    routing = msgspec.structs.replace(instance(0, Phase.READY), router=True)
    assert [victim.ordinal for victim in victims([routing, instance(1, Phase.READY, load=9)])] == [1, 0]
