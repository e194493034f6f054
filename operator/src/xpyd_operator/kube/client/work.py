"""Several requests of which one that fails keeps none of the others from being made."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from xpyd_operator.errors import NotYet, XpydError


async def all_of(work: Iterable[Awaitable[None]]) -> None:
    """Wait for all, side by side, and raise what went wrong only then (``raise_all``)."""
    done = await asyncio.gather(*work, return_exceptions=True)
    raise_all([each for each in done if isinstance(each, BaseException)])


async def in_turn(
    steps: Iterable[Callable[[], Awaitable[None]]], excuses: Callable[[XpydError], bool] = lambda _: False
) -> None:
    """One after the other, whatever became of those before, and raise only then what went wrong and is not excused
    (``raise_all``).
    """
    wrong: list[BaseException] = []
    for step in steps:
        try:
            await step()
        except XpydError as error:
            if not excuses(error):
                wrong.append(error)
    raise_all(wrong)


def raise_all(wrong: Sequence[BaseException]) -> None:
    """Raise all of them as one error; nothing where there are none.

    What only waits (``NotYet``) is raised where nothing else went wrong.

    Raises:
        XpydError: the one, or one that says what each of several does.
        BaseException: the first that is no XpydError.
    """
    for each in wrong:
        if not isinstance(each, XpydError):
            raise each
    failed = [each for each in wrong if not isinstance(each, NotYet)]
    found = failed or wrong
    if len(found) == 1:
        raise found[0]
    if found:
        words = "; ".join(dict.fromkeys(str(each) for each in found))
        raise XpydError(words) if failed else NotYet(words)
