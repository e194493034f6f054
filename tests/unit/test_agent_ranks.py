"""Which member has which data-parallel ranks, and what its agent says of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from agent_fakes import FIELDS, config_of, record_of

from xpyd_sidecar.agent import ranks
from xpyd_sidecar.contract import group, record
from xpyd_sidecar.contract.group import MemberHello, MemberRanks
from xpyd_sidecar.contract.ids import HostPort, InstanceName
from xpyd_sidecar.contract.launch import AgentConfig, GroupConfig

DOOR = HostPort("10.0.0.8:8000")


def agent(index: int | None, *, size: int = 2, data: int = 4) -> AgentConfig:
    mine = {} if index is None else {"group": GroupConfig(index, size, "x")}
    config = config_of(data_parallel=data, **mine).agent
    assert config is not None
    return config


@pytest.mark.parametrize(("data", "size"), [(2, 2), (4, 2), (16, 2), (16, 16), (9, 3)])
def test_members_share_the_ranks_in_order(data: int, size: int) -> None:
    shares = [list(ranks.own(agent(index, size=size, data=data))) for index in range(size)]
    assert [rank for share in shares for rank in share] == list(range(data))
    assert {len(share) for share in shares} == {data // size}
    assert [list(ranks.of_member(agent(0, size=size, data=data), index)) for index in range(size)] == shares


def test_an_instance_of_one_member_has_all_and_workers_have_none() -> None:
    assert list(ranks.own(agent(None, data=4))) == [0, 1, 2, 3]
    assert [list(ranks.own(agent(index, data=1))) for index in (0, 1)] == [[0], []]


def test_a_member_says_its_ranks_once_all_of_them_have_started(tmp_path: Path) -> None:
    assert ranks.read_ranks(tmp_path, range(2, 4), DOOR) is None
    record.write(tmp_path, record_of(dp_rank=2))
    record.write(tmp_path, record_of(dp_rank=1))
    assert ranks.read_ranks(tmp_path, range(2, 4), DOOR) is None
    record.write(tmp_path, record_of(dp_rank=3))
    said = ranks.read_ranks(tmp_path, range(2, 4), DOOR)
    assert said == MemberRanks(DOOR, record_of(dp_rank=2), (HostPort("127.0.0.1:4002"), HostPort("127.0.0.1:4003")))
    assert ranks.records_of(said) == (record_of(dp_rank=2), record_of(dp_rank=3))
    assert ranks.read_ranks(tmp_path, range(0), DOOR) is None, "workers have no ranks of their own"


def test_ranks_that_differ_are_said_by_name(tmp_path: Path) -> None:
    record.write(tmp_path, record_of(dp_rank=2))
    record.write(tmp_path, record_of(dp_rank=3, fields=msgspec.structs.replace(FIELDS, dtype="bfloat16")))
    with pytest.raises(ValueError, match="DP ranks 2 and 3 differ: dtype"):
        ranks.read_ranks(tmp_path, range(2, 4), DOOR)
    record.write(tmp_path, record_of("b" * 32, dp_rank=3))
    with pytest.raises(ValueError, match="DP ranks 2 and 3 are of two starts of the engine"):
        ranks.read_ranks(tmp_path, range(2, 4), DOOR)


def test_a_hello_of_as_many_ranks_as_a_member_may_have_fits() -> None:
    control = tuple(HostPort(f"[2001:db8:0:1:a00:27ff:fe4e:{rank:x}]:{30000 + rank}") for rank in range(512))
    fields = msgspec.structs.replace(FIELDS, states="s" * 400)
    hello = MemberHello(1, InstanceName("s" * 60), 15, "l" * 64, "b" * 24, 10**9, "running", "c" * 32, "9" * 20, "w" * 1024,
                        MemberRanks(DOOR, record_of(fields=fields), control))
    assert len(msgspec.json.encode(hello)) <= group.MOST_BYTES
