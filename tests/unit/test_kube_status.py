"""``Stalled`` is there while a document cannot take effect by itself, with the words of what holds it up."""

from __future__ import annotations

from xpyd_operator.api.status import Condition
from xpyd_operator.kube.status import stalled

VALID = Condition(type="Valid", status="True", reason="Valid", message="the document is followed")
READY = Condition(type="Ready", status="True", reason="AllReady", message="1P1D ready")
MOVES = Condition(type="Progressing", status="True", reason="Changing", message="changing: qwen-e1")
STUCK = Condition(type="Progressing", status="False", reason="Stuck", message="in trouble: qwen-e1")
REFUSED = Condition(type="Valid", status="False", reason="Invalid", message="spec.decode: …")


def test_it_is_not_there_while_things_move() -> None:
    assert stalled((READY, MOVES), VALID) == ()
    assert stalled((), Condition(type="Valid", status="Unknown", reason="NotReached")) == ()


def test_a_refused_document_stalls_although_the_last_one_serves() -> None:
    said, = stalled((READY, MOVES), REFUSED)
    assert (said.type, said.status, said.reason, said.message) == ("Stalled", "True", "Invalid", "spec.decode: …")


def test_what_waits_for_a_person_stalls() -> None:
    said, = stalled((READY, STUCK), VALID)
    assert (said.status, said.reason, said.message) == ("True", "Stuck", "in trouble: qwen-e1")
