"""Policies: which instance of several equal ones gets the next leg.

Belongs here: one module per policy, and nothing else. A module defines one class, named in ``@register("name")``; every
module of this folder is loaded, so a new policy is a new file (and its test). A policy sees a query and returns an index;
it may keep state of its own, gets its randomness as a seed, and never changes a member.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.errors import ConfigError
from xpyd_sidecar.router.api.prompt import PromptPrefix
from xpyd_sidecar.router.balance.prefix_index import Holdings
from xpyd_sidecar.router.fleet.roster import FleetMember


class Query(msgspec.Struct, frozen=True):
    """One choice to make."""

    role: Role
    candidates: Sequence[FleetMember]
    """At least one, by name; all can do the work."""
    partners: int = 1
    """How many instances of the other role the choice is combined with."""
    prefix: PromptPrefix = PromptPrefix(b"")
    """The prompt's beginning."""
    holdings: Holdings | None = None
    """What each instance probably holds; None where nobody keeps account."""
    session: int = 0
    """Key of the session that the request belongs to; 0: none."""


class Policy(Protocol):
    """What a policy offers."""

    holds: bool
    """Whether it looks at ``Query.holdings``, so that account must be kept."""

    def choose(self, query: Query) -> int:
        """Index into ``query.candidates``."""


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a policy that has none."""


_Made = TypeVar("_Made", bound=type)
_POLICIES: dict[str, tuple[Callable[..., Policy], type[msgspec.Struct]]] = {}


def register(name: str, options: type[msgspec.Struct] = NoOptions) -> Callable[[_Made], _Made]:
    """Make a policy known: the class is called with ``(seed, options)``."""

    def known(cls: _Made) -> _Made:
        _POLICIES[name] = (cls, options)
        return cls

    return known


def names() -> list[str]:
    """Every policy's name, sorted."""
    _load()
    return sorted(_POLICIES)


def make(name: str, options: Mapping[str, Any], seed: int) -> Policy:
    """Build a policy. Raises ConfigError: no policy has this name, or an option is wrong."""
    _load()
    found = _POLICIES.get(name)
    if found is None:
        raise ConfigError(f"router.policy: {name!r} is not a policy; there are {', '.join(sorted(_POLICIES))}")
    cls, kind = found
    try:
        return cls(seed, msgspec.convert(dict(options), kind))
    except msgspec.ValidationError as error:
        raise ConfigError(f"router.policy_options of {name}: {error}") from None


def _load() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
