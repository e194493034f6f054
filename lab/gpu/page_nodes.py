"""On which NUMA nodes the pages of some memory of this process are, by /proc/self/numa_maps, which needs no right."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

from lab.gpu.findings import LeftOutError
from xpyd_sidecar.memory.addresses import address_of

MAPS: Final = Path("/proc/self/numa_maps")


class PageNodes(NamedTuple):
    """Of the mappings that some memory lies in: the system joins neighbours of one kind, so there may be more of them."""

    policies: frozenset[str]
    """As the kernel writes them: ``default``, ``prefer:1``."""
    sizes: dict[int, int]
    """Bytes by node; pages that were never written are at none."""


def page_nodes(view: memoryview, maps: Path = MAPS) -> PageNodes:
    """Where the pages of some memory are.

    Raises:
        LeftOutError: this kernel does not say.
    """
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise LeftOutError(f"{maps}: {error.strerror}") from None
    begin = address_of(view)
    return parse_maps([line.split() for line in lines], begin, begin + len(view))


def parse_maps(lines: list[list[str]], begin: int, end: int) -> PageNodes:
    """Of memory from ``begin`` to ``end``; a line begins with the mapping's address and its policy."""
    ends = [*(int(words[0], 16) for words in lines[1:]), *([1 << 64] if lines else [])]
    policies, sizes = set[str](), Counter[int]()
    for words, until in zip(lines, ends, strict=True):
        if until <= begin or int(words[0], 16) >= end:
            continue
        policies.add(words[1])
        facts = dict(word.split("=", 1) for word in words[2:] if "=" in word)
        page = int(facts.get("kernelpagesize_kB", "4")) << 10
        for name, count in facts.items():
            if name[0] == "N" and name[1:].isdigit():
                sizes[int(name[1:])] += int(count) * page
    return PageNodes(frozenset(policies), dict(sizes))
