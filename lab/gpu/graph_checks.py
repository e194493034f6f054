"""CUDA graphs beside the connector: captured while its threads ask for marks and let copies come, and with whole forwards.

vLLM captures graphs when it starts. What another thread asks or launches meanwhile, and a copy that is ordered behind a
graph, must not break the engine.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from lab.gpu.busy import wait_done
from lab.gpu.cache import LAYERS, Cache, host, packed
from lab.gpu.findings import Figures, LeftOutError, require
from lab.gpu.order_checks import IDS

CAPTURES = 20
REPLAYS = 10
COUNTED = 1
"""The layer that graphs write to; what comes meanwhile goes into blocks that they do not look at."""
END_S = 10.0


def capture_beside(device: torch.device) -> Figures:
    """Threads ask for marks, and bring and place blocks, while graphs are captured.

    What the strictest mode of capture makes of asking alone is told.
    """
    if device.type != "cuda":
        raise LeftOutError("a CPU captures no graphs")
    cache, counted = Cache(device), Cache(device)
    cache.fill(3)
    out = host(IDS.size, device)
    mark, _ = cache.gather([(IDS, out)])
    wait_done(mark)
    cache.ruin()
    moment = cache.copies.moment()
    wait_done(cache.scatter(IDS, 0, [cache.copies.bring([(out.tensor, 0)]), moment])[0])
    torch.cuda.synchronize(device)
    asked, placed = [0], [0]

    def ask() -> None:
        asked[0] += mark.done() and mark.wait(1.0)

    def place() -> None:
        made, _ = cache.scatter(IDS, 0, [cache.copies.bring([(out.tensor, 0)]), moment])
        placed[0] += made.wait(1.0)

    figures: Figures = {}
    for name, works in (("thread_local", (ask,)), ("thread_local_copies", (ask, place))):
        figures[name] = _captured_beside(counted, "thread_local", CAPTURES, works)
    figures |= {"marks_asked": asked[0], "placed": placed[0]}
    faults = [f"{name}: {said}" for name, said in figures.items() if name.startswith("thread") and said != "ok"]
    if not faults:  # else nothing may work any more
        wait_done(cache.gather([(IDS, out)])[0])
        faults += [] if bytes(out.view) == packed(IDS, 3) else ["what was placed meanwhile has other bytes"]
        figures["global"] = _captured_beside(counted, "global", 1, (ask,))
    return require(figures, *faults)


def _captured_beside(cache: Cache, mode: str, captures: int, works: Sequence[Callable[[], None]]) -> str:
    """``ok``, or what went wrong."""
    with again_and_again(works) as errors:
        said = _capture(cache, mode, captures)
    return said or (f"beside it: {errors[0]}" if errors else "ok")


@contextlib.contextmanager
def again_and_again(works: Sequence[Callable[[], None]]) -> Iterator[list[str]]:
    """Threads do something all the time; the errors that ended them."""
    errors, stop = list[str](), threading.Event()

    def repeat(work: Callable[[], None]) -> None:
        try:
            while not stop.is_set():
                work()
        except RuntimeError as error:
            errors.append(first_line(error))

    threads = [threading.Thread(target=repeat, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield errors
    finally:
        stop.set()
        for thread in threads:
            thread.join(END_S)


def _capture(cache: Cache, mode: str, captures: int) -> str:
    """Capture a graph that counts in the cache, and replay it; what went wrong, or nothing."""
    layer = cache.layers[COUNTED]
    try:
        for at in range(captures):
            layer.zero_()
            torch.cuda.synchronize(cache.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode=mode):
                for _ in range(50):
                    layer.add_(1)
            graph.replay()
            torch.cuda.synchronize(cache.device)
            if not bool((layer == 50).all()):
                return f"graph {at} has counted wrongly"
    except RuntimeError as error:
        return first_line(error)
    return ""


def capture_whole(device: torch.device) -> Figures:
    """A whole forward is one graph: what is copied out after a replay is what the replay wrote, each time."""
    if device.type != "cuda":
        raise LeftOutError("a CPU captures no graphs")
    cache, out = Cache(device), host(IDS.size, device)
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
        mark, _ = cache.gather([(IDS, out)])
        cache.memory.fence()
        wait_done(mark)
        wrong += bytes(out.view) != packed(IDS, 1, replay)
    figures = {"replays": REPLAYS, "layers": LAYERS, "wrong": wrong}
    return require(figures, f"{wrong} copies have other bytes" if wrong else None)


def first_line(error: Exception) -> str:
    """What an error of CUDA's begins with; the rest is the same for all."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
