"""The supervisor of a local service: the loop over ``LocalBackend`` until the service has ended.

``xpyd up`` runs it in the foreground, ``xpyd up --detach`` in a process of its own (``python -m
xpyd_operator.cli.supervise SERVICE``), ``xpyd down`` itself when no other one lives. If it is killed, engines and router go
on serving, and the next one takes them over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from random import SystemRandom

from xpyd_operator import loop
from xpyd_operator.errors import XpydError
from xpyd_operator.local import lock, logs, store
from xpyd_operator.local.backend import LocalBackend
from xpyd_operator.local.paths import ServiceFolder
from xpyd_operator.local.store import StopRequest
from xpyd_operator.plan.round import Round

logger = logging.getLogger(__name__)
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WATCH_S = 0.25
"""How soon a changed document or the wish to end is noticed."""


class Supervisor:
    """One run of the loop. ``on_signal`` hears of every request to end by a signal."""

    def __init__(self, folder: ServiceFolder, on_signal: Callable[[StopRequest], None] | None = None) -> None:
        self.folder = folder
        self._wake = asyncio.Event()
        self._on_signal = on_signal
        self._backend = LocalBackend(folder, store.load_settings(folder), SystemRandom())

    async def run(self) -> None:
        """Until the service has ended; holds the lock all the time.

        Raises:
            LockHeld: another supervisor runs.
            LocalError: a process does not end.
        """
        with lock.hold_lock(self.folder.lock), self._signals():
            logger.info("supervisor of %s started", self.folder.service)
            watch = asyncio.create_task(self._watch())
            work = asyncio.create_task(loop.run(self._backend, time.time, self._wake, until=self._finished))
            try:
                await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
                if watch.done():
                    logger.error("%s was removed; ending all that runs", self.folder.path)
                    work.cancel()
                    await asyncio.wait([work])
                    await self._backend.close()
                    await self._backend.sweep()
                    self._remove_remains()
                    return
                work.result()
                request = self._backend.blueprint.stop_request()
                if request is not None and request.now:
                    await self._backend.end_now()
                await self._backend.close()
                await self._backend.sweep()
            finally:
                for task in (watch, work):
                    task.cancel()
                await asyncio.gather(watch, work, return_exceptions=True)
            self.folder.stop.unlink(missing_ok=True)
            logger.info("%s has ended", self.folder.service)

    def ask_end(self) -> None:
        """End the service: drained at the first call, at once at the next."""
        before = self._backend.blueprint.stop_request()
        request = StopRequest(now=before is not None)
        store.save(self.folder.stop, request)
        self._wake.set()
        if self._on_signal is not None:
            self._on_signal(request)

    def _remove_remains(self) -> None:
        """What a round that was under way made again of the removed folder; nothing once the service was made anew."""
        if self.folder.path.exists() and not self.folder.settings.exists():
            shutil.rmtree(self.folder.path)

    def _finished(self, done: Round) -> bool:
        request = self._backend.blueprint.stop_request()
        return done.gone or (request is not None and request.now)

    async def _watch(self) -> None:
        """Wake the loop for what changed; returns when somebody has removed the folder."""
        seen = self._stamps()
        while self.folder.settings.exists():
            await asyncio.sleep(WATCH_S)
            stamps = self._stamps()
            if stamps != seen:
                seen = stamps
                self._wake.set()

    def _stamps(self) -> list[int]:
        stamps = []
        for path in (self.folder.desired, self.folder.stop):
            try:
                stamps.append(path.stat().st_mtime_ns)
            except OSError:
                stamps.append(0)
        return stamps

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        running = asyncio.get_running_loop()
        for number in ENDING:
            running.add_signal_handler(number, self.ask_end)
        try:
            yield
        finally:
            for number in ENDING:
                running.remove_signal_handler(number)


def main(argv: list[str]) -> int:
    """Supervise one service in this process, logging to its folder."""
    folder = ServiceFolder(argv[0])
    logs.bound(folder.log)
    logging.basicConfig(
        filename=folder.log, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    try:
        asyncio.run(Supervisor(folder).run())
    except XpydError as error:
        logger.error("%s", error)  # noqa: TRY400 (the message says it all)
        return 2
    except Exception:
        logger.exception("the supervisor failed")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
