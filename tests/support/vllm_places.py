"""What tests use of vLLM and its versions have in different places, and which version runs.

The tests of ``python scripts/tiers.py versions`` run with the Python sources of each version that ``engine.compat`` knows.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from xpyd_sidecar.engine import compat
from xpyd_sidecar.engine.compat import common

MODULE = common.module()
"""The module of ``engine.compat`` that knows this version."""
VERSION = compat.version()
_MOVED = {
    "get_kv_cache_groups": ("vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_planning"),
    "make_arg_parser": ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.common.cli_args"),
    "validate_parsed_serve_args": ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.common.cli_args"),
}
"""By name: the module in 0.32, and that since 0.33."""


def at_its_place(name: str) -> Any:
    """Something of vLLM, from where this version has it."""
    before, since = _MOVED[name]
    return getattr(import_module(before if MODULE == "v032" else since), name)
