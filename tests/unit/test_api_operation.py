"""``spec.rollout``: counts as numbers and as shares, rounded as Deployments of Kubernetes round them."""

from __future__ import annotations

import msgspec
import pytest
from api_documents import document

from xpyd_operator.api.decode import decode_service
from xpyd_operator.api.operation import Rollout
from xpyd_operator.errors import SpecError


@pytest.mark.parametrize(
    ("surge", "unavailable", "wanted", "bounds"),
    [
        (1, 0, 3, (1, 0)),
        (1000, 0, 3, (1000, 0)),
        ("10%", 0, 96, (10, 0)),
        ("10%", 0, 144, (15, 0)),
        ("25%", "25%", 10, (3, 2)),
        ("1%", 0, 3, (1, 0)),
        ("250%", 0, 2, (5, 0)),
        (0, "100%", 7, (0, 7)),
        ("0%", 1, 7, (0, 1)),
        (1, "30%", 3, (1, 0)),
        (0, "30%", 3, (0, 1)),
        ("0%", "49%", 2, (0, 1)),
        ("10%", "10%", 0, (0, 1)),
        ("10%", "10%", 1, (1, 0)),
    ],
)
def test_a_surge_is_rounded_up_and_what_may_be_missing_down(
    surge: int | str, unavailable: int | str, wanted: int, bounds: tuple[int, int]
) -> None:
    """Both of no instance: one may be missing, or nothing could ever be replaced."""
    rollout = Rollout(max_surge=surge, max_unavailable=unavailable)
    assert (rollout.surge(wanted), rollout.unavailable(wanted)) == bounds


@pytest.mark.parametrize("surge", [0, 1, 7, "0%", "1%", "33%", "100%", "999%"])
@pytest.mark.parametrize("unavailable", [0, 1, 7, "0%", "1%", "33%", "100%"])
def test_something_can_always_be_replaced(surge: int | str, unavailable: int | str) -> None:
    rollout = Rollout(max_surge=surge, max_unavailable=unavailable)
    assert all(rollout.surge(wanted) + rollout.unavailable(wanted) >= 1 for wanted in range(200))


@pytest.mark.parametrize("given", [{"maxSurge": "10%"}, {"maxSurge": "0%", "maxUnavailable": "100%"}, {"maxSurge": "999%"}])
def test_shares_are_read_and_written_as_they_are(given: dict[str, str]) -> None:
    rollout = decode_service(document(rollout=given)).service.spec.rollout
    written = msgspec.to_builtins(rollout)
    assert {name: written[name] for name in given} == given


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"maxSurge": "10"}, "a share of those wanted, from 0% to 999%"),
        ({"maxSurge": "1000%"}, "at most 4 are allowed"),
        ({"maxSurge": "010%"}, "from 0% to 999%"),
        ({"maxSurge": "1.5%"}, "from 0% to 999%"),
        ({"maxSurge": "-1%"}, "from 0% to 999%"),
        ({"maxSurge": 1001}, "must be from 0 to 1000"),
        ({"maxSurge": 0.5}, "must be a whole number or text"),
        ({"maxUnavailable": "101%"}, "from 0% to 100%"),
        ({"maxSurge": "0%"}, "must be at least 1 when maxSurge is 0"),
        ({"maxSurge": 0, "maxUnavailable": "0%"}, "must be at least 1 when maxSurge is 0"),
    ],
    ids=str,
)
def test_what_is_no_count_is_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        decode_service(document(rollout=given))
    assert words in str(caught.value)
    assert "spec.rollout.max" in str(caught.value)
