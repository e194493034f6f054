"""What vLLM makes of the command lines of a group's members, by its own parser and without an engine.

    check(parser, tensor=4, pipeline=1, data=1, pods=2)     asserts that each says the ranks that the layout says
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from make_model import ensure_model, ensure_moe
from render_service import service

from xpyd_operator.render.layout import Member, layout
from xpyd_sidecar.contract.group import GroupRound
from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.member.__main__ import fill_marks

LIFE = "ab" * 16


def sizes(pods: int) -> list[tuple[int, int, int]]:
    """Tensor, pipeline and data of all instances of so many members that are allowed."""
    return [(tensor, pipeline, data)
            for tensor in (1, 2, 4, 8, 16) for pipeline in (1, 2, 3, 16) for data in (1, *range(2, 17))
            if (data % pods == 0 if data > 1 else tensor * pipeline % pods == 0)]


def lines(model: str, *, tensor: int, pipeline: int, data: int, pods: int) -> list[tuple[Member, list[str]]]:
    """The members, each with its arguments as its launcher fills them in."""
    one = service(None, decode={"parallelism": {"tensor": tensor, "pipeline": pipeline, "data": data, "pods": pods}})
    told = GroupRound(1, LIFE, "127.0.0.1", 31007)
    members = layout(one, Role.DECODE, InstanceName("s-e0"), model)
    return [(member, fill_marks(member.args, told)) for member in members]


def check(parser: argparse.ArgumentParser, model: str, *, tensor: int, pipeline: int, data: int, pods: int) -> None:
    """Raises AssertionError, or whatever vLLM has against a line."""
    from vllm import AsyncEngineArgs

    world = tensor * pipeline
    for member, line in lines(model, tensor=tensor, pipeline=pipeline, data=data, pods=pods):
        given = parser.parse_args(line)
        config = AsyncEngineArgs.from_cli_args(given).create_engine_config(headless=not member.serves)
        parallel: Any = config.parallel_config
        assert config.kv_transfer_config.engine_id.startswith(LIFE)
        assert bool(given.headless) == (not member.serves)
        assert (parallel.tensor_parallel_size, parallel.pipeline_parallel_size) == (tensor, pipeline)
        if data == 1:
            assert (parallel.nnodes, parallel.node_rank) == (pods, member.index)
            assert (parallel.local_world_size, parallel.world_size) == (world // pods, world)
            assert (parallel.master_addr, parallel.master_port) == ("127.0.0.1", 31007)
            assert parallel.distributed_executor_backend == "mp"
        else:
            assert parallel.data_parallel_size == data
            assert parallel.data_parallel_size_local == len(member.ranks) == data // pods
            assert (parallel.data_parallel_rank, given.data_parallel_start_rank) == (member.ranks[0], member.ranks[0])
            assert parallel.data_parallel_hybrid_lb or parallel.data_parallel_external_lb
            assert (parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port) == ("127.0.0.1", 31007)


def paper_model(folder: Path, *, experts: bool) -> str:
    """A model that exists on paper: large enough for every size here, and without weights."""
    source = ensure_moe() if experts else ensure_model()
    made = folder / ("moe" if experts else "dense")
    if not made.exists():
        shutil.copytree(source, made, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((made / "config.json").read_text("utf-8"))
        config |= {"num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 48, "hidden_size": 256,
                   "head_dim": 16, "layer_types": None}
        (made / "config.json").write_text(json.dumps(config), "utf-8")
    return str(made)
