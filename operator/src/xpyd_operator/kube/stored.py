"""Which versions of the API the store holds, brought down to the one that is stored now, and the CRDs told so.

An object stays in the store in the version in which it was written last, and a version may only be taken out of a CRD when
``status.storedVersions`` does not name it. The API server adds to that list and never takes away. The leader does, once:

    the list is [ours], or the CRD stores another version (a newer release)  ─▶ nothing to do
    the CRD's status may not be patched (a dry run answers 403)              ─▶ said once; asked again an hour later
    otherwise   every object: an empty patch of its status, which the API server writes in the version stored now
                the CRD's status: [ours], unless the CRD has changed meanwhile

The right to the last step is none of the base: the overlay ``migrate`` has it (docs/decisions/0033-v1beta1.md). An operator
that looks after some namespaces alone does not see all objects, so it leaves this to whoever sees them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import msgspec

from xpyd_operator.api.base import GROUP, VERSION
from xpyd_operator.kube.api import RESOURCES, Api, ApiError

logger = logging.getLogger(__name__)
Body = dict[str, Any]
KINDS: Final = ("DisaggService", "DisaggPool")
CRD: Final = "CustomResourceDefinition"
SETTLE_S: Final = 15.0
"""Another API server may not have taken the new CRD in yet, and would still write the version before."""
AGAIN_S: Final = 60.0
FORBIDDEN: Final = 403
FORBIDDEN_AGAIN_S: Final = 3600.0
PAGE: Final = 500
WIDTH: Final = 8
"""Objects that are written at a time."""


class _CrdVersions(msgspec.Struct, frozen=True):
    """What a CRD says of its versions."""

    version: str
    """``resourceVersion`` of the CRD."""
    stores: str
    """The version that is stored now."""
    held: tuple[str, ...]
    """Those that the store may hold."""


class StoredVersions:
    """Of both kinds. ``run`` ends when nothing is left to do."""

    def __init__(self, api: Api, *, settle_s: float = SETTLE_S) -> None:
        self._api = api
        self._settle_s = settle_s

    async def run(self) -> None:
        """Until every kind is done, or cancelled."""
        left = list(KINDS)
        told: set[str] = set()
        pause_s = self._settle_s
        while left:
            await asyncio.sleep(pause_s)
            pause_s = AGAIN_S
            for kind in tuple(left):
                try:
                    if await self.tend(kind):
                        left.remove(kind)
                except ApiError as error:
                    if error.status == FORBIDDEN:
                        pause_s = FORBIDDEN_AGAIN_S
                    words = str(error)
                    logger.log(logging.DEBUG if words in told else logging.INFO, "%s: versions that the store holds: %s",
                               crd_name(kind), words)
                    told.add(words)
                except Exception:  # an answer of another form than expected
                    logger.exception("%s: what the store holds cannot be told", crd_name(kind))
                    left.remove(kind)

    async def tend(self, kind: str) -> bool:
        """Do what there is to do for one kind; whether nothing is left.

        Raises:
            ApiError: it cannot be done now, or (403) the operator may not.
        """
        found = await self._found(kind)
        if found is None:
            return False
        if found.stores != VERSION or found.held == (VERSION,):
            return True
        await self._say(kind, found, dry_run=True)
        count = await self._rewrite(kind)
        await self._say(kind, found)
        logger.info("%s: %d objects are stored as %s, and no other version is held", crd_name(kind), count, VERSION)
        return True

    async def _found(self, kind: str) -> _CrdVersions | None:
        """None where there is no such CRD."""
        listed = await self._api.items(CRD, fields=f"metadata.name={crd_name(kind)}")
        return next((_read(item) for item in listed["items"]), None)

    async def _say(self, kind: str, found: _CrdVersions, *, dry_run: bool = False) -> None:
        patch = {"metadata": {"resourceVersion": found.version}, "status": {"storedVersions": [VERSION]}}
        await self._api.patch(CRD, "", crd_name(kind), patch, sub="status", dry_run=dry_run)

    async def _rewrite(self, kind: str) -> int:
        count, more = 0, ""
        while True:
            listed = await self._api.items(kind, limit=PAGE, more=more)
            items = listed["items"]
            for begin in range(0, len(items), WIDTH):
                await asyncio.gather(*(self._touch(kind, item["metadata"]) for item in items[begin : begin + WIDTH]))
            count += len(items)
            more = listed["metadata"].get("continue", "")
            if not more:
                return count

    async def _touch(self, kind: str, metadata: Body) -> None:
        try:
            await self._api.patch(kind, metadata["namespace"], metadata["name"], {}, sub="status")
        except ApiError as error:
            if not error.missing:  # gone meanwhile
                raise


def crd_name(kind: str) -> str:
    """Name of the CRD of one of our kinds."""
    return f"{RESOURCES[kind].plural}.{GROUP}"


def _read(crd: Body) -> _CrdVersions:
    stores = next((each["name"] for each in crd["spec"]["versions"] if each["storage"]), "")
    held = tuple((crd.get("status") or {}).get("storedVersions") or ())
    return _CrdVersions(crd["metadata"]["resourceVersion"], stores, held)
