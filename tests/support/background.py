"""Work that goes on beside a test, for as long as a block runs."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self


class Background:
    """``async with``: ``work`` runs in a task, which is cancelled at the end. What it has raised before is raised then."""

    _task: asyncio.Task[None] | None = None

    async def work(self) -> None:
        """What goes on."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.work(), name=f"{type(self).__name__} beside a test")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
