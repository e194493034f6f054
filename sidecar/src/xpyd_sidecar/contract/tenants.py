"""Tenants: the document that may stand in a router's file of client keys, and the digests that stand there for keys.

    {"tenants": [
      {"name": "search", "digests": ["sha256:5e8f…"], "tokensPerMinute": 200000, "tokensPerDay": 50000000,
       "inFlight": 64, "models": ["qwen"], "priority": {"least": -4, "most": 8}, "weight": 3, "cachedWeight": 0.1,
       "isolation": "tenant"}]}

What is left out does not bound the tenant. A document is taken whole or not at all, and what is wrong with it is said with
the entry and the name of its tenant.

    sha256:HEX         SHA-256 of a key that ``new_key`` made: 256 random bits, so nobody finds it by trying
    hmac-sha256:HEX    HMAC-SHA-256 of any other key, under the pepper that is derived from the service's key
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
import secrets
from typing import Final, Literal

import msgspec

from xpyd_sidecar.contract import keys
from xpyd_sidecar.contract.keys import ServiceKey

MAX_TENANTS: Final = 10_000
MAX_DIGESTS: Final = 8
"""Of one tenant: keys in use, and those that they are rotated to."""
MAX_MODELS: Final = 256
MAX_NUMBER: Final = 10**15
"""No limit is larger: what is counted stays exact."""
MAX_WEIGHT: Final = 100
PRIORITY: Final = 8
"""Priorities go from minus this to this (``router.api.priority``)."""
PLAIN: Final = "sha256:"
PEPPERED: Final = "hmac-sha256:"
KEY_PREFIX: Final = "xk-"
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_DIGEST = re.compile(rf"({PLAIN}|{PEPPERED})([0-9a-f]{{64}})")
_MADE = re.compile(rb"xk-[A-Za-z0-9_-]{43}")
_LIMITS = {"tokens_per_minute": "tokensPerMinute", "tokens_per_day": "tokensPerDay", "in_flight": "inFlight"}


class DocumentFault(ValueError):
    """A document of tenants that is not taken; the message says where and why."""


class PriorityRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the priorities of a tenant's requests may be; lower is sooner."""

    least: int = 0
    most: int = PRIORITY


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One entry of the document."""

    name: str
    digests: tuple[str, ...]
    """Of its keys, any of which opens."""
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    """From 00:00 UTC on."""
    in_flight: int | None = None
    """Requests that wait or are served."""
    models: tuple[str, ...] = ()
    """Those that it may use, by their whole names; none: all."""
    priority: PriorityRange = PriorityRange()
    weight: int = 1
    """Of its share, where requests wait."""
    cached_weight: float = 1.0
    """What a token of a prompt counts for that prefill had cached, 0 to 1."""
    isolation: Literal["shared", "tenant"] = "shared"
    """Whether others may share its prefixes in the caches of engines."""

    @property
    def isolated(self) -> bool:
        """Whether nobody else may have KV of its prompts."""
        return self.isolation == "tenant"

    def may_use(self, model: str | None) -> bool:
        """Whether it may use a model; None: the one that is not named."""
        return not self.models or model in self.models


def is_document(text: str) -> bool:
    """Whether the text of a file of client keys is a document, and not keys by line."""
    return text.lstrip("\ufeff \t\r\n").startswith("{")


def decode(text: str) -> tuple[Tenant, ...]:
    """The tenants of a document. Raises DocumentFault."""
    try:
        whole = json.loads(text.lstrip("\ufeff"), object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise DocumentFault(f"line {error.lineno}, column {error.colno}: it is no JSON: {error.msg}") from None
    except RecursionError:
        raise DocumentFault("it is nested too deep") from None
    if not isinstance(whole, dict) or not isinstance(whole.get("tenants"), list):
        raise DocumentFault('it has no list "tenants"')
    if unknown := sorted(whole.keys() - {"tenants"}):
        raise DocumentFault(f"unknown field {unknown[0]!r}; a document has tenants alone")
    entries = whole["tenants"]
    if not entries:
        raise DocumentFault("tenants: there is none")
    if len(entries) > MAX_TENANTS:
        raise DocumentFault(f"tenants: {len(entries)}, at most {MAX_TENANTS} are allowed")
    found = tuple(_tenant(number, entry) for number, entry in enumerate(entries))
    _alone(found)
    return found


def encode(tenant: Tenant) -> str:
    """The entry of one tenant, as a document has it, with what differs from the defaults."""
    said = msgspec.to_builtins(tenant)
    usual = msgspec.to_builtins(Tenant(tenant.name, tenant.digests))
    shown = {name: value for name, value in said.items() if name in {"name", "digests"} or value != usual[name]}
    return json.dumps(shown, indent=2)


# ---- keys


def new_key() -> str:
    """A new client key: 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def was_made(key: bytes) -> bool:
    """Whether a key has the form of those that ``new_key`` makes."""
    return _MADE.fullmatch(key) is not None


