"""A vLLM plugin for tests: of an ordinary request the last token of the prompt is computed in a step of its own.

Prefill hands over all but the last token of a prompt, and decode computes that one: the prompt is cut there. Sums that
are made in other parts are others in their last bits, and in bfloat16 these decide between tokens that are nearly alike. So
what is handed over is compared with an engine that cuts its prompts likewise, and then it must be the same bit by bit.

    PYTHONPATH=<this folder>      vLLM finds it by its entry point; requests of the connector are left alone

One request at a time.
"""

from __future__ import annotations

from typing import Any


def plugin() -> None:
    """What vLLM calls in each process."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if hasattr(Scheduler, "last_token_alone"):
        return
    Scheduler.last_token_alone = True
    plain = Scheduler.schedule

    def schedule(self: Any, *args: Any, **more: Any) -> Any:
        requests = [*self.running, *self.waiting]
        most = self.max_num_scheduled_tokens
        if len(requests) == 1 and not requests[0].kv_transfer_params:
            left = requests[0].num_prompt_tokens - 1 - requests[0].num_computed_tokens
            if left > 0:
                self.max_num_scheduled_tokens = min(most, left)
        try:
            return plain(self, *args, **more)
        finally:
            self.max_num_scheduled_tokens = most

    Scheduler.schedule = schedule
