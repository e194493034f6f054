"""Which bytes of which prefill rank go to which decode rank, where their tensor or pipeline sizes differ.

A rank is ``stage * tensor + t``. What it has is a list of *arrays* (of blocks): one per layer, or the K and V of one apart,
by name. Blocks are cut on heads only, which come first where they are packed (``kv.packing``):

    a block of one rank     | head 0 | head 1 | head 2 | head 3 |        P, tensor 1, 4 KV heads
                            '--------+--------'--------+--------'
    decode ranks, tensor 2      rank 0: 0, 1      rank 1: 2, 3           each gets two heads

Rules, of vLLM (``QKVParallelLinear``) where they are about who holds what
1. Of H heads, rank t of T holds H/T from t*H/T on where T <= H, and head t*H/T alone where T > H: T/H ranks have the same.
2. An array without heads (the latent of MLA) is the same on all T ranks.
3. Pipeline stages share out the arrays; names are the same whatever the sizes.
4. Of several sources that have the same, each taker has its own share of them, and spreads its arrays over these.
5. A prefill rank that nobody needs anything of is asked for nothing, by one taker, so that it learns that it may let go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from xpyd_sidecar.kv.array_layout import ArrayLayout, ArrayPart
from xpyd_sidecar.kv.reach import EVERYTHING, Reach

VERSION: Final = 3
UNKNOWN: Final = -1
RANKS_MAX: Final = 1024


class Unmappable(ValueError):
    """The KV of one engine cannot be laid out as the other's; the text begins with the field that differs."""


class ArrayKind(msgspec.Struct, frozen=True, array_like=True):
    """What one block of an array is like on one rank."""

    dtype: str
    heads: int
    """On this rank; 1 where there are none."""
    dims: tuple[int, ...]
    """Of one head."""
    head_bytes: int
    total: int
    """Heads over all ranks. 0: none, all ranks hold the same. ``UNKNOWN``: not to be cut."""
    reach: Reach = EVERYTHING
    """Which blocks of a prompt are moved."""
    run: int = 1
    """Blocks of a run where they are packed (``packing.run_blocks``)."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.heads * self.head_bytes

    @property
    def layout(self) -> ArrayLayout:
        """How blocks of it are packed."""
        return ArrayLayout(self.heads, self.head_bytes, self.run)


class Array(NamedTuple):
    """One array of blocks of one rank."""

    name: str
    kind: ArrayKind


class Geometry(msgspec.Struct, frozen=True):
    """The KV of an engine, as HELLO carries it: ``stages`` lists the arrays of each as ``(name, index into kinds)``."""

    version: int
    tensor: int
    kinds: tuple[ArrayKind, ...]
    stages: tuple[tuple[tuple[str, int], ...], ...]

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.tensor * len(self.stages)

    def arrays(self, stage: int) -> list[Array]:
        """The arrays of each rank of a stage."""
        return [Array(name, self.kinds[at]) for name, at in self.stages[stage]]


class Source(NamedTuple):
    """What one decode rank takes from one prefill rank; ``takers``: how many decode ranks take from that one."""

    rank: int
    takers: int
    arrays: tuple[ArrayLayout, ...]
    """Of prefill's rank, all."""
    parts: tuple[tuple[int, ArrayPart], ...]
    """What is taken of them: (which array, which of its heads and where they go), in order."""


Plan = tuple[tuple[Source, ...], ...]
"""By decode rank."""


def geometry(tensor: int, ranks: Sequence[Sequence[Array]]) -> Geometry:
    """The geometry of an engine from the arrays of its ranks.

    Raises:
        Unmappable: the tensor ranks of one stage do not have the same.
    """
    kinds: dict[ArrayKind, int] = {}
    stages = []
    for first in range(0, len(ranks), tensor):
        for rank in range(first, first + tensor):
            if list(ranks[rank]) != list(ranks[first]):
                raise Unmappable(f"kv cache: rank {rank} has other arrays than rank {first} of the same pipeline stage")
        stages.append(tuple((one.name, kinds.setdefault(one.kind, len(kinds))) for one in ranks[first]))
    return Geometry(VERSION, tensor, tuple(kinds), tuple(stages))


