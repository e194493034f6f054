"""What a request asks its engines, and what is reserved for that."""

from __future__ import annotations

import json

import pytest

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, Role, TransferId
from xpyd_sidecar.router.api import bodies
from xpyd_sidecar.router.api.failover_modes import EXACT_ALONE
from xpyd_sidecar.router.serving.generation import Generation
from xpyd_sidecar.router.serving.profiles import Profiles

PEER = legs.Peer(InstanceName("d"), Incarnation("i"), HostPort("h:1"))
PARAMS = {Role.PREFILL: legs.Leg(1, Role.PREFILL, TransferId("ab" * 16), Attempt(1), 60.0, PEER),
          Role.DECODE: legs.Leg(1, Role.DECODE, TransferId("ab" * 16), Attempt(1), 60.0, None)}
SMALL = 1024
"""Bytes of parameters and forced fields, of both bodies together."""
LONG = "v" * 100_000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", [
    {"prompt": LONG}, {"user": LONG}, {"metadata": {"a": LONG}}, {"tools": [{"type": "function", "name": LONG}]}, {LONG: 1},
    {"new": LONG}])
def test_whatever_field_is_long_both_engines_bodies_are_within_what_is_reserved(
        field: dict[str, object], *, stream: bool) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": stream, **field}).encode()
    request, profile = Profiles(goes_on=True, speaks=False).parse("completions", body)
    asks = Generation(request, profile, lambda: EXACT_ALONE)
    sent = sum(len(bodies.body_of(request, role, params)) for role, params in PARAMS.items())
    assert sent >= 2 * len(LONG)
    assert sent <= asks.reserves(len(body)) + SMALL
