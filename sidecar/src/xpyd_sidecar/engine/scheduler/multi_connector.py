"""What is ours where vLLM's MultiConnector holds several connectors: all are told the same, each takes out its own.

Theory. Reports of all connectors come in one object. A name in ``finished_recving`` is ours once every rank has reported a
load of it, and a sibling's otherwise: vLLM has one connector load for a request at a time. Ids of ours that vLLM does not
wait for are taken out, since it would end over them; all others stay.

A request whose blocks several connectors need is let go when each has said so once, on every rank: MultiConnector counts
what workers report. So there the scheduler side does not speak for them: it has each worker say it, with the next step.

A sibling that fills blocks within a step says with that step's output which of them it could not fill; vLLM then computes
their requests anew, or fails them. What has been copied out of them by then is not the KV of their prompts.

    step n: a sibling fills blocks          hold n ──▶ copies made now and in later steps stay with the publisher
    output of step n, heard                 proved n ──▶ they leave; transfers that ran with blocks it names are spoiled

Requests of step n and later ones may share such blocks, so what counts is the table that a transfer ran with. Where no
sibling loads within steps nothing is held.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from xpyd_sidecar.engine.reports import LoadReport, Orders, StepReport
from xpyd_sidecar.kv.keys import Key


class MultiConnectorReports:
    """Tells our reports from those of others, and what others have failed at from what is ours to hand over."""

    def __init__(self, ranks: int) -> None:
        self._begun = 0
        """Steps in which a sibling loads, so far."""
        self._proved = 0
        self._news = False
        self._ran: list[tuple[int, Key, frozenset[int]]] = []
        """Which step that is not proved a transfer ran in or after, and the blocks that it ran with."""
        self._ranks = ranks
        self._reported: dict[str, set[int]] = {}
        """Loads that some ranks have reported, and others have not yet."""

    def finished_names(self, names: Iterable[str], loads: Iterable[LoadReport], awaited: Iterable[str]) -> set[str]:
        """The requests among ``names``, whose loads have ended, that vLLM is to be told of.

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

    # --- steps in which they load ---

    def begin(self, orders: Orders, *, loads: bool) -> None:
        """A step is planned; whether a sibling fills blocks within it."""
        self._begun += loads
        orders.hold = self._begun if self._begun > self._proved else 0
        orders.proved = self._proved if self._news else 0
        self._news = False

    def on_transfer_ran(self, key: Key, tables: Iterable[Sequence[int]]) -> None:
        """A transfer whose blocks are not all pushed runs in the step that was begun last, with these tables of blocks."""
        if self._begun > self._proved:
            self._ran.append((self._begun, key, frozenset(chain.from_iterable(tables))))

    def on_step_output(self, report: StepReport | None, failed: set[int]) -> list[Key]:
        """Take the output of a step and the blocks that could not be filled. Returns the transfers that ran with some."""
        spoiled = [key for _, key, blocks in self._ran if not blocks.isdisjoint(failed)] if failed else []
        if report is not None and report.proves > self._proved:
            self._proved, self._news = report.proves, True
            self._ran = [one for one in self._ran if one[0] > self._proved]
        return list(dict.fromkeys(spoiled))
