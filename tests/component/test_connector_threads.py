"""Real engines of which a thread of the connector dies: they end with its words, instead of going on without it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from engines import Engine

pytestmark = pytest.mark.engines
PLUGIN = str(Path(__file__).parents[1] / "support/dying_threads")


@pytest.mark.parametrize("thread", ["xpyd-receiver", "xpyd-control"], ids=["of a worker", "of the scheduler side"])
def test_an_engine_whose_thread_has_died_ends_with_its_words(tmp_path: Path, thread: str) -> None:
    when = tmp_path / "now"
    env = {"DYING_THREAD": thread, "DYING_WHEN": str(when),
           "PYTHONPATH": os.pathsep.join(filter(None, (PLUGIN, os.environ.get("PYTHONPATH"))))}
    words = f"thread {thread} ended: OSError: [Errno 9] Bad file descriptor"
    with Engine("p", tmp_path, env=env) as engine:
        engine.wait_ready()
        assert len(engine.complete([1, 2, 3], 4)["token_ids"]) == 4
        when.touch()
        end = time.monotonic() + 60
        while words not in engine.log.read_text():
            assert time.monotonic() < end, engine.tail()
            time.sleep(0.1)
        assert engine.alive(), "an engine without requests makes no steps"
        with pytest.raises(Exception, match=r"500|closed|refused|reset|timed out|EngineDead"):
            engine.complete([1, 2, 3], 4)
        end = time.monotonic() + 60
        while engine.alive():
            assert time.monotonic() < end, engine.tail()
            time.sleep(0.1)
        text = engine.log.read_text()
    assert f"ThreadEnded: {words}" in text or f"{words}'" in text
    assert "fatal error" in text
