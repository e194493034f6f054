"""What is ours where vLLM's MultiConnector holds several connectors: all are told the same, each takes out its own.

Theory. Reports of all connectors come in one object. A name in ``finished_recving`` is ours once every rank has reported a
load of it, and a sibling's otherwise: vLLM has one connector load for a request at a time. Ids of ours that vLLM does not
wait for are taken out, since it would end over them; all others stay.

A request whose blocks several connectors need is let go when each has said so once, on every rank: MultiConnector counts
what workers report. So there the scheduler side does not speak for them: it has each worker say it, with the next step.
"""

from __future__ import annotations

from collections.abc import Iterable

from xpyd_sidecar.engine.reports import LoadReport


class Siblings:
    """Tells our reports from those of others."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._reported: dict[str, set[int]] = {}
        """Loads that some ranks have reported, and others have not yet."""

    def left(self, names: Iterable[str], loads: Iterable[LoadReport], awaited: Iterable[str]) -> set[str]:
        """Which of ``names``, whose loads are over, vLLM is to hear of.

        ``loads``: what our ranks report together with them. ``awaited``: those of our loads that vLLM waits for.
        """
        over = set()
        for load in loads:
            ranks = self._reported.setdefault(load.request, set())
            ranks.add(load.rank)
            if len(ranks) == self._ranks:
                del self._reported[load.request]
                over.add(load.request)
        return set(names) - (over - set(awaited))
