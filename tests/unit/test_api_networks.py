"""Networks of proxies, as a document writes them: what the API takes, the router takes too."""

from __future__ import annotations

import ipaddress
import random
import re

import pytest

from xpyd_operator.api.base import NETWORK_PATTERN

pattern = re.compile(NETWORK_PATTERN.replace("$", r"\Z"))


@pytest.mark.parametrize("network", [
    "10.0.0.0/8", "192.0.2.7/32", "0.0.0.0/0", "fd00::/8", "fd00::5/128", "2001:db8::1:2/64", "::1/128",
    "2001:db8:1:2:3:4:5:6/128", "1:2:3:4:5:6:7::/112"])
def test_a_network_or_one_proxy_of_either_family_can_be_named(network: str) -> None:
    assert pattern.match(network)
    ipaddress.ip_network(network, strict=False)


@pytest.mark.parametrize("network", [
    "10.0.0.0", "10.0.0/8", "10.0.0.256/32", "10.0.0.0/33", "fd00::5", "fd00::/129", "1:2:3:4:5:6:7:8:9/64", "1::2::3/64",
    "1:2:3:4:5:6:7:8::/64", "g::/8", "a name"])
def test_what_is_no_network_is_refused(network: str) -> None:
    assert not pattern.match(network)


def test_whatever_is_taken_is_a_network() -> None:
    draw, taken = random.Random(4), 0
    for _ in range(20_000):
        groups = [draw.choice(["", "1", "ab", "fd00"]) for _ in range(draw.randrange(1, 10))]
        network = f"{':'.join(groups)}/{draw.choice([0, 64, 128])}"
        if pattern.match(network):
            taken += 1
            ipaddress.ip_network(network, strict=False)
    assert taken > 500
