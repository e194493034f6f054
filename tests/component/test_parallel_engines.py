"""Two tensor-parallel ranks in one instance: workers of vLLM's own (mp), with either queue, and actors of Ray.

One engine at a time, since its workers poll at full speed; transfers between two of them: lab/campaigns/test_parallel.py.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest
from parallel_engines import ask, of_session, parallel_engine

pytestmark = pytest.mark.engines
LENGTHS = (1, 129, 700)
OUTPUT = 12


USED = "calls to 2 workers go through the broadcast queue, 2 of them on this host"


def answers(executor: str, folder: Path, scratch: Path, queue: str = "vllm") -> tuple[list[list[int]], list[str]]:
    source = random.Random(5)
    prompts = [[source.randrange(3, 500) for _ in range(length)] for length in LENGTHS]
    with parallel_engine(executor, folder, scratch, queue) as engine:
        engine.wait_ready()
        said = [ask(engine, prompt, OUTPUT) for prompt in prompts]
        assert (USED in engine.log.read_text()) == (queue == "xpyd")
        return said, list(of_session(engine.group.pid).values())


def test_mp_with_either_queue_and_ray_answer_alike(tmp_path: Path) -> None:
    scratch = Path(tempfile.mkdtemp(prefix="xpyd-", dir="/tmp"))
    try:
        (said, processes), (said_by_ray, ray_processes) = (answers(each, tmp_path, scratch) for each in ("mp", "ray"))
        by_our_queue, _ = answers("mp", tmp_path, scratch, "xpyd")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    assert [len(each) for each in said] == [OUTPUT] * len(LENGTHS)
    assert said_by_ray == said == by_our_queue
    assert sum(name.startswith("ray::RayWorker") for name in ray_processes) == 2
    assert not any(name.startswith("ray::") for name in processes)
