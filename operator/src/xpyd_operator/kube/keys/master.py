"""The master that the keys of all services are derived from: read by its name, made once, never made again by itself.

    Secret xpyd-master in the operator's namespace          data: "1": 64 hex digits, "2": …
      there            its generations, looked at again every minute
      not there        put back as this process knows it; made with generation 1 where no pod has a derived key; else lost
      cannot be used   what was known before goes on; without that, no service can be looked after, and says so
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from xpyd_operator.errors import XpydError
from xpyd_operator.kube.client.api import Api, ApiError
from xpyd_operator.render.labels import APPLICATION, MANAGED_BY
from xpyd_sidecar.contract import keys

logger = logging.getLogger(__name__)
LOOK_S = 60.0
"""So often the Secret is read."""
AGAIN_S = 5.0
"""After it could not be used."""
SOON_S = 1.0
"""While it was never read, since nothing can be done without it."""
GENERATIONS_MAX = 64
_RIGHT = "a number from 1, with 64 hex digits"
_GENERATION = re.compile(r"[1-9][0-9]{0,8}")


class KeyTrouble(XpydError):
    """No key can be told for a service. What runs goes on, and a person must act; ``reason`` is that of its condition."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Master:
    """One for all services. ``in_use`` says whether some pod has a derived key."""

    def __init__(
        self, api: Api, namespace: str, name: str, in_use: Callable[[], bool], *, dry_run: bool = False
    ) -> None:
        self._api = api
        self._namespace, self._name = namespace, name
        self._in_use = in_use
        self._dry_run = dry_run
        self._known: Mapping[int, bytes] = {}
        self._trouble: KeyTrouble | None = None
        self._unread: ApiError | None = None
        """Why it was not even looked at."""
        self._due = float("-inf")
        self._looked = float("-inf")
        self._turn = asyncio.Lock()

    async def generations(self, now: float) -> Mapping[int, bytes]:
        """Number → master, at least one.

        Raises:
            KeyTrouble: it is lost, or holds something else.
            ApiError: it cannot be told at present, and never was.
        """
        async with self._turn:
            if not self._looked <= now < self._due:
                self._due, self._looked = now + SOON_S, now
                await self._look()
                bad = self._trouble is not None or self._unread is not None
                self._due = now + (LOOK_S if not bad else AGAIN_S if self._known or self._trouble else SOON_S)
        if not self._known:
            raise self._trouble or self._unread or XpydError(f"Secret {self._where} was not read yet")
        return self._known

    @property
    def problem(self) -> KeyTrouble | None:
        """Why the keys that are known may be lost: the Secret cannot be used; None: it can."""
        return self._trouble

    @property
    def _where(self) -> str:
        return f"{self._namespace}/{self._name}"

    async def _look(self) -> None:
        self._unread = None
        try:
            secret = await self._there()
            if secret is None:
                await self._make()
            else:
                self._known, self._trouble = self._read(secret), None
        except KeyTrouble as error:
            self._complain(error)
        except ApiError as error:
            self._unread = error
            logger.warning("Secret %s cannot be read: %s", self._where, error)

    async def _there(self) -> dict[str, Any] | None:
        try:
            return await self._api.get("Secret", self._namespace, self._name)
        except ApiError as error:
            if error.missing:
                return None
            raise

    async def _make(self) -> None:
        known = self._known
        if not known and self._in_use():
            words = f"Secret {self._where} is not there, and pods have keys that were made from it"
            self._complain(KeyTrouble("MasterLost", f"{words}; put it back from a backup (docs/operations.md#keys)"))
            return
        if known:
            logger.warning("Secret %s is not there any more: it is made again, as it was", self._where)
        made = known or {1: secrets.token_bytes(32)}
        if not self._dry_run:
            try:
                await self._api.create("Secret", self._namespace, self._body(made))
            except ApiError as error:
                if not error.exists:
                    raise
                made = self._read(await self._api.get("Secret", self._namespace, self._name))  # another operator's
        self._known, self._trouble = made, None

    def _body(self, generations: Mapping[int, bytes]) -> dict[str, Any]:
        return {
            "apiVersion": "v1", "kind": "Secret",
            "metadata": {"name": self._name, "namespace": self._namespace, "labels": {MANAGED_BY: APPLICATION}},
            "stringData": {str(number): master.hex() for number, master in generations.items()},
        }

    def _read(self, secret: dict[str, Any]) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        data: Mapping[str, str] = secret.get("data") or {}
        for name, value in list(data.items())[:GENERATIONS_MAX]:
            key = text_key(value)
            if not _GENERATION.fullmatch(name) or key is None:
                raise KeyTrouble("MasterUnusable", f"Secret {self._where}: {name!r} is no generation of a master: {_RIGHT}")
            found[int(name)] = key
        if not found:
            raise KeyTrouble("MasterUnusable", f"Secret {self._where} holds no generation of a master: {_RIGHT}")
        return found

    def _complain(self, error: KeyTrouble) -> None:
        if self._trouble is None or str(self._trouble) != str(error):
            logger.error("%s%s", error, "; keys go on as they were" if self._known else "")
        self._trouble = error


def text_key(value: str) -> bytes | None:
    """The key in an item of a Secret; None where it holds none."""
    try:
        return keys.parse(base64.b64decode(value, validate=True).decode("ascii"))
    except (binascii.Error, ValueError):
        return None
