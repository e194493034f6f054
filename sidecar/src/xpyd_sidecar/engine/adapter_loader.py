"""Keeps the LoRA adapters of one API server as its order says (``contract.adapters``).

    missing    looked at (fetched, digested, linked) in a thread, then loaded, one after the other
    changed    the new files are loaded first; from then on the name means them, and requests that run go on with the old
    surplus    not told any more; unloaded ``UNLOAD_AFTER_S`` later, when routers know
    failed     told with its reason, tried again after growing times

Adapters that the engine began with (``--lora-modules``) get the path that says what their files are, too, so that two
engines that keep them in different folders know each other's KV.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from xpyd_sidecar.contract import adapters
from xpyd_sidecar.contract.adapters import REASON_BYTES, Adapter, AdapterOrder, AdapterProblem, AdapterState
from xpyd_sidecar.contract.pair_notes import cut
from xpyd_sidecar.engine import adapter_files
from xpyd_sidecar.engine.adapter_files import AdapterMissing
from xpyd_sidecar.engine.compat.adapters import AdapterRefused

logger = logging.getLogger(__name__)
LOOK_S: Final = 0.5
"""Between two looks at the order."""
UNLOAD_AFTER_S: Final = 30.0
"""So long a name that is not told any more is answered to: requests that were on their way begin meanwhile."""
AGAIN_S: Final = (5.0, 300.0)
"""Least and most between two tries."""
SERIES_S: Final = 60.0
"""Between two times that metrics of sets of adapters are dropped."""
LOAD_S: Final = 600.0
"""A load that the engine has not answered in this time has failed; its download may go on."""


class AdapterHost(Protocol):
    """The API server, as far as adapters go."""

    slots: int
    """Adapters that a batch may have; 0: the engine takes none."""

    def recent(self) -> tuple[str, ...]:
        """Names that were asked for last, the latest last."""

    def paths(self) -> dict[str, str]:
        """Name → path of all that are loaded."""

    async def load(self, name: str, path: str) -> None:
        """Load from ``path``; from then on the name means that. Raises AdapterRefused."""

    def repath(self, name: str, path: str) -> None:
        """The same files by another path."""

    def unload(self, name: str) -> None:
        """Answer to the name no longer; nothing where it is unknown."""

    def forget_series(self) -> None:
        """Drop metrics of sets of adapters that do not run now."""


class _Failure(NamedTuple):
    adapter: Adapter
    reason: str
    again_at: float
    wait_s: float


class AdapterLoader:
    """See the module. ``begin``, then ``run`` it."""

    def __init__(self, run_dir: Path, host: AdapterHost) -> None:
        self._run_dir = run_dir
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._order = AdapterOrder()
        self._digest = ""
        """Of the order; empty: none was read."""
        self._loaded: dict[str, Adapter] = {}
        """What was loaded by an order, by name."""
        self._own = frozenset(host.paths())
        """What the engine began with."""
        self._failures: dict[str, _Failure] = {}
        self._leaves: dict[str, float] = {}
        """When a surplus is unloaded, by name."""
        self._said: AdapterState | None = None
        self._problem = ""
        self._series_at = self._loop.time()

    def begin(self) -> None:
        """Before the engine answers: say what it has, so that nobody believes what one before it has said.

        Raises:
            OSError: the run folder cannot be written to.
        """
        adapter_files.forget_links(self._run_dir)
        self._tell()

    async def run(self) -> None:
        """Follow the order until cancelled."""
        for name, path in self._host.paths().items():
            await self._name_by_digest(name, path)
        while True:
            goes_on = False
            try:
                goes_on = await self.step()
                self._problem = ""
            except OSError as error:
                if str(error) != self._problem:
                    logger.warning("xpyd: adapters cannot be told of: %s", error)
                self._problem = str(error)
            await asyncio.sleep(0 if goes_on else LOOK_S)

    async def step(self) -> bool:
        """Look at the order, and make at most one step towards it; whether an adapter was tried, so that more may follow.

        Raises:
            OSError: the run folder cannot be read or written to.
        """
        self._read()
        now = self._loop.time()
        if now - self._series_at >= SERIES_S:
            self._series_at = now
            self._host.forget_series()
        for name in [name for name, at in self._leaves.items() if now >= at]:
            del self._leaves[name]
            self._own -= {name}
            self._host.unload(name)
            logger.info("xpyd: adapter %s was unloaded", name)
        adapter = self._next(now)
        if adapter is not None:
            await self._load(adapter)
        self._tell()
        return adapter is not None

    def _read(self) -> None:
        try:
            order = adapters.read_order(self._run_dir)
        except ValueError as error:
            if str(error) != self._problem:
                logger.warning("xpyd: the order of adapters is not followed: %s", error)
            self._problem = str(error)
            return
        if order is None or (self._digest and order == self._order):
            return
        self._order, self._digest = order, order.digest
        wanted = {each.name: each for each in order.adapters}
        self._failures = {name: one for name, one in self._failures.items() if wanted.get(name) == one.adapter}
        for name in self._loaded.keys() - wanted.keys():
            del self._loaded[name]
            self._leaves[name] = self._loop.time() + UNLOAD_AFTER_S

    def _next(self, now: float) -> Adapter | None:
        """What is to be loaded now: what was never tried before what failed."""
        missing = [each for each in self._order.adapters if self._loaded.get(each.name) != each]
        fresh = next((each for each in missing if each.name not in self._failures), None)
        return fresh or next((each for each in missing if self._failures[each.name].again_at <= now), None)

    async def _load(self, adapter: Adapter) -> None:
        try:
            async with asyncio.timeout(LOAD_S):
                path = await asyncio.to_thread(self._look, adapter)
                if self._host.paths().get(adapter.name) != str(path):
                    await self._host.load(adapter.name, str(path))
        except (AdapterMissing, AdapterRefused, OSError, TimeoutError) as error:
            before = self._failures.get(adapter.name)
            wait_s = min(AGAIN_S[1], 2 * before.wait_s) if before is not None else AGAIN_S[0]
            reason = str(error) or f"not loaded within {LOAD_S:g} s"
            self._failures[adapter.name] = _Failure(adapter, reason, self._loop.time() + wait_s, wait_s)
            logger.warning("xpyd: adapter %s is not loaded: %s; again in %g s", adapter.name, reason, wait_s)
            return
        self._failures.pop(adapter.name, None)
        self._leaves.pop(adapter.name, None)
        self._loaded[adapter.name] = adapter
        logger.info("xpyd: adapter %s was loaded from %s", adapter.name, adapter.source)

    def _look(self, adapter: Adapter) -> Path:
        return adapter_files.link(self._run_dir, adapter_files.locate(adapter))

    async def _name_by_digest(self, name: str, path: str) -> None:
        try:
            found = await asyncio.to_thread(adapter_files.link, self._run_dir, Path(path))
        except (AdapterMissing, OSError) as error:
            logger.warning("xpyd: adapter %s is known by its path alone: %s", name, error)
            return
        self._host.repath(name, str(found))

    def _tell(self) -> None:
        problems = tuple(AdapterProblem(name, cut(" ".join(one.reason.split()), REASON_BYTES))
                         for name, one in sorted(self._failures.items()) if name not in self._loaded)
        own = self._own - self._leaves.keys() - {each.name for each in self._order.adapters}
        told = tuple(sorted(own | self._loaded.keys()))
        state = AdapterState(self._digest, told, problems[:adapters.MOST], self._host.slots,
                             adapters.latest(self._host.recent()))
        if state != self._said:
            adapters.write_state(self._run_dir, state)
            self._said = state
