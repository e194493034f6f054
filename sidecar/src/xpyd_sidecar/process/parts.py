"""Which compiled parts of this package are in use: ``python -m xpyd_sidecar --version`` and ``xpyd --version`` say it.

Belongs here: the table of parts, in words. Whether a part may be taken is decided where it is imported (``built``).
"""

from __future__ import annotations

import importlib
import os

PARTS = {"xpyd_sidecar.router.relay.fast": "the router's shortcuts", "xpyd_sidecar.transport.moves": "loops over bytes",
         "xpyd_sidecar.transport.gates": "the link tcp"}
"""Modules that choose between C and Python, each with what it stands for; their ``COMPILED`` says what they chose."""


OF_ENGINES = "numpy"
"""What a part needs that an operator or a router does without, where engines run elsewhere."""


def compiled_parts() -> dict[str, bool]:
    """By what each part stands for: whether it was compiled and taken. Parts of engines are left out where none can run."""
    found = {}
    for module, what in PARTS.items():
        try:
            found[what] = bool(importlib.import_module(module).COMPILED)
        except ModuleNotFoundError as error:
            if error.name != OF_ENGINES:
                raise
    return found


def describe() -> str:
    """``compiled``; else what is not, and why that matters."""
    found = compiled_parts()
    absent = [what for what, taken in found.items() if not taken]
    if not absent:
        return "compiled"
    why = "XPYD_PLAIN=1 is set" if os.environ.get("XPYD_PLAIN") == "1" else "install a wheel with compiled parts"
    if len(absent) == len(found):
        return f"pure Python: slow, and without the link tcp; {why}"
    return f"partly compiled: slow, without {', '.join(absent)}; {why}"
