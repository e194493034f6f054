"""Which ends of an engine are a death by itself."""

from __future__ import annotations

import pytest
from beats import beat, bye
from rosters import D0, make

from xpyd_sidecar.contract.ids import Incarnation, State
from xpyd_sidecar.router.fleet.member import DeathVerdict, FleetMember, HealthResult, by_message, by_probe


def member(state: State = State.READY) -> FleetMember:
    roster = make()
    roster.on_message(0.0, beat("d0", state=state))
    found = roster.find_by_name(D0)
    assert found is not None
    return found


@pytest.mark.parametrize(("state", "result", "silent", "verdict"), [
    (State.READY, HealthResult.DEAD, False, DeathVerdict.DIED),
    (State.STARTING, HealthResult.DEAD, False, DeathVerdict.DIED),
    (State.DRAINING, HealthResult.DEAD, False, DeathVerdict.LIVES),
    (State.READY, HealthResult.DEAD, True, DeathVerdict.LOST),
    (State.DRAINING, HealthResult.DEAD, True, DeathVerdict.LOST),
    (State.READY, HealthResult.SILENT, True, DeathVerdict.LOST),
    (State.READY, HealthResult.SILENT, False, None),
    (State.READY, HealthResult.HEALTHY, False, DeathVerdict.LIVES),
    (State.READY, HealthResult.HEALTHY, True, DeathVerdict.LIVES),
    (State.DRAINING, HealthResult.HEALTHY, False, DeathVerdict.LIVES),
])
def test_by_a_probe(state: State, result: HealthResult, silent: bool, verdict: DeathVerdict | None) -> None:
    assert by_probe(member(state), result, silent=silent) is verdict


def test_of_who_has_left_a_failed_probe_says_nothing() -> None:
    assert by_probe(None, HealthResult.DEAD, silent=False) is None


def test_a_new_incarnation_in_its_place_says_that_it_died_unless_it_drained() -> None:
    again = beat("d0", incarnation=Incarnation("i1"))
    assert by_message(member(), again) == ("i-d0", DeathVerdict.DIED)
    assert by_message(member(State.DRAINING), again) == ("i-d0", DeathVerdict.LIVES)
    assert by_message(member(), beat("d0", seq=2)) is None
    assert by_message(None, again) is None
    assert by_message(FleetMember(D0), again) is None, "nobody had been there"


def test_a_goodbye_says_that_it_ends_in_order() -> None:
    assert by_message(member(), bye("d0")) == ("i-d0", DeathVerdict.LIVES)
