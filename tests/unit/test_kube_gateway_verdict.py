"""What is said of a route, from what gateways say of it."""

from __future__ import annotations

from typing import Any

import pytest

from xpyd_operator.kube.routes.gateway_verdict import verdict
from xpyd_operator.kube.routes.gateways import ABSENT, Name

Body = dict[str, Any]
HTTPS = {"name": "public", "namespace": "gateways", "sectionName": "https"}
INNER = {"name": "inner"}
RUNS = {"metadata": {"name": "public"}, "status": {"conditions": [{"type": "Programmed", "status": "True"}]}}


def said(type_: str, status: str = "True", reason: str = "", message: str = "", generation: int | None = 3) -> Body:
    return {"type": type_, "status": status, "reason": reason or type_, "message": message,
            "observedGeneration": generation}


GOOD = [said("Accepted"), said("ResolvedRefs")]


def parent(ref: Body, conditions: list[Body]) -> Body:
    return {"parentRef": {"group": "gateway.networking.k8s.io", "kind": "Gateway"} | ref, "controllerName": "a.b/c",
            "conditions": conditions}


def route(*parents: Body, refs: tuple[Body, ...] = (HTTPS,)) -> Body:
    return {"kind": "HTTPRoute", "metadata": {"name": "qwen", "generation": 3}, "spec": {"parentRefs": list(refs)},
            "status": {"parents": list(parents)}}


def judged(body: Body, gateways: dict[Name, Body] | None = None, **more: Body) -> tuple[str, str, str]:
    found = verdict("team-a", {"HTTPRoute": body} | more, (gateways or {}).get)
    assert found.type == "GatewayReady"
    return found.status, found.reason, found.message


def test_a_route_that_its_gateway_takes_and_runs() -> None:
    assert judged(route(parent(HTTPS, GOOD)), {("gateways", "public"): RUNS}) == (
        "True", "Accepted", "Gateway gateways/public (https): accepted, programmed")


def test_a_gateway_that_nobody_may_look_at_says_enough_by_the_route() -> None:
    assert judged(route(parent(HTTPS, GOOD))) == ("True", "Accepted", "Gateway gateways/public (https): accepted")


@pytest.mark.parametrize(("condition", "reason"), [
    (said("Accepted", "False", "NotAllowedByListeners", "no listener\nallows it"), "NotAccepted"),
    (said("ResolvedRefs", "False", "BackendNotFound", "no Service"), "RefsNotResolved"),
    (said("Programmed", "False", "Invalid", "of routes, some say it"), "NotProgrammed"),
])
def test_a_gateway_that_rejects_is_quoted(condition: Body, reason: str) -> None:
    others = [each for each in GOOD if each["type"] != condition["type"]]
    status, why, message = judged(route(parent(HTTPS, [*others, condition])), {("gateways", "public"): RUNS})
    assert (status, why) == ("False", reason)
    assert condition["reason"] in message
    assert " ".join(condition["message"].split()) in message


def test_a_gateway_that_does_not_run() -> None:
    down = {"metadata": {}, "status": {"conditions": [said("Programmed", "False", "AddressNotAssigned", "no address")]}}
    status, reason, message = judged(route(parent(HTTPS, GOOD)), {("gateways", "public"): down})
    assert (status, reason) == ("False", "NotProgrammed")
    assert "AddressNotAssigned: no address" in message


def test_a_gateway_that_does_not_exist() -> None:
    found = judged(route(parent(HTTPS, GOOD)), {("gateways", "public"): ABSENT})
    assert found == ("False", "NoParent", "Gateway gateways/public (https) does not exist")


