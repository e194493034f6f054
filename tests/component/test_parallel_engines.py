"""Two tensor-parallel ranks in one instance: workers of vLLM's own (mp), and actors of Ray.

One engine at a time, since its workers poll at full speed; transfers between two of them: tests/campaigns/test_parallel.py.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

from parallel_engines import ask, of_session, parallel_engine

LENGTHS = (1, 129, 700)
OUTPUT = 12


def answers(executor: str, folder: Path, scratch: Path) -> tuple[list[list[int]], list[str]]:
    source = random.Random(5)
    prompts = [[source.randrange(3, 500) for _ in range(length)] for length in LENGTHS]
    with parallel_engine(executor, folder, scratch) as engine:
        engine.wait_ready()
        return [ask(engine, prompt, OUTPUT) for prompt in prompts], list(of_session(engine.group.pid).values())


def test_mp_and_ray_answer_alike(tmp_path: Path) -> None:
    scratch = Path(tempfile.mkdtemp(prefix="xpyd-", dir="/tmp"))
    try:
        (said, processes), (said_by_ray, ray_processes) = (answers(each, tmp_path, scratch) for each in ("mp", "ray"))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    assert [len(each) for each in said] == [OUTPUT] * len(LENGTHS)
    assert said_by_ray == said
    assert sum(name.startswith("ray::RayWorker") for name in ray_processes) == 2
    assert not any(name.startswith("ray::") for name in processes)
