"""LoRA adapters: which ones an engine is to have, as the operator tells its agent, and which ones it has.

    operator ──POST /adapters, a signed call──▶ agent ──adapters.json──▶ the engine's API server (``adapter_serving``)
    operator ◀──/fleet── routers ◀──beats────── agent ◀──adapters-state.json──┘

An order is the whole list: what is not in it is unloaded. It is known by its digest, so that a state says of
which one it is. The agent keeps it in its run folder; neither its restart nor the engine's asks the operator anew.

An adapter whose files were looked at is loaded by the path ``<run dir>/adapters/<SHA-256 of its files>``, a link to where
they are. So KV that was computed with it, in a prefix cache or on its way from prefill to decode, is known by what the
files are, not by where a pod keeps them (``digest_in``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

import msgspec

from xpyd_sidecar.contract import run_folder

FILE: Final = "adapters.json"
STATE: Final = "adapters-state.json"
PATH: Final = "/adapters"
"""Of the agent's endpoint."""
LINKS: Final = "adapters"
"""Folder in the run folder."""
MOST: Final = 1024
"""Adapters of one service."""
NAMES_BYTES: Final = 32 << 10
"""Of their names together: beats tell them, and may have 64 KiB."""
MOST_BYTES: Final = 1 << 20
"""Of an order."""
MOST_RECENT: Final = 256
"""Adapters used last that are told of,"""
RECENT_BYTES: Final = 8 << 10
"""and bytes of their names."""
MOST_PROBLEMS: Final = 8
"""That a beat tells of; the first by name."""
REASON_BYTES: Final = 300
NAME_PATTERN: Final = r"^[A-Za-z0-9][-A-Za-z0-9_.:/]*$"
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=NAME_PATTERN)]
Digest = Annotated[str, msgspec.Meta(max_length=64)]
_LINK: Final = re.compile(rf"/{LINKS}/([0-9a-f]{{64}})$")


class Adapter(msgspec.Struct, frozen=True, order=True):
    """One adapter."""

    name: Name
    """That clients ask for as a model."""
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    """An absolute path where the engine runs, or a hub id."""
    revision: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Of a hub id; empty: what the hub has by default."""


class AdapterOrder(msgspec.Struct, frozen=True):
    """All that an engine is to have, by name. Fields that are not known are ignored."""

    adapters: Annotated[tuple[Adapter, ...], msgspec.Meta(max_length=MOST)] = ()

    @property
    def digest(self) -> str:
        """16 hexadecimal digits, the same for equal lists."""
        return hashlib.sha256(msgspec.json.encode(self.adapters)).hexdigest()[:16]


class AdapterProblem(msgspec.Struct, frozen=True):
    """Why an adapter is not there."""

    name: Annotated[str, msgspec.Meta(max_length=128)]
    reason: Annotated[str, msgspec.Meta(max_length=REASON_BYTES)]


class AdapterState(msgspec.Struct, frozen=True):
    """What the API server of an engine has of its order; it writes it anew before it takes requests. Fields that are not
    known are ignored.
    """

    order: Digest = ""
    """Which order it follows; empty: it knows of none."""
    loaded: tuple[str, ...] = ()
    """Names of its adapters, sorted, those of ``--lora-modules`` included."""
    problems: tuple[AdapterProblem, ...] = ()
    """Of those that could not be loaded, by name."""
    slots: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Adapters that a batch of the engine may have (``--max-loras``); 0: not known."""
    recent: tuple[str, ...] = ()
    """Those that were asked for last, the latest last, as many as it has slots and ``MOST_RECENT`` at most."""


class AdapterReport(msgspec.Struct, frozen=True):
    """What a beat tells of adapters."""

    order: Digest = ""
    """Which one the agent was told last; empty: none."""
    waiting: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Adapters of it that are not loaded yet, those with a problem included."""
    problems: Annotated[tuple[AdapterProblem, ...], msgspec.Meta(max_length=MOST_PROBLEMS)] = ()
    """The first of them, by name."""
    slots: Annotated[int, msgspec.Meta(ge=0)] = 0
    """As ``AdapterState.slots``."""


def order_of(adapters: tuple[Adapter, ...]) -> AdapterOrder:
    """An order of these.

    Raises:
        ValueError: a name stands there twice, or there is too much of them.
    """
    found = tuple(sorted(adapters))
    names = [each.name for each in found]
    if twice := next((name for name, other in pairwise(names) if name == other), ""):
        raise ValueError(f"adapter {twice!r} stands there twice")
    if len(found) > MOST:
        raise ValueError(f"{len(found)} adapters, at most {MOST}")
    if (size := sum(map(len, names))) > NAMES_BYTES:
        raise ValueError(f"the names of adapters have {size} bytes together, at most {NAMES_BYTES}")
    return AdapterOrder(found)


def latest(names: Sequence[str]) -> tuple[str, ...]:
    """The last of these, as many as a beat tells of."""
    found: list[str] = []
    size = 0
    for name in reversed(names[-MOST_RECENT:]):
        size += len(name.encode())
        if size > RECENT_BYTES:
            break
        found.append(name)
    return tuple(reversed(found))


def encode(order: AdapterOrder) -> bytes:
    """The body of a call."""
    return msgspec.json.encode(order)


def decode(raw: bytes) -> AdapterOrder:
    """An order from the body of a call.

    Raises:
        ValueError: it is none; the message names the field.
    """
    try:
        return order_of(msgspec.json.decode(raw, type=AdapterOrder).adapters)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not an order of adapters: {error}") from None


def write_order(run_dir: Path, order: AdapterOrder) -> None:
    """Write an order, so that it is there whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    run_folder.write(run_dir / FILE, order)


def read_order(run_dir: Path) -> AdapterOrder | None:
    """The order that was told last; None where none was.

    Raises:
        ValueError: what stands there is none; names the file and the field.
        OSError: it cannot be read.
    """
    return run_folder.read(run_dir / FILE, AdapterOrder)


def write_state(run_dir: Path, state: AdapterState) -> None:
    """Write what the API server has.

    Raises:
        OSError: it cannot be written.
    """
    run_folder.write(run_dir / STATE, state)


def read_state(run_dir: Path) -> AdapterState | None:
    """What the API server has; None where it has not said anything.

    Raises:
        ValueError: what stands there is none; names the file and the field.
        OSError: it cannot be read.
    """
    return run_folder.read(run_dir / STATE, AdapterState)


def report(order: AdapterOrder | None, state: AdapterState | None) -> AdapterReport | None:
    """What a beat tells; None where there is nothing to tell of adapters."""
    if order is None and state is None:
        return None
    state = state or AdapterState()
    if order is None:
        return AdapterReport(slots=state.slots)
    names, digest = {each.name for each in order.adapters}, order.digest
    # A state of another order may know another adapter by the same name.
    follows = state.order == digest
    there = names & set(state.loaded) if follows else set()
    problems = tuple(each for each in state.problems if each.name in names) if follows else ()
    return AdapterReport(digest, len(names - there), problems[:MOST_PROBLEMS], state.slots)


def follows(heard: str, order: AdapterOrder) -> bool:
    """Whether who was told the order of digest ``heard`` last (empty: none) need not be told this one."""
    return heard == order.digest or not (heard or order.adapters)


def link_of(run_dir: Path, digest: str) -> Path:
    """The path by which an engine knows files with this digest (64 hexadecimal digits)."""
    return run_dir / LINKS / digest


def digest_in(path: str) -> str | None:
    """The digest of an adapter's files in the path that it was loaded by; None where the path tells none."""
    found = _LINK.search(path)
    return None if found is None else found[1]
