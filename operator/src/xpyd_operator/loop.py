"""observe → plan → apply, the same loop for every backend.

The loop keeps nothing from one round to the next but what it last reported. A backend's failure to observe or to carry out
one action is said and the next round tries again, later and later while it keeps failing; it never ends the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from xpyd_operator.errors import NotYet, ServiceGone, XpydError
from xpyd_operator.plan.actions import Action, Create
from xpyd_operator.plan.desired import DesiredService
from xpyd_operator.plan.observed import ObservedService
from xpyd_operator.plan.round import Round, think

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5
SLOWEST_S = 5.0
"""Longest pause after rounds that failed."""


class Backend(Protocol):
    """Where instances live."""

    async def desired_service(self) -> DesiredService:
        """What the service is to be like now. Raises XpydError while that cannot be told; the last answer is used then."""

    async def observe(self, now: float) -> ObservedService:
        """What is there now; bounded in time."""

    async def prepare(self, round_: Round) -> None:
        """Make what goes with the service beside its instances as it should be; bounded in time. Raises NotYet, as
        ``apply`` does.
        """

    @property
    def width(self) -> int:
        """How many actions of one kind may be under way side by side."""

    async def apply(self, action: Action) -> None:
        """Carry out or begin one action; bounded in time. What is begun shows in the next observation.

        Raises:
            NotYet: it needs something that is not there; a later round tries again. Whatever else went wrong in this
                round, a backend makes nothing without what that needs.
        """

    def report(self, round_: Round) -> None:
        """Take note of a round: write the status where it is read."""


async def converge(backend: Backend, now: float, *, dry_run: bool = False, last: DesiredService | None = None) -> Round:
    """One round at ``now`` (unix seconds). With ``dry_run`` nothing is applied and nothing reported.

    Raises:
        XpydError: what is wanted cannot be told and ``last`` is not given, or the backend cannot observe.
        ServiceGone: the service has gone under the round, which ends there.
    """
    failures: list[str] = []
    postponed: list[str] = []
    try:
        desired = await backend.desired_service()
    except ServiceGone:
        raise
    except Exception as error:
        if last is None:
            raise
        failures.append(f"what is wanted: {error}")
        desired = last
    observed = await backend.observe(now)
    done = think(desired, observed, now)
    if not dry_run:
        await _carry_out(backend, done, failures, postponed)
    done = msgspec.structs.replace(done, failures=tuple(failures), postponed=tuple(dict.fromkeys(postponed)))
    if not dry_run:
        backend.report(done)
    return done


async def _carry_out(backend: Backend, done: Round, failures: list[str], postponed: list[str]) -> None:
    """Everything that a round asks for, in its order; neighbours of one kind side by side. ``failures`` and ``postponed``
    get what failed and what waits, in words. Raises ServiceGone: the rest is not begun.
    """
    try:
        await backend.prepare(done)
    except ServiceGone:
        raise
    except NotYet as error:
        postponed.append(f"what goes with the service waits: {error}")
    except XpydError as error:
        logger.warning("could not prepare: %s", error)
        failures.append(f"what goes with the service: {error}")
    except Exception as error:
        logger.exception("could not prepare")
        failures.append(f"what goes with the service: {error}")
    turns = asyncio.Semaphore(backend.width)
    gone: list[ServiceGone] = []

    async def carry_out(action: Action) -> None:
        async with turns:
            if gone:
                return
            logger.info("%s", action)
            try:
                await backend.apply(action)
            except ServiceGone as error:
                gone.append(error)
            except NotYet as error:
                logger.info("%s waits: %s", action, error)
                postponed.append(f"making instances waits: {error}")
            except XpydError as error:
                logger.warning("could not %s: %s", action, error)
                failures.append(f"{action}: {error}")
            except Exception as error:
                logger.exception("could not %s", action)
                failures.append(f"{action}: {error}")

    for kind, same in itertools.groupby(done.plan.actions, type):
        if kind is Create:
            await _in_order(carry_out, list(same), backend.width)
        else:
            await asyncio.gather(*(carry_out(action) for action in same))
    if gone:
        raise gone[0]


async def _in_order(carry_out: Callable[[Action], Awaitable[None]], actions: Sequence[Action], width: int) -> None:
    """Each is begun when those before are answered, but for an eighth as many as were answered by then: where places are
    short they are given in the order in which they were asked for, and the ratio of what has one is right within that.
    """
    running: set[asyncio.Future[None]] = set()
    answered = 0
    try:
        for action in actions:
            while len(running) >= min(width, max(1, answered // 8)):
                over, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                answered += len(over)
            running.add(asyncio.ensure_future(carry_out(action)))
        await asyncio.gather(*running)
    finally:
        for each in running:
            each.cancel()


async def run(
    backend: Backend,
    clock: Callable[[], float],
    wake: asyncio.Event,
    *,
    interval_s: float = INTERVAL_S,
    until: Callable[[Round], bool] = lambda done: done.gone,
) -> Round:
    """Rounds until one satisfies ``until``; ``wake`` begins the next one at once. The last round."""
    failed = 0
    last: DesiredService | None = None
    while True:
        try:
            done = await converge(backend, clock(), last=last)
        except Exception:
            logger.exception("round failed")
            failed += 1
        else:
            last = done.desired
            failed = failed + 1 if done.failures or done.postponed else 0
            if until(done):
                return done
        pause_s = min(SLOWEST_S, interval_s * 2.0 ** min(failed, 16))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await wake.wait()
        wake.clear()
