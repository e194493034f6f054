"""A vLLM plugin for tests: each step with tokens takes at least as long as that of a large model.

A tiny model answers with 500 tokens in a second, so a test that means to catch an engine in the middle of its answers is in
a race with it, which it loses on a busy machine. With 20 ms a step, as large models have, such an answer takes 10 seconds
whatever the machine does. The time is slept, so it takes no processor.

    PYTHONPATH=<this folder> SLOW_STEP_S=0.02      vLLM finds it by its entry point
"""

from __future__ import annotations

import os
import time
from typing import Any

VARIABLE = "SLOW_STEP_S"


def plugin() -> None:
    """What vLLM calls in each process."""
    from vllm.v1.engine.core import EngineCore

    if hasattr(EngineCore, "slow_steps"):
        return
    EngineCore.slow_steps = True
    seconds = float(os.environ[VARIABLE])
    for name in ("step", "step_with_batch_queue"):
        setattr(EngineCore, name, _slower(getattr(EngineCore, name), seconds))


def _slower(step: Any, seconds: float) -> Any:
    def slow(self: Any) -> Any:
        outputs, executed = step(self)
        if executed:
            time.sleep(seconds)
        return outputs, executed

    return slow
