"""A vLLM plugin for tests: what a CPU build lacks for pipeline stages that are not compiled.

A later stage takes what an earlier one has computed through tensors that vLLM makes in its first dry run. For CPUs that run
is left out with ``--enforce-eager``, and the first request ends the worker. Here they are made when they are first needed,
as the dry run would have.

    PYTHONPATH=<this folder>      vLLM finds it by its entry point
"""

from __future__ import annotations

from typing import Any


def plugin() -> None:
    """What vLLM calls in each process."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if "sync_and_gather_intermediate_tensors" in CPUModelRunner.__dict__:
        return
    gather = CPUModelRunner.sync_and_gather_intermediate_tensors

    def with_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device)
        return gather(self, *args, **kwargs)

    CPUModelRunner.sync_and_gather_intermediate_tensors = with_tensors
