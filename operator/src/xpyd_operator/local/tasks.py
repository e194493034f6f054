"""What is being done to the parts of a service on this host: one task at a time for each instance, and for the router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from xpyd_operator.errors import LocalError
from xpyd_operator.local.observe import Work

logger = logging.getLogger(__name__)


class Tasks:
    """By part."""

    def __init__(self) -> None:
        self._tasks: dict[str, tuple[Work, asyncio.Task[None]]] = {}

    def begin(self, name: str, work: Work, task: Coroutine[Any, Any, None]) -> None:
        """A removal takes the place of a start that is under way; otherwise what has begun goes on."""
        before: asyncio.Task[None] | None = None
        if name in self.working():
            doing, before = self._tasks[name]
            if doing is not Work.STARTING or work is not Work.REMOVING:
                task.close()
                return
            before.cancel()
        self._tasks[name] = (work, asyncio.create_task(_logged(name, task, before), name=f"{work} {name}"))

    def working(self) -> dict[str, Work]:
        """What is under way."""
        for name in [name for name, (_, task) in self._tasks.items() if task.done()]:
            del self._tasks[name]
        return {name: work for name, (work, _) in self._tasks.items()}

    async def cancel(self) -> None:
        """End all of it."""
        for _, task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*(task for _, task in self._tasks.values()), return_exceptions=True)
        self._tasks.clear()

    async def finish(self, seconds: float) -> None:
        """Wait for all of it, and end what is not over then."""
        tasks = [task for _, task in self._tasks.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


async def _logged(name: str, task: Coroutine[Any, Any, None], before: asyncio.Task[None] | None) -> None:
    try:
        if before is not None:
            await asyncio.wait([before])
        await task
    except (LocalError, OSError) as error:
        logger.error("%s: %s", name, error)  # noqa: TRY400 (the message says it all; a bug's traceback is logged below)
    except Exception:
        logger.exception("%s: unexpected", name)
    finally:
        task.close()
