"""What the environment says about the queue under vLLM's executor, checked once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from xpyd_sidecar.contract import keys, launch
from xpyd_sidecar.contract.group import ENV_LIFE
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.errors import ConfigError

WORDS: Final = ("vllm", "xpyd")


class QueueSettings(NamedTuple):
    """Everything that can be set."""

    key: ServiceKey | None = None
    """Of this life where the engine is one of several members, else the service's; None: nobody elsewhere can join."""
    host: str = ""
    """Where workers elsewhere reach this process; empty: where vLLM says."""
    life: str = ""
    """Of a group's engines; empty where the engine is no member of one."""


def read(environ: Mapping[str, str] = os.environ) -> QueueSettings | None:
    """The settings; None where vLLM's queue stays.

    Raises:
        ConfigError: names the variable, and what would be right.
    """
    word = environ.get(launch.ENV_QUEUE, "vllm")
    if word not in WORDS:
        raise ConfigError(f"{launch.ENV_QUEUE}: {word!r} is none of {', '.join(WORDS)}")
    if word == "vllm":
        return None
    life = environ.get(ENV_LIFE, "")
    return QueueSettings(_key(environ, life), environ.get(launch.ENV_HOST, ""), life)


def _key(environ: Mapping[str, str], life: str) -> ServiceKey | None:
    path = environ.get(launch.ENV_KEY_FILE)
    if not path:
        if life:
            raise ConfigError(f"{launch.ENV_KEY_FILE} is not set: it names the file with the service key, without which "
                              "members of a group cannot join each other's queues")
        return None
    try:
        key = keys.read(Path(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{launch.ENV_KEY_FILE}: {error}") from None
    return keys.of_life(key, life) if life else key