def plan(prefill: Geometry, decode: Geometry, left_out: frozenset[str] = frozenset()) -> Plan:
    """What every decode rank takes from which prefill ranks. ``left_out``: layers whose arrays stay where they are.

    Raises:
        Unmappable: it cannot be; names the field that differs.
    """
    _check(prefill, "prefill")
    _check(decode, "decode")
    layouts = [tuple(one.kind.layout for one in prefill.arrays(stage)) for stage in range(len(prefill.stages))]
    if prefill == decode and not left_out:
        return tuple((Source(rank, 1, layouts[rank // decode.tensor], tuple(
            (at, ArrayPart(at, 0, one.heads, 0)) for at, one in enumerate(layouts[rank // decode.tensor]))),)
            for rank in range(decode.ranks))
    _compare(prefill, decode, left_out)
    taken = [_taken(prefill, decode, rank, left_out) for rank in range(decode.ranks)]
    for unused in set(range(prefill.ranks)) - {rank for one in taken for rank in one}:
        taken[unused * decode.ranks // prefill.ranks][unused] = []
    takers = Counter(rank for one in taken for rank in one)
    return tuple(tuple(Source(rank, takers[rank], layouts[rank // prefill.tensor], tuple(sorted(parts)))
                       for rank, parts in sorted(one.items())) for one in taken)


def _check(one: Geometry, side: str) -> None:
    if one.version != VERSION:
        raise Unmappable(f"geometry.version: {VERSION} here, {one.version} in {side}")
    names = [name for stage in one.stages for name, _ in stage]
    if one.tensor < 1 or one.ranks > RANKS_MAX:
        raise Unmappable(f"geometry.tensor: {one.tensor} with {len(one.stages)} stages in {side}")
    if not names or len(names) != len(set(names)):
        raise Unmappable(f"geometry: {side} has no arrays, or one of them twice")
    if any(not 0 <= at < len(one.kinds) for stage in one.stages for _, at in stage):
        raise Unmappable(f"geometry.kinds: {side} refers to one that is not there")
    if any(kind.heads < 1 or kind.head_bytes < 1 for kind in one.kinds):
        raise Unmappable(f"geometry.kinds: {side} has one without heads or bytes")


def _compare(prefill: Geometry, decode: Geometry, left_out: frozenset[str]) -> None:
    theirs = {one.name: one.kind for one in _moving(prefill, left_out)}
    ours = {one.name: one.kind for one in _moving(decode, left_out)}
    if prefill.tensor != decode.tensor:
        _without_states({**theirs, **ours})
    for name in [*ours, *theirs]:
        if (name in ours) != (name in theirs):
            raise Unmappable(f"kv cache {name}: only {'decode' if name in ours else 'prefill'} has it")
    for name, here in ours.items():
        there = theirs[name]
        _alike(name, here, there)
        for side, tensor, kind in (("decode", decode.tensor, here), ("prefill", prefill.tensor, there)):
            if prefill.tensor != decode.tensor:
                _divides(name, side, tensor, kind)
        if prefill.tensor == decode.tensor and here != there:
            raise Unmappable(f"kv cache {name}, heads: {here.heads} in decode, {there.heads} in prefill")


def _alike(name: str, here: ArrayKind, there: ArrayKind) -> None:
    for field in ("over", "block_tokens", "window", "extra"):
        in_d, in_p = getattr(here.reach, field), getattr(there.reach, field)
        if in_d != in_p:
            raise Unmappable(f"kv cache {name}, reach.{field}: {in_d} in decode, {in_p} in prefill")
    for field in ("dtype", "dims", "head_bytes", "total"):
        in_d, in_p = getattr(here, field), getattr(there, field)
        if in_d != in_p:
            why = "; give both roles the same types and num_speculative_tokens" if here.reach.over == "state" else ""
            raise Unmappable(f"kv cache {name}, {field}: {in_d} in decode, {in_p} in prefill{why}")


def _moving(one: Geometry, left_out: frozenset[str]) -> Iterator[Array]:
    """Its arrays, of all stages, but those that are left out."""
    return (array for stage in range(len(one.stages)) for array in one.arrays(stage) if _layer(array.name) not in left_out)


def _layer(array: str) -> str:
    """The layer that an array is of: K and V of one may be arrays of their own."""
    return array.partition("#")[0]


def _without_states(kinds: Mapping[str, ArrayKind]) -> None:
    """Said before what else differs: sizes of states do where tensor sizes do, and so may blocks of attention beside."""
    for name, kind in kinds.items():
        if kind.reach.over == "state":
            raise Unmappable(f"parallel.tensor: sizes differ, and kv cache {name} is a state, which is not cut; "
                             "give prefill and decode the same tensor size")


def _divides(name: str, side: str, tensor: int, kind: ArrayKind) -> None:
    if kind.total == UNKNOWN:
        raise Unmappable(f"tensor sizes differ, and kv cache {name} cannot be cut by heads")
    if kind.total and kind.total % tensor and tensor % kind.total:
        raise Unmappable(f"parallel.tensor: {tensor} in {side} does not divide the {kind.total} KV heads of {name}, "
                         "nor is it a multiple of them")
    if kind.heads != (max(1, kind.total // tensor) if kind.total else 1):
        raise Unmappable(f"kv cache {name}, heads: {kind.heads} on each of {tensor} ranks of {side}, of {kind.total}")


def _taken(prefill: Geometry, decode: Geometry, rank: int,
           left_out: frozenset[str]) -> dict[int, list[tuple[int, ArrayPart]]]:
    """Parts of one array each, by prefill rank, for one decode rank."""
    stage, t = divmod(rank, decode.tensor)
    place = {one.name: into for into, one in enumerate(decode.arrays(stage)) if _layer(one.name) not in left_out}
    out: dict[int, list[tuple[int, ArrayPart]]] = {}
    for from_stage in range(len(prefill.stages)):
        common = [(region, one) for region, one in enumerate(prefill.arrays(from_stage)) if one.name in place]
        for nth, (region, one) in enumerate(common):
            for source, head, heads, at in _pieces(one.kind, (prefill.tensor, decode.tensor), t, (nth, len(common))):
                part = ArrayPart(place[one.name], head, heads, at)
                out.setdefault(from_stage * prefill.tensor + source, []).append((region, part))
    return out


def _pieces(kind: ArrayKind, tensors: tuple[int, int], t: int, nth: tuple[int, int]) -> Iterator[tuple[int, int, int, int]]:
    """What tensor rank ``t`` of decode holds of one array (nth of so many): (source's t, its head, heads, head here)."""
    p_tensor, d_tensor = tensors
    if p_tensor == d_tensor:  # the stages alone differ
        yield t, 0, kind.heads, 0
        return
    total = kind.total or 1
    p_same, d_same = max(1, p_tensor // total), max(1, d_tensor // total)
    p_heads, d_heads = max(1, total // p_tensor), max(1, total // d_tensor)
    mine = t % d_same
    shares = range(mine * p_same // d_same, max((mine + 1) * p_same // d_same, mine * p_same // d_same + 1))
    share = shares[nth[0] * len(shares) // nth[1]]
    first = t * total // d_tensor
    for group in range(first // p_heads, (first + d_heads - 1) // p_heads + 1):
        low, high = max(first, group * p_heads), min(first + d_heads, (group + 1) * p_heads)
        yield group * p_same + share, low - group * p_heads, high - low, low - first
