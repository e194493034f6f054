"""Engines of data-parallel ranks that share experts, and what each rank ran.

    with DpEngine("d", folder, "rpc") as engine:      off, rpc, shm or auto
        engine.wait_ready()
        engine.complete([5, 6, 7], 8, rank=1)
        engine.steps(0)                               [Step(at_ns, real, number, tokens), …]
        engine.wasted()                               steps in which no rank had tokens
        engine.inject(1, [5, 6, 7], 8)                a request that no front end knows of
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from engines import BASE_ARGS, Engine, post
from make_model import ensure_moe
from processes import Group, free_port

from xpyd_sidecar.contract import launch

PLUGIN = Path(__file__).parent / "moe_on_cpu"
ARGS = ("--num-gpu-blocks-override", "64")
HEADLESS = """
import sys
from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
if __name__ == "__main__":
    run_headless(make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:]))
"""
"""What ``vllm serve --headless`` does; that command wants a distribution named vllm, and the build for CPUs is none."""


class Step(NamedTuple):
    """A forward of a rank."""

    at_ns: int
    real: bool
    number: int
    tokens: int


def read_steps(trace: Path, rank: int) -> list[Step]:
    """What a rank has written into the folder ``trace``."""
    path = trace / f"rank-{rank}.steps"
    if not path.exists():
        return []
    lines = [line.split() for line in path.read_text("ascii").splitlines(keepends=True) if line.endswith("\n")]
    return [Step(int(at), kind == "real", int(number), int(tokens)) for at, kind, number, tokens in lines]


class DpEngine(Engine):
    """A vLLM server with ``ranks`` data-parallel ranks. ``apart``: each is started for itself, as on hosts of their own."""

    def __init__(self, name: str, folder: Path, mode: str, *, ranks: int = 2, timeout_s: float = 20.0,
                 look_ahead: str = "adaptive", args: Sequence[str] = (), env: Mapping[str, str] | None = None,
                 connector: bool = False, apart: bool = False, **more: Any) -> None:
        self.ranks = ranks
        self.far: list[Group] = []
        """Ranks from 1 on where they are apart."""
        self._apart = ("--data-parallel-size-local", "1", "--data-parallel-address", "127.0.0.1",
                       "--data-parallel-rpc-port", str(free_port())) if apart else ()
        self.trace = folder / f"{name}-steps"
        self.trace.mkdir()
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH")))),
            "XPYD_TEST_STEPS": str(self.trace), "VLLM_SERVER_DEV_MODE": "1", "VLLM_HOST_IP": "127.0.0.1",
            launch.ENV_DP_SYNC: mode, launch.ENV_DP_TIMEOUT_S: str(timeout_s), launch.ENV_DP_LOOKAHEAD: look_ahead,
            **(env or {})}
        super().__init__(name, folder, connector=connector, model=ensure_moe(), env=environment,
                         args=("--data-parallel-size", str(ranks), *self._apart, *ARGS, *args), **more)

    def start(self) -> Self:
        """Start the process, and those of ranks that are apart."""
        super().start()
        for rank in range(1, self.ranks) if self._apart else ():
            command = (sys.executable, "-c", HEADLESS, "--headless", "--api-server-count", "0", "--model",
                       str(ensure_moe()), "--data-parallel-size", str(self.ranks), "--data-parallel-start-rank", str(rank),
                       *self._apart, *BASE_ARGS, *ARGS)
            self.far.append(Group(command, log=self.folder / f"{self.name}-rank-{rank}.log", env=self._env,
                                  name=f"rank {rank} of {self.name}"))
        return self

    def kill(self) -> None:
        """kill -9 of all processes."""
        super().kill()
        for group in self.far:
            group.kill()

    def ask(self, prompt: Sequence[int], max_tokens: int, rank: int, timeout_s: float = 240.0, **fields: Any) -> list[int]:
        """The tokens of a greedy completion on one rank."""
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True, **fields}
        answer = post(f"{self.url}/v1/completions", body, timeout_s, {"X-data-parallel-rank": str(rank)})
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    def pause(self, mode: str) -> None:
        """Stop all ranks at one step."""
        self._control(f"pause?mode={mode}&clear_cache=false")

    def resume(self) -> None:
        """Let them go on."""
        self._control("resume")

    def _control(self, path: str) -> None:
        post(f"{self.url}/{path}", {}, 240.0)

    def steps(self, rank: int) -> list[Step]:
        """All forwards that a rank has begun."""
        return read_steps(self.trace, rank)

    def wasted(self, after: int = 0) -> int:
        """Steps beyond ``after`` in which every rank ran a dummy."""
        dummies = [{step.number for step in self.steps(rank) if not step.real} for rank in range(self.ranks)]
        return sum(number > after for number in set.intersection(*dummies))

    def useful(self, after: int = 0) -> int:
        """Steps beyond ``after`` in which a rank had tokens."""
        real = [{step.number for step in self.steps(rank) if step.real} for rank in range(self.ranks)]
        return sum(number > after for number in set.union(*real))

    def settled(self, deadline_s: float = 120.0) -> int:
        """Wait until no rank steps any more; the number of the last step, which must be the same everywhere."""
        until = time.monotonic() + deadline_s
        last, since = -1, time.monotonic()
        while time.monotonic() < until:
            counts = [len(self.steps(rank)) for rank in range(self.ranks)]
            if min(counts) != max(counts) or counts[0] != last:
                last, since = counts[0] if min(counts) == max(counts) else -1, time.monotonic()
            elif time.monotonic() - since > 0.5:
                return last
            time.sleep(0.05)
        raise AssertionError(f"ranks still step, or are apart: {counts}")

    def inject(self, rank: int, prompt: Sequence[int], max_tokens: int) -> None:
        """Put a request into a rank's queue, past the front end."""
        new = self.trace / f"new-{rank}"
        new.write_text(json.dumps({"prompt": list(prompt), "max_tokens": max_tokens}), "ascii")
        new.rename(self.trace / f"inject-{rank}.json")

    def core(self, rank: int) -> int:
        """The process of a rank's engine core."""
        found = re.search(rf"\(EngineCore_DP{rank} pid=(\d+)\)", self.log.read_text("utf-8", errors="replace"))
        assert found is not None, f"no engine core of rank {rank} in {self.log}"
        return int(found[1])
