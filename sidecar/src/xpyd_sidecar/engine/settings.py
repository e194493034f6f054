"""What the connector is told at start: ``kv_connector_extra_config["xpyd"]`` and the environment, checked once."""

from __future__ import annotations

import ipaddress
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from xpyd_sidecar.contract import keys, launch
from xpyd_sidecar.contract.group import ENV_LIFE
from xpyd_sidecar.contract.ids import InstanceName, split_host_port
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.errors import ConfigError

FIELD: Final = 'kv_connector_extra_config["xpyd"]'
"""What the settings are called in messages."""


class ConnectorSettings(NamedTuple):
    """Everything that can be set."""

    options: KvOptions
    instance: InstanceName
    host: str
    """An IP address: where peers reach this engine."""
    key: ServiceKey
    run_dir: Path | None
    life: str = ""
    """Of a group's engines (``contract.group``); empty where it is no member of one."""


def read(extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> ConnectorSettings:
    """Read and check all settings.

    Raises:
        ConfigError: names the field or the variable, and what would be right.
    """
    try:
        options = msgspec.convert(extra.get("xpyd", {}), KvOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{FIELD}: {error}") from None
    _check(options)
    host = environ.get(launch.ENV_HOST, "")
    _address(host, launch.ENV_HOST)
    path = environ.get(launch.ENV_KEY_FILE)
    if not path:
        raise ConfigError(f"{launch.ENV_KEY_FILE} is not set: it names the file with the service key")
    try:
        key = keys.read(Path(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{launch.ENV_KEY_FILE}: {error}") from None
    if environ.get(launch.ENV_API_KEY):
        raise ConfigError(f"{launch.ENV_API_KEY} is set, and no router would be answered: take it out of the container's "
                          "environment (the template's envFrom, the image) and write spec.router.apiKeySecret")
    run_dir = environ.get(launch.ENV_RUN_DIR)
    if run_dir and not Path(run_dir).is_dir():
        raise ConfigError(f"{launch.ENV_RUN_DIR}: {run_dir} is no folder")
    return ConnectorSettings(options, InstanceName(environ.get(launch.ENV_INSTANCE, "")), host, key,
                             Path(run_dir) if run_dir else None, environ.get(ENV_LIFE, ""))


def _check(options: KvOptions) -> None:
    for name, number, top in (("nccl_groups", options.nccl_groups, 1024), ("nccl_ctas", options.nccl_ctas, 32)):
        if not 1 <= number <= top:
            raise ConfigError(f"{FIELD}.{name}: {number} must be at least 1 and at most {top}")
    if options.shared_folder and not Path(options.shared_folder).is_dir():
        raise ConfigError(f"{FIELD}.shared_folder: {options.shared_folder} is no folder")
    if options.buffer_bytes is not None and options.buffer_share is not None:
        raise ConfigError(f"{FIELD}.buffer_share: give it or buffer_bytes, not both")
    for name, value, most in (("buffer_bytes", options.buffer_bytes, math.inf), ("buffer_share", options.buffer_share, 1),
                              ("host_pool_bytes", options.host_pool_bytes, math.inf)):
        if value is not None and not 0 <= value <= most:
            raise ConfigError(f"{FIELD}.{name}: {value} must be at least 0 and at most {most}")
    for name in ("keep_bytes", "claim_s", "keep_ttl_s", "load_timeout_s", "load_limit_s", "peer_timeout_s", "put_wait_s",
                 "window_bytes"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{FIELD}.{name}: {value} must be above 0")
    for name in ("control_port", "data_port"):
        if not 0 <= getattr(options, name) < 65536:
            raise ConfigError(f"{FIELD}.{name}: {getattr(options, name)} is no port (0 lets the kernel choose)")
    if options.advertise_data is not None:
        try:
            host, _ = split_host_port(options.advertise_data)
        except ValueError as error:
            raise ConfigError(f"{FIELD}.advertise_data: {error}") from None
        _address(host, f"{FIELD}.advertise_data")


def _address(host: str, field: str) -> None:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"{field}: {host!r} is not an IP address") from None
