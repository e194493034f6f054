"""What is said of a service as a whole, and of one for which nothing can be planned."""

from __future__ import annotations

import pytest

from xpyd_operator.api.status import Condition, ServiceStatus
from xpyd_operator.errors import XpydError
from xpyd_operator.kube.master import KeyTrouble
from xpyd_operator.kube.troubles import keyless, refused, troubles

GOOD = Condition(type="Valid", status="True", reason="Valid")
BAD = Condition(type="Valid", status="False", reason="Invalid", message="spec.x: wrong")
READY = Condition(type="Ready", status="True", reason="AllReady")
LOST = KeyTrouble("MasterLost", "it is gone")


def said(status: ServiceStatus | None) -> dict[str, tuple[str, str]]:
    assert status is not None
    return {each.type: (each.status, each.reason) for each in status.conditions}


def test_everything_that_is_wrong_is_named() -> None:
    assert troubles([], GOOD, None) == ()
    taken, *others = [(each.reason, each.message) for each in troubles(["Service qwen"], BAD, LOST)]
    assert taken == ("NameTaken", "Service qwen is somebody else's; rename or delete it, since this service needs the name")
    assert others == [("Invalid", "spec.x: wrong"), ("MasterLost", "it is gone")]


def test_a_service_without_a_key_stays_as_ready_as_it_was() -> None:
    before = ServiceStatus(conditions=(READY, GOOD, Condition(type="Degraded", status="False", reason="Healthy")))
    assert said(keyless(before, LOST)) == {"Ready": ("True", "AllReady"), "Valid": ("True", "Valid"),
                                           "Degraded": ("True", "MasterLost"), "Stalled": ("True", "MasterLost")}
    assert said(keyless(ServiceStatus(), LOST))["Ready"] == ("False", "MasterLost")


@pytest.mark.parametrize(("before", "ready"), [((), ("False", "Invalid")), ((READY,), ("True", "AllReady"))])
def test_a_refused_document_takes_nothing_from_what_runs(before: tuple[Condition, ...], ready: tuple[str, str]) -> None:
    found = said(refused(ServiceStatus(conditions=before), BAD, XpydError("x")))
    assert found == {"Ready": ready, "Valid": ("False", "Invalid"), "Stalled": ("True", "Invalid")}


def test_what_cannot_be_told_at_present_is_said_only_where_nothing_was() -> None:
    unknown = Condition(type="Valid", status="Unknown", reason="NotSeen")
    assert refused(ServiceStatus(conditions=(GOOD,)), unknown, XpydError("away")) is None
    assert said(refused(ServiceStatus(), unknown, XpydError("away")))["Valid"] == ("Unknown", "NotReached")
