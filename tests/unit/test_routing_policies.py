from __future__ import annotations

import pytest

from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.routing import policies


def test_every_file_of_the_folder_is_a_policy() -> None:
    assert policies.names() == ["least_loaded", "random", "round_robin"]


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"router\.policy: 'fastest' .*least_loaded, random, round_robin"):
        policies.make("fastest", {}, 1)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"router\.policy_options: .*speed"):
        policies.make("random", {"speed": 1}, 1)