@pytest.mark.parametrize("status", [
    {}, {"parents": []}, {"parents": None}, {"parents": "some"}, {"parents": [{"conditions": [{"type": 3}]}]}, None,
    {"parents": [parent(INNER, GOOD)]},
    {"parents": [parent(HTTPS | {"sectionName": "http"}, GOOD)]},
    {"parents": [parent(HTTPS | {"namespace": "team-a"}, GOOD)]},
    {"parents": [parent(HTTPS | {"kind": "Service", "group": ""}, GOOD)]},
    {"parents": [parent(HTTPS, [said("Accepted", generation=2)])]},
    {"parents": [parent(HTTPS, [said("ResolvedRefs")])]},
    {"parents": [parent(HTTPS, [said("Accepted", "Unknown", "Pending")])]},
], ids=str)
def test_who_says_nothing_of_this_very_route_has_not_taken_it(status: Body) -> None:
    found = judged(route() | {"status": status}, {("gateways", "public"): RUNS})
    assert found[:2] == ("Unknown", "NotTold")
    assert "a controller for its class" in found[2]


def test_an_old_rejection_is_not_believed() -> None:
    old = said("Accepted", "False", "NoMatchingParent", generation=2)
    assert judged(route(parent(HTTPS, [old])))[:2] == ("Unknown", "NotTold")


def test_who_does_not_say_of_which_generation_is_believed() -> None:
    assert judged(route(parent(HTTPS, [said("Accepted", generation=None)])))[0] == "True"


def test_one_of_two_gateways_that_rejects_comes_first_and_both_are_named() -> None:
    rejects = parent(INNER, [said("Accepted", "False", "NoMatchingListenerHostname")])
    status, reason, message = judged(route(parent(HTTPS, GOOD), rejects, refs=(HTTPS, INNER)))
    assert (status, reason) == ("False", "NotAccepted")
    assert message.index("Gateway team-a/inner") < message.index("Gateway gateways/public")


def test_one_of_two_controllers_that_rejects_is_heard() -> None:
    both = route(parent(HTTPS, GOOD), parent(HTTPS, [said("Accepted", "False", "UnsupportedValue", "no timeouts")]))
    assert judged(both)[:2] == ("False", "NotAccepted")


def test_a_pool_or_a_policy_that_is_refused_is_named() -> None:
    taken = route(parent(HTTPS, GOOD))
    bad = [said("ResolvedRefs", "False", "InvalidExtensionRef", "no picker epp")]
    pool = {"kind": "InferencePool", "metadata": {"name": "qwen", "generation": 3},
            "status": {"parents": [{"parentRef": HTTPS, "conditions": bad}]}}
    status, reason, message = judged(taken, InferencePool=pool)
    assert (status, reason) == ("False", "PoolNotAccepted")
    assert "InferencePool qwen: ResolvedRefs is False, InvalidExtensionRef: no picker epp" in message
    policy = {"kind": "BackendTLSPolicy", "metadata": {"name": "qwen", "generation": 3},
              "status": {"ancestors": [{"ancestorRef": HTTPS, "conditions": bad}]}}
    assert judged(taken, BackendTLSPolicy=policy)[:2] == ("False", "TLSNotAccepted")
    for one in (pool, policy):
        one["status"] = {}
        assert judged(taken, **{one["kind"]: one})[0] == "True", "not everybody says something of those"


def test_messages_are_bounded() -> None:
    refs = tuple({"name": f"gateway-{number}"} for number in range(8))
    loud = [parent(ref, [said("Accepted", "False", "R" * 1024, "long " * 6000)]) for ref in refs]
    assert len(judged(route(*loud, refs=refs))[2]) <= 1000


@pytest.mark.parametrize("other", [
    {"parentRef": HTTPS, "conditions": [{"type": 3, "status": "True"}]},
    {"parentRef": HTTPS, "conditions": "none"},
    parent(HTTPS, [said("Accepted") | {"observedGeneration": "3"}]),
    parent(HTTPS, [said("ResolvedRefs", "False") | {"message": ["a"]}]),
], ids=str)
def test_what_cannot_be_read_of_a_gateway_is_no_agreement(other: Body) -> None:
    status, reason, message = judged(route(parent(HTTPS, GOOD), other))
    assert (status, reason) == ("Unknown", "NotTold")
    assert "cannot be read" in message
    rejects = parent(HTTPS, [said("Accepted", "False", "NotAllowedByListeners")])
    assert judged(route(parent(HTTPS, GOOD), other, rejects))[:2] == ("False", "NotAccepted"), "others are still heard"


