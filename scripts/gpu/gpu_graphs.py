"""CUDA graphs beside the connector: captured while its threads ask for marks, and with its hooks inside a capture.

vLLM captures graphs when it starts. A mark that another thread asks for meanwhile, and a copy that a hook orders on a
stream which captures, must not break the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from gpu_cache import Cache, packed, wait_done
from gpu_copies import IDS
from gpu_seen import Figures, LeftOutError, held

CAPTURES = 20


def capture_beside(device: torch.device) -> Figures:
    """A thread asks for marks all the time while graphs are captured; what the strictest mode of capture does is told."""
    if device.type != "cuda":
        raise LeftOutError("a CPU captures no graphs")
    cache = Cache(device)
    index = cache.memory.index(IDS)
    cache.fill(3)
    outs = [cache.memory.copy_out(0, index)]
    cache.memory.fence()
    torch.cuda.synchronize(device)
    asked, errors, stop = [0], list[str](), threading.Event()

    def ask() -> None:
        while not stop.is_set():
            try:
                asked[0] += outs[-1].mark.done()
            except RuntimeError as error:
                errors.append(first_line(error))
                return

    figures: Figures = {}
    wrong = []
    for mode, captures in (("thread_local", CAPTURES), ("global", 1)):
        stop.clear()
        errors.clear()
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        try:
            said = _capture(cache, mode, captures)
        finally:
            stop.set()
            thread.join(10.0)
        figures[mode] = said or (f"asking for a mark: {errors[0]}" if errors else "ok")
        if mode == "thread_local" and figures[mode] != "ok":
            wrong.append(f"thread_local: {figures[mode]}")
    figures["marks_asked"] = asked[0]
    return held(figures, *wrong)


def _capture(cache: Cache, mode: str, captures: int) -> str:
    """Capture a graph that counts in the cache, and replay it; what went wrong, or nothing."""
    try:
        for at in range(captures):
            cache.layers[1].zero_()
            torch.cuda.synchronize(cache.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode=mode):
                for _ in range(50):
                    cache.layers[1].add_(1)
            graph.replay()
            torch.cuda.synchronize(cache.device)
            if not bool((cache.layers[1] == 50).all()):
                return f"graph {at} has counted wrongly"
    except RuntimeError as error:
        return first_line(error)
    return ""


def capture_hook(device: torch.device) -> Figures:
    """A hook copies out on a stream that captures. It may fail or be captured; copies after it must be right."""
    if device.type != "cuda":
        raise LeftOutError("a CPU captures no graphs")
    cache = Cache(device)
    index = cache.memory.index(IDS)
    cache.fill(1)
    torch.cuda.synchronize(device)
    figures: Figures = {"hook": _said(lambda: _hooked(cache, index))}
    figures["after"] = _said(lambda: _plain(cache, index))
    return held(figures, None if figures["after"] == "right" else f"a copy after the capture: {figures['after']}")


def _hooked(cache: Cache, index: torch.Tensor) -> str:
    graph = torch.cuda.CUDAGraph()
    outs: list[Any] = []
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        cache.layers[0].add_(1)
        outs.append(cache.memory.copy_out(0, index))
        cache.memory.fence()
    before = cache.layers[0].clone()
    graph.replay()
    torch.cuda.synchronize(cache.device)
    right = bytes(outs[0].data) == (before + 1)[list(IDS)].cpu().contiguous().numpy().tobytes()
    return f"captured; after a replay the bytes are {'right' if right else 'wrong'}"


def _plain(cache: Cache, index: torch.Tensor) -> str:
    cache.fill(9)
    out = cache.memory.copy_out(2, index)
    cache.memory.fence()
    wait_done(out.mark)
    return "right" if bytes(out.data) == packed(2, 9, IDS) else "wrong bytes"


def _said(work: Callable[[], str]) -> str:
    try:
        return work()
    except RuntimeError as error:
        return f"fails: {first_line(error)}"


def first_line(error: Exception) -> str:
    """What an error of CUDA's begins with; the rest is the same for all."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
