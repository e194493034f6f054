"""A vLLM platform for tests: CPUs whose workers Ray may start.

vLLM's CPU platform names no resource of Ray, and its Ray executor refuses to start without one ("current platform cpu does
not support ray"). It asks Ray for numbered devices, which Ray has only for accelerators that it knows; so the CPUs go under
the name of one that no host of the tests has. All else is vLLM's: executor, actors, workers, model.

    PYTHONPATH=<this folder> RAY_OVERRIDE_RESOURCES='{"HPU": 2}'      vLLM finds it by its entry point
"""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class RayOnCpu(CpuPlatform):
    """The CPU platform, with a resource of Ray."""

    ray_device_key = "HPU"


def plugin() -> str:
    """Where vLLM finds the class."""
    return "ray_on_cpu.RayOnCpu"
