from __future__ import annotations

from random import Random

import pytest

from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.router.balance import policies


def test_the_policies_there_are() -> None:
    assert policies.names() == ["cost", "least_loaded", "random", "round_robin"]


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"router\.policy: 'fastest' .*cost, least_loaded, random, round_robin"):
        policies.make("fastest", {}, Random(1).random)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"router\.policy_options of random: .*speed"):
        policies.make("random", {"speed": 1}, Random(1).random)


@pytest.mark.parametrize(("policy", "options", "words"), [
    ("least_loaded", {"choices": 1}, r"`int` >= 2 - at `\$\.choices`"),
    ("least_loaded", {"choices": "2"}, r"Expected `int`, got `str` - at `\$\.choices`"),
    ("cost", {"bound": 1.5}, r"unknown field `bound`"),
])
def test_a_wrong_option_names_policy_and_field(policy: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"router\.policy_options of {policy}: .*{words}"):
        policies.make(policy, options, Random(1).random)
