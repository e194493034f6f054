"""What the environment says about step sync, checked once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from xpyd_sidecar.contract import launch
from xpyd_sidecar.dp.look_ahead import LookAhead
from xpyd_sidecar.errors import ConfigError

Mode = Literal["auto", "rpc", "shm"]
MODES: Final[dict[str, Mode | None]] = {"auto": "auto", "rpc": "rpc", "shm": "shm", "disabled": None}
TIMEOUT_S: Final = 20.0
TIMEOUT_LEAST_S: Final = 1.0
FIXED_MOST: Final = 1024


class StepSyncSettings(NamedTuple):
    """Everything that can be set."""

    mode: Mode
    """auto: shm where all ranks are on one host, else rpc; vLLM's own waves where the rules cannot be used."""
    policy: LookAhead = LookAhead()
    timeout_s: float = TIMEOUT_S
    """Silence after which a peer counts as dead."""


def read(environ: Mapping[str, str] = os.environ) -> StepSyncSettings | None:
    """The settings; None where step sync is disabled.

    Raises:
        ConfigError: names the variable, and what would be right.
    """
    given = environ.get(launch.ENV_DP_SYNC, "disabled")
    if given not in MODES:
        raise ConfigError(f"{launch.ENV_DP_SYNC}: {given!r} is none of {', '.join(MODES)}")
    mode = MODES[given]
    if mode is None:
        return None
    return StepSyncSettings(mode, LookAhead(_look_ahead(environ)), _timeout(environ))


def _look_ahead(environ: Mapping[str, str]) -> int | None:
    given = environ.get(launch.ENV_DP_LOOKAHEAD, "adaptive")
    if given == "adaptive":
        return None
    if not given.isascii() or not given.isdigit() or int(given) > FIXED_MOST:
        raise ConfigError(f"{launch.ENV_DP_LOOKAHEAD}: {given!r} is neither adaptive nor a number up to {FIXED_MOST}")
    return int(given)


def _timeout(environ: Mapping[str, str]) -> float:
    given = environ.get(launch.ENV_DP_TIMEOUT_S, str(TIMEOUT_S))
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not TIMEOUT_LEAST_S <= seconds < float("inf"):
        raise ConfigError(f"{launch.ENV_DP_TIMEOUT_S}: {given!r} is no number of seconds from {TIMEOUT_LEAST_S:g}")
    return seconds
