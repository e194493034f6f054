"""Whether versions of vLLM write KV alike: digests of their sources that do.

    python -m lab kv-sources [VLLM …]

``VLLM``: a wheel, or the folder that has ``vllm`` in it; without any, the one that is installed. Prints for each its
version and the digest of each group of sources, as ``tests/data/kv_sources.json`` records them, and which files differ from
those of the first.

Only versions that are recorded may have one name in ``KV_ABI`` (``xpyd_sidecar.engine.compat``), and only where every group
is equal or the record says why a difference does not matter. What is compiled is not in a wheel as source, so a reason is
always asked for it: somebody has to have compared ``csrc`` of both.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

COMPILED: Final = "compiled"
GROUPS: Final[dict[str, tuple[str, ...]]] = {
    "rope": ("model_executor/layers/rotary_embedding/*", "model_executor/layers/hpc/rope_norm.py",
             "compilation/passes/fusion/*rope*"),
    "cache update": ("model_executor/layers/attention/*", "v1/attention/*", "_custom_ops.py"),
    "quantisation": ("model_executor/layers/quantization/kv_cache.py", "model_executor/layers/quantization/turboquant/*"),
    "page layout": ("v1/kv_cache_interface.py", "v1/kv_cache_layout.py", "v1/worker/utils.py",
                    "v1/worker/gpu/attn_utils.py", "v1/worker/gpu/block_table.py"),
    "models": ("models/*", "model_executor/models/*"),
}
"""Patterns of paths below ``vllm``; a star goes over folders, too."""
Digests = dict[str, dict[str, str]]
"""By group, of each file."""


def installed() -> Path:
    """The folder that has the installed vLLM in it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.parent


def sources(place: Path) -> Iterator[tuple[str, bytes]]:
    """Python files of a vLLM, by their path below ``vllm``."""
    if place.is_dir():
        for path in sorted((place / "vllm").rglob("*.py")):
            yield path.relative_to(place / "vllm").as_posix(), path.read_bytes()
        return
    with zipfile.ZipFile(place) as wheel:
        for name in sorted(wheel.namelist()):
            if name.startswith("vllm/") and name.endswith(".py"):
                yield name.removeprefix("vllm/"), wheel.read(name)


def digests(place: Path) -> tuple[str, Digests]:
    """The version of a vLLM, and the digest of each of its sources that write KV.

    Raises:
        ValueError: there is no vLLM.
    """
    version, found = "", {group: dict[str, str]() for group in GROUPS}
    for path, text in sources(place):
        if path == "_version.py":
            known = re.search(rb"__version__ = version = '([^']+)'", text)
            version = known[1].decode() if known else ""
        for group, patterns in GROUPS.items():
            if any(fnmatch(path, pattern) for pattern in patterns):
                found[group][path] = hashlib.sha256(text).hexdigest()
    if not version:
        raise ValueError(f"{place}: no vLLM of a known version")
    return version, found


def record(found: Digests) -> dict[str, str]:
    """One digest for each group."""
    return {group: hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]
            for group, files in found.items()}


def unexplained(names: Mapping[str, str], recorded: Mapping[str, Mapping[str, str]],
                reasons: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What keeps ``KV_ABI`` from being right; ``reasons``: by ``"one, other"``, for each group that differs."""
    out = [f"{version}: its sources are not recorded" for version in names if version not in recorded]
    out += [f"{version}: {name} is none of the versions that have this name"
            for version, name in names.items() if names.get(name) != name]
    for one, other in itertools.combinations([version for version in names if version in recorded], 2):
        if names[one] != names[other]:
            continue
        said = reasons.get(f"{one}, {other}", {})
        differ = [group for group in GROUPS if recorded[one].get(group) != recorded[other].get(group)]
        out += [f"{one}, {other}: no reason for {group}" for group in (*differ, COMPILED) if not said.get(group)]
    return out


def main() -> None:
    """Print digests, and what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vllm", nargs="*", type=Path)
    first: Digests | None = None
    for place in parser.parse_args().vllm or [installed()]:
        version, found = digests(place)
        first = first or found
        said: dict[str, Any] = {version: record(found)}
        print(json.dumps(said, indent=2))
        for group, files in found.items():
            before = first[group]
            differ = [path for path in sorted({*files, *before}) if files.get(path) != before.get(path)]
            if differ:
                print(f"{group}: {len(differ)} of {len({*files, *before})} differ: {', '.join(differ)}")


if __name__ == "__main__":
    main()
