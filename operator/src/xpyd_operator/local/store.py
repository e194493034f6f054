"""What is written down about a service: the document, the settings of this host, one record per instance.

Facts only (what was asked for, what was started where); what an instance is doing is always looked up afresh.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import yaml

from xpyd_operator.api.decode import decode_service, examine
from xpyd_operator.api.load import documents
from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService
from xpyd_operator.errors import LocalError
from xpyd_operator.local.paths import ServiceFolder, choose_run_dir
from xpyd_operator.plan.desired import Revision
from xpyd_operator.render.defaults import without_defaults
from xpyd_operator.render.process import Process
from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.contract.launch import SidecarConfig

T = TypeVar("T")


class Settings(msgspec.Struct, frozen=True):
    """How this host runs the service."""

    host: str
    """Address of engines and agents, and at which the router is reached."""
    listen: str
    """Address on which the router listens."""
    run_dir: str
    python: str
    """Interpreter of engines and sidecars."""


class MemberRecord(msgspec.Struct, frozen=True):
    """A member of an instance: its engine, the port that is kept for its server, its devices."""

    process: Process
    port: int
    devices: tuple[int, ...] = ()


class InstanceRecord(msgspec.Struct, frozen=True):
    """What an instance was made from."""

    name: InstanceName
    ordinal: int
    role: Role
    revision: Revision
    process: Process
    port: int
    devices: tuple[int, ...] = ()
    epoch: int = 1
    """Of the role; grows by one with each change."""
    assigned: float = 0.0
    """When the role was changed last, unix seconds."""
    followers: tuple[MemberRecord, ...] = ()
    """Its members but for the leader, which is what stands above."""
    meeting: int = 0
    """Port of the leader's agent, where the others come to; 0: there are none."""

    def member(self, index: int) -> MemberRecord:
        """One of its members, the leader included."""
        return MemberRecord(self.process, self.port, self.devices) if index == 0 else self.followers[index - 1]

    def with_port(self, index: int, port: int) -> InstanceRecord:
        """The record with another port of the server of one member."""
        if index == 0:
            return msgspec.structs.replace(self, port=port)
        one = msgspec.structs.replace(self.followers[index - 1], port=port)
        return msgspec.structs.replace(self, followers=(*self.followers[:index - 1], one, *self.followers[index:]))

    @property
    def ports(self) -> tuple[int, ...]:
        """All that it has."""
        return (self.port, *(one.port for one in self.followers), *((self.meeting,) if self.meeting else ()))

    @property
    def all_devices(self) -> tuple[int, ...]:
        """Of all members."""
        return (*self.devices, *(index for one in self.followers for index in one.devices))


class PlannedCounts(msgspec.Struct, frozen=True):
    """What the planner decided last."""

    prefill: int
    decode: int
    sentence: str


class StopRequest(msgspec.Struct, frozen=True):
    """The service is to end."""

    now: bool = False
    """Without draining."""


def settings_for(folder: ServiceFolder, host: str, python: str | None = None) -> Settings:
    """New settings. All interfaces for clients (``0.0.0.0``, ``::``) means: engines stay on this host."""
    anywhere = host in ("0.0.0.0", "::")
    local = "127.0.0.1"
    return Settings(local if anywhere else host, host, str(choose_run_dir(folder.path)), python or sys.executable)


def save_desired(folder: ServiceFolder, service: DisaggService) -> None:
    """Hand a document to the supervisor (which looks at the time of the file)."""
    text = yaml.safe_dump(without_defaults(service), sort_keys=False, allow_unicode=True)
    _replace(folder.desired, text.encode())


def load_desired(folder: ServiceFolder) -> DisaggService:
    """The document as it was handed over. It was judged then: what a later version has against it stops nothing that runs.

    Raises:
        SpecError: it has not its form (somebody edited it).
        LocalError: it cannot be read.
    """
    try:
        text = folder.desired.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LocalError(f"cannot read {folder.desired}: {error}") from None
    value = documents(text)[0].value
    seen = examine(value, strict=False, target=Target.LOCAL)
    if seen.service is None or seen.warnings:
        return decode_service(value, target=Target.LOCAL).service
    return seen.service


def save(path: Path, value: msgspec.Struct) -> None:
    """Write a struct as JSON, atomically."""
    _replace(path, msgspec.json.format(msgspec.json.encode(value), indent=2))


_GONE: Final = re.compile(r"Object contains unknown field `([^`]+)`(?: - at `\$((?:\.\w+)*)`)?")


def load(path: Path, kind: type[T]) -> T | None:
    """Read a struct; None where there is none.

    Raises:
        LocalError: the file is damaged.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LocalError(f"{path} is damaged: {error}") from None


def load_config(path: Path) -> SidecarConfig | None:
    """What a sidecar was started with, perhaps by a release of before: settings that are gone are left out. None where
    there is none.

    Raises:
        LocalError: the file is damaged.
    """
    value = load(path, dict)
    while value is not None:
        try:
            return msgspec.convert(value, SidecarConfig)
        except msgspec.ValidationError as error:
            gone = _GONE.fullmatch(str(error))
            if gone is None:
                raise LocalError(f"{path} is damaged: {error}") from None
            section = value
            for name in filter(None, (gone[2] or "").split(".")):
                section = section[name]
            del section[gone[1]]
    return None


def load_settings(folder: ServiceFolder) -> Settings:
    """The settings of a service that was started at least once.

    Raises:
        LocalError: there are none, or they are damaged.
    """
    found = load(folder.settings, Settings)
    if found is None:
        raise LocalError(f"{folder.settings} is missing; start the service with `xpyd up`")
    return found


def service_key(folder: ServiceFolder) -> keys.ServiceKey:
    """The key of the service, minted at its first start.

    Raises:
        LocalError: the file is damaged or cannot be used.
    """
    try:
        if not folder.key.exists():
            keys.write(folder.key, keys.mint())
        return keys.read(folder.key)
    except (OSError, ValueError) as error:
        raise LocalError(f"service key: {error}") from None


def _replace(path: Path, raw: bytes) -> None:
    temporary = path.with_suffix(f"{path.suffix}.{os.getpid()}")
    with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(raw)
    os.replace(temporary, path)
