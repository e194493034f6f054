"""CUDA graphs beside the connector: captured while its threads ask for marks, and with its hooks inside a capture.

vLLM captures graphs when it starts. A mark that another thread asks for meanwhile, and a copy that a hook orders on a
stream which captures, must not break the engine.
"""

from __future__ import annotations

import threading

import torch
from gpu_cache import BLOCK_BYTES, LAYERS, Cache, content, gather, host, wait_done
from gpu_copies import IDS
from gpu_seen import Figures, LeftOutError, held

CAPTURES = 20
REPLAYS = 10
SIZE = LAYERS * len(IDS) * BLOCK_BYTES


def capture_beside(device: torch.device) -> Figures:
    """A thread asks for marks all the time while graphs are captured; what the strictest mode of capture does is told."""
    if device.type != "cuda":
        raise LeftOutError("a CPU captures no graphs")
    cache = Cache(device)
    cache.fill(3)
    mark = gather(cache, [(IDS, host(SIZE, device))])
    torch.cuda.synchronize(device)
    asked, errors, stop = [0], list[str](), threading.Event()

    def ask() -> None:
        while not stop.is_set():
            try:
                asked[0] += mark.done()
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


def capture_whole(device: torch.device) -> Figures:
    """A whole forward is one graph: what is copied out after a replay is what the replay wrote, each time."""
    if device.type != "cuda":
        raise LeftOutError("a CPU captures no graphs")
    cache, out = Cache(device), host(SIZE, device)
    cache.fill(1)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in cache.layers:
            layer.add_(1)
    cache.fill(1)
    wrong = 0
    for replay in range(1, REPLAYS + 1):
        graph.replay()
        mark = gather(cache, [(IDS, out)])
        cache.memory.fence()
        wait_done(mark)
        expected = b"".join((content(layer, 1, torch.device("cpu")) + replay)[list(IDS)].contiguous().numpy().tobytes()
                            for layer in range(LAYERS))
        wrong += bytes(out.view) != expected
    return held({"replays": REPLAYS, "wrong": wrong}, f"{wrong} copies have other bytes" if wrong else None)


def first_line(error: Exception) -> str:
    """What an error of CUDA's begins with; the rest is the same for all."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