def plain(key: bytes) -> bytes:
    """What ``sha256:`` is of."""
    return hashlib.sha256(key).digest()


def digest_with_pepper(pepper: bytes, key: bytes) -> bytes:
    """What ``hmac-sha256:`` is of."""
    return hmac.digest(pepper, key, "sha256")


def pepper(key: ServiceKey) -> bytes:
    """Of a service."""
    return keys.derive(key, "client keys")


def digest_of(key: str, service: ServiceKey | None = None) -> str:
    """The digest that stands for a client key. ``service``: its key, without which only keys of ``new_key`` have one.
    Raises ValueError.
    """
    raw = key.encode()
    if was_made(raw):
        return PLAIN + plain(raw).hex()
    if service is None:
        raise ValueError("this key was not made by `xpyd keys new`, so its digest needs the service's key: somebody who "
                         "reads a plain one could find the key by trying")
    return PEPPERED + digest_with_pepper(pepper(service), raw).hex()


def digest_bytes(said: str) -> tuple[bool, bytes]:
    """Whether a digest of a document is plain, and its bytes. Raises ValueError: it has another form."""
    found = _DIGEST.fullmatch(said)
    if found is None:
        # It may be a key, which must not get into a log.
        raise ValueError(f"a text of {len(said)} characters is no digest: {PLAIN} or {PEPPERED}, then 64 hex digits")
    return found[1] == PLAIN, bytes.fromhex(found[2])


# ---- what may be wrong


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        about = f" in the entry {found['name']!r}" if isinstance(found.get("name"), str) else ""
        raise DocumentFault(f"the field {twice!r} stands there twice{about}")
    return found


def _tenant(number: int, entry: object) -> Tenant:
    name = entry.get("name") if isinstance(entry, dict) else None
    at = f"tenants[{number}]" + (f" ({name[:64]!r})" if isinstance(name, str) else "")
    try:
        found = msgspec.convert(entry, Tenant)
    except (msgspec.ValidationError, RecursionError) as error:
        raise DocumentFault(f"{at}: {error}") from None
    if why := _wrong(found):
        raise DocumentFault(f"{at}: {why}")
    return found


def _wrong(one: Tenant) -> str:
    """What is wrong with an entry, in words; empty: nothing."""
    if not _NAME.fullmatch(one.name):
        return "name: letters, digits, '.', '_' and '-', at most 63, with a letter or digit at both ends"
    if not 1 <= len(one.digests) <= MAX_DIGESTS:
        return f"digests: 1 to {MAX_DIGESTS}, not {len(one.digests)}"
    for said in one.digests:
        try:
            digest_bytes(said)
        except ValueError as error:
            return f"digests: {error}"
    for field, shown in _LIMITS.items():
        limit = getattr(one, field)
        if limit is not None and limit < 1:
            return f"{shown} is {limit}: it may send nothing; leave out the tenant to refuse it, the field to bound nothing"
        if limit is not None and limit > MAX_NUMBER:
            return f"{shown} is {limit}: at most {MAX_NUMBER}"
    if len(one.models) > MAX_MODELS or len(set(one.models)) < len(one.models) or "" in one.models:
        return f"models: at most {MAX_MODELS} names, each once and none empty"
    if not -PRIORITY <= one.priority.least <= one.priority.most <= PRIORITY:
        return f"priority: least to most, within {-PRIORITY} to {PRIORITY}, not {one.priority.least} to {one.priority.most}"
    if not 1 <= one.weight <= MAX_WEIGHT:
        return f"weight is {one.weight}: 1 to {MAX_WEIGHT}"
    if math.isnan(one.cached_weight) or not 0 <= one.cached_weight <= 1:
        return f"cachedWeight is {one.cached_weight}: 0 to 1"
    return ""


def _alone(found: tuple[Tenant, ...]) -> None:
    """Raise where two entries have a name or a digest in common: a key would be two tenants'."""
    names: dict[str, int] = {}
    digests: dict[str, str] = {}
    for number, one in enumerate(found):
        if (before := names.setdefault(one.name, number)) != number:
            raise DocumentFault(f"tenants[{number}] ({one.name!r}): tenants[{before}] has this name, too")
        for said in one.digests:
            if (other := digests.get(said)) is not None:
                whose = "it has it twice" if other == one.name else f"{other!r} has it, too"
                raise DocumentFault(f"tenants[{number}] ({one.name!r}): digest {said[:24]}…: {whose}")
            digests[said] = one.name
