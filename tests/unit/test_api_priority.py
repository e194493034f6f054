"""Priorities of clients, within the band of their keys."""

from __future__ import annotations

import json
from typing import Any

import pytest

from xpyd_sidecar.router.api.bodies import passed_body, split
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.api.priority import OWN, PRIORITY, SHARED, PriorityBand, clamp_field, priority_of
from xpyd_sidecar.router.serving.profiles import Profiles


@pytest.mark.parametrize(("band", "asked", "counts"), [
    (OWN, -99, -8), (OWN, -8, -8), (OWN, 0, 0), (OWN, 8, 8), (OWN, 10**30, 8), (OWN, -(10**30), -8),
    (SHARED, -1, 0), (SHARED, -(10**30), 0), (SHARED, 3, 3), (SHARED, 99, 8),
])
def test_a_priority_counts_as_the_nearest_one_in_its_keys_band(band: PriorityBand, asked: int, counts: int) -> None:
    assert priority_of({PRIORITY: b"%d" % asked}, {}, band) == counts
    fields = split(json.dumps({"priority": asked}).encode())
    assert priority_of({}, fields, band) == counts
    assert clamp_field(fields, band) == (asked != counts)
    assert json.loads(bytes(fields["priority"])) == counts


def test_the_header_goes_before_the_field_and_nothing_is_nothing() -> None:
    assert priority_of({PRIORITY: b"-2"}, split(b'{"priority": 5}'), OWN) == -2
    assert priority_of({}, split(b'{"priority": null}'), OWN) == 0
    assert priority_of({}, {}, SHARED) == 0
    fields = split(b'{"priority": null}')
    assert not clamp_field(fields, SHARED)
    assert bytes(fields["priority"]) == b"null"


@pytest.mark.parametrize("value", ['"high"', "1.5", "true", '"5"', "[]", "{}"])
def test_what_is_no_whole_number_is_refused_on_every_path(value: str) -> None:
    body = b'{"prompt": "x", "priority": %b}' % value.encode()
    profiles = Profiles(goes_on=True, speaks=False)
    for read in (lambda: passed_body("/v1/embeddings", body), lambda: profiles.parse("chat", body)):
        with pytest.raises(HttpFault) as refused:
            read()
        assert (refused.value.status, refused.value.param) == (400, "priority")
    with pytest.raises(HttpFault, match="X-Vllm-Priority"):
        priority_of({PRIORITY: value.encode()}, {}, OWN)


@pytest.mark.parametrize("priority", [-99, -1, 0, 8, 9])
def test_the_body_that_engines_get_has_no_other(priority: int) -> None:
    """Whatever was remembered of requests that differ in their prompts alone."""
    said: dict[str, Any] = {"prompt": "x", "priority": priority}
    raw = json.dumps(said).encode()
    expected = max(0, min(8, priority))
    known = Profiles(goes_on=True, speaks=False)
    for _ in range(3):
        found, _profile = known.parse("completions", raw, SHARED)
        assert json.loads(bytes(found.fields["priority"])) == expected
    body = passed_body("/pooling", raw, SHARED).body
    assert json.loads(body)["priority"] == expected
    assert (body is raw) == (priority == expected), "it is the client's where nothing has to change"
