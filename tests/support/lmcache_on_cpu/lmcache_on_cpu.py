"""A vLLM plugin for tests: LMCache's connector with vLLM for CPUs, which ends at its start where numba has been imported.

The connector imports numba, and that llvmlite, whose library object takes any name for a function, ``__dict__`` too. When
vLLM for CPUs looks through all modules for kernels, it takes what that gives for a dictionary: "'_lib_fn_wrapper' object
has no attribute 'get'". Here names of Python's own are no functions.

    PYTHONPATH=<this folder>      vLLM finds it by its entry point
"""

from __future__ import annotations

from typing import Any


def plugin() -> None:
    """What vLLM calls in each process."""
    from llvmlite.binding import ffi

    library = type(ffi.lib)
    plain = library.__getattr__
    if plain.__module__ == __name__:
        return

    def attribute(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return plain(self, name)

    library.__getattr__ = attribute
