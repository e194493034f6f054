"""Which compiled parts of this package are in use: ``python -m xpyd_sidecar --version`` and ``xpyd --version`` say it.

Belongs here: the table of parts, in words. Whether a part may be taken is decided where it is imported (``built``).
"""

from __future__ import annotations

import importlib
import os

PARTS = {"xpyd_sidecar.router.relay.fast": "the router's shortcuts", "xpyd_sidecar.transport.moves": "loops over bytes",
         "xpyd_sidecar.transport.gates": "the link tcp"}
"""Modules that choose between C and Python, each with what it stands for; their ``COMPILED`` says what they chose."""


def missing() -> tuple[str, ...]:
    """What runs in Python, or not at all, because its part was not compiled or not taken."""
    return tuple(what for module, what in PARTS.items() if not importlib.import_module(module).COMPILED)


def describe() -> str:
    """``compiled``; else what is not, and why that matters."""
    absent = missing()
    if not absent:
        return "compiled"
    why = "XPYD_PLAIN=1 is set" if os.environ.get("XPYD_PLAIN") == "1" else "install a wheel with compiled parts"
    if len(absent) == len(PARTS):
        return f"pure Python: slow, and without the link tcp; {why}"
    return f"partly compiled: slow, without {', '.join(absent)}; {why}"
