"""Guided fuzz of what is compiled, each entry point against an oracle in Python, and of what reads clients' bytes.

    python scripts/sanitize.py fuzz --seconds 30 --seed 1      all targets, two at a time, under the sanitizers
    python scripts/sanitize.py again answers FILE              one input that failed

    search ── mutate an input that found something ──▶ target.check(input) ── raises, or the sanitizer ends the process
       └────── kept, if it took a new way ◀── edges.c, in the extension ┘

Belongs here: the search (``search``, ``mutate``, ``edges``), running targets as processes (``processes``), and a module for
each target: ``MODULES`` whose ways are counted (none, where nothing is compiled), ``TOKENS`` to mutate with, ``seeds()``,
and ``check(input)``, which
asserts what must hold and returns what happened (a new outcome is as good as a new way). Does not belong here: building
(``sanitized``).

An input is bytes of a Python object, which has a zero behind them: a read of one byte too many is not seen by the
sanitizers, one of two is.
"""

from __future__ import annotations

TARGETS = ("answers", "events", "blocks", "heads", "bodies", "frames", "manifests",
           "pieces", "records")
"""In the order in which they start."""
