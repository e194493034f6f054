"""Which groups of schedulers are found, which are made, and what is said where those that were asked for are not served."""

from __future__ import annotations

import pytest
from memory_api import MemoryApi

from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.gangs.gangs import LOOK_S, Gangs
from xpyd_operator.kube.settings import OperatorSettings
from xpyd_operator.render.gang import Gang

NOW = 1000.0
ALL = frozenset({"podgroups", "podgroups/status", "workloads"})
KUBERNETES, VOLCANO, COSCHEDULING = (
    "scheduling.k8s.io/v1beta1", "scheduling.volcano.sh/v1beta1", "scheduling.x-k8s.io/v1alpha1")
OLDER, OLDEST = "scheduling.k8s.io/v1alpha3", "scheduling.k8s.io/v1alpha2"


def make(choice: str, *served: str) -> tuple[Gangs, MemoryApi]:
    api = MemoryApi()
    api.resources = dict.fromkeys(served, ALL)
    return Gangs(api, OperatorSettings(sidecar_image="s:1", gang=choice)), api  # type: ignore[arg-type]


@pytest.mark.parametrize(("choice", "served", "found"), [
    ("auto", (), None),
    ("auto", (KUBERNETES, VOLCANO, COSCHEDULING), Gang("kubernetes", KUBERNETES)),
    ("auto", (VOLCANO, COSCHEDULING), None),  # their CRDs do not say that their scheduler places these pods
    ("auto", (OLDEST, OLDER), Gang("kubernetes", OLDER)),
    ("auto", (OLDEST,), Gang("kubernetes", OLDEST)),
    ("auto", ("scheduling.k8s.io/v1alpha1",), None),  # 1.35 has Workloads alone
    ("none", (KUBERNETES, VOLCANO, COSCHEDULING), None),
    ("kubernetes", (KUBERNETES, VOLCANO), Gang("kubernetes", KUBERNETES)),
    ("volcano", (KUBERNETES, VOLCANO), Gang("volcano", VOLCANO)),
    ("coscheduling", (KUBERNETES, COSCHEDULING), Gang("coscheduling", COSCHEDULING)),
])
async def test_what_is_made_follows_from_the_flag_and_from_what_is_served(
    choice: str, served: tuple[str, ...], found: Gang | None
) -> None:
    gangs, _ = make(choice, *served)
    await gangs.refresh(NOW)
    assert (gangs.chosen_gang, gangs.problem) == (found, "")


@pytest.mark.parametrize(("choice", "version", "needs"), [
    ("kubernetes", KUBERNETES, "feature gate GenericWorkload"), ("volcano", VOLCANO, "install Volcano"),
    ("coscheduling", COSCHEDULING, "Coscheduling and its CRDs")])
async def test_what_was_asked_for_and_is_not_served_is_said_with_what_to_do(choice: str, version: str, needs: str) -> None:
    gangs, api = make(choice)
    await gangs.refresh(NOW)
    assert gangs.chosen_gang is None
    assert gangs.problem.startswith(f"the operator was started with --gang {choice}, ")
    assert f"serves no podgroups of {version}" in gangs.problem
    assert needs in gangs.problem
    assert gangs.problem.endswith("or write --gang auto or none")
    api.resources = {version: ALL}
    await gangs.refresh(NOW + LOOK_S - 1)
    assert gangs.problem
    await gangs.refresh(NOW + LOOK_S)
    assert gangs.problem == ""
    assert gangs.chosen_gang is not None


async def test_a_group_of_that_name_without_podgroups_is_not_it() -> None:
    """Kubernetes had a v1beta1 of PriorityClasses before."""
    gangs, api = make("kubernetes", KUBERNETES)
    api.resources = {KUBERNETES: frozenset({"priorityclasses"})}
    await gangs.refresh(NOW)
    assert gangs.problem


async def test_while_the_api_server_does_not_say_what_was_known_holds() -> None:
    gangs, api = make("auto", KUBERNETES)
    api.fault = lambda verb, kind, name: ApiError(0, "Timeout", "no answer")
    with pytest.raises(ApiError):
        await gangs.refresh(NOW)
    api.fault = lambda verb, kind, name: None
    await gangs.refresh(NOW)
    found = gangs.chosen_gang
    assert found is not None
    api.fault = lambda verb, kind, name: ApiError(0, "Timeout", "no answer")
    await gangs.refresh(NOW + LOOK_S)
    assert gangs.chosen_gang == found
    assert (gangs.gang_of("kubernetes"), gangs.gang_of("volcano")) == (found, None)
