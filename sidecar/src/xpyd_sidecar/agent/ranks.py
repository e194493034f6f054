"""Data-parallel ranks of an instance: which member has which, and what a member says of its own.

    data 4, members 2      member 0: ranks 0, 1       member 1: ranks 2, 3       each with a server for its two
    one rank, members 2    member 0: rank 0           member 1: workers of it, and no server
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from xpyd_sidecar.agent.beat import disagreement
from xpyd_sidecar.contract import record
from xpyd_sidecar.contract.group import MemberRanks
from xpyd_sidecar.contract.ids import HostPort
from xpyd_sidecar.contract.launch import AgentConfig
from xpyd_sidecar.contract.record import EngineRecord


def own(config: AgentConfig) -> range:
    """Ranks whose records lie in the run folder of this agent."""
    return of_member(config, config.group.index if config.group is not None else 0)


def of_member(config: AgentConfig, index: int) -> range:
    """Ranks of a member of this agent's instance."""
    if config.group is None:
        return range(config.data_parallel)
    if config.data_parallel == 1:
        return range(1 if index == 0 else 0)
    each = config.data_parallel // config.group.size
    return range(index * each, (index + 1) * each)


def read_ranks(run_dir: Path, ranks: range, door: HostPort) -> MemberRanks | None:
    """Read the records of a member's ranks; None until all of them have been written. ``door``: the agent's address.

    Raises:
        ValueError: a file is no record, or the ranks differ; says how.
        OSError: a file cannot be read.
    """
    records = [one for rank in ranks if (one := record.read(run_dir, rank)) is not None]
    if not records or len(records) < len(ranks):
        return None
    if differ := disagreement(records):
        raise ValueError(differ)
    return MemberRanks(door, records[0], tuple(one.control for one in records))


def records_of(said: MemberRanks) -> tuple[EngineRecord, ...]:
    """The records of a member's ranks, as its agent has read them."""
    first = said.first
    return tuple(msgspec.structs.replace(first, dp_rank=first.dp_rank + at, control=control)
                 for at, control in enumerate(said.control))