@pytest.mark.parametrize("stranger", [
    None, 3, "public", [], {}, {"parentRef": None}, {"parentRef": HTTPS | {"name": 3}}, {"parentRef": {"name": None}},
], ids=str)
def test_who_cannot_be_told_apart_hides_nothing_that_others_say(stranger: Any) -> None:
    assert judged(route(stranger, parent(HTTPS, GOOD), stranger))[0] == "True"


def test_a_gateway_among_hundreds_is_found_and_one_rejection_too() -> None:
    others = [parent({"name": f"other-{number}"}, [said("Accepted", "False", "No")]) for number in range(700)]
    assert judged(route(*others, parent(HTTPS, GOOD)))[0] == "True"
    assert judged(route(*others, parent(HTTPS, GOOD), parent(HTTPS, [said("Accepted", "False")])))[0] == "False"


@pytest.mark.parametrize(("conditions", "reason"), [
    ([said("Accepted"), said("ResolvedRefs", "Unknown", "Pending")], "RefsNotResolved"),
    ([said("Accepted"), said("ResolvedRefs", "maybe")], "RefsNotResolved"),
    ([said("Accepted"), said("Accepted", "Unknown", "Pending")], "NotAccepted"),
])
def test_what_is_not_decided_is_not_taken_for_yes(conditions: list[Body], reason: str) -> None:
    assert judged(route(parent(HTTPS, conditions)))[:2] == ("Unknown", reason)


def test_a_gateway_that_waits_for_its_controller_is_not_known_to_run() -> None:
    """As its CRD fills the status in until somebody comes."""
    waits = [said("Programmed", "Unknown", "Pending", "Waiting for controller", generation=None)]
    pending = {"metadata": {}, "status": {"conditions": waits}}
    found = judged(route(parent(HTTPS, GOOD)), {("gateways", "public"): pending})
    assert found[:2] == ("Unknown", "NotProgrammed")
    assert "Pending: Waiting for controller" in found[2]


@pytest.mark.parametrize("status", [
    None, 3, "up", [], {"conditions": None}, {"conditions": 3}, {"conditions": [None, {"type": "Programmed"}]},
    {"conditions": [said("Programmed", "False", "Invalid", generation=3)]},
], ids=str)
def test_what_a_gateway_said_of_itself_before_or_in_no_words_we_know_is_not_believed(status: Any) -> None:
    body = {"metadata": {"generation": 4}, "status": status}
    found = judged(route(parent(HTTPS, GOOD)), {("gateways", "public"): body})
    assert found == ("True", "Accepted", "Gateway gateways/public (https): accepted")


@pytest.mark.parametrize("status", [None, "bad", {"parents": 3}, {"parents": [None, {"conditions": [3]}]}], ids=str)
def test_a_pool_whose_status_cannot_be_read_says_nothing(status: Any) -> None:
    pool = {"kind": "InferencePool", "metadata": {"name": "qwen", "generation": 3}, "status": status}
    assert judged(route(parent(HTTPS, GOOD)), InferencePool=pool)[0] == "True"


def test_words_of_others_move_no_cursor_and_leave_room_for_the_next() -> None:
    loud = said("Accepted", "False", "\x1b[2J" + "R" * 5000, "\x1b]0;owned\x07" + "long " * 900)
    message = judged(route(parent(HTTPS, [loud]), parent(INNER, [said("Accepted", "False", "Second")]),
                           refs=(HTTPS, INNER)))[2]
    assert message.isprintable()
    assert "Second" in message
