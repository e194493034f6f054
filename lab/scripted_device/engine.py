"""One engine process: the core's busy loop on its first thread, and beside it the threads that bring and take messages.

The parent sends down a pipe what vLLM's front end would send over a socket, as msgpack; "count", for which it gets the
process's counters, and "anew", with which their spans begin anew. Outputs go back as they are made, with the time.
"""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from lab.scripted_device import counting, device, engine_loop
from lab.scripted_device.byte_work import ByteWork
from lab.scripted_device.counting import Counters
from xpyd_sidecar.contract import launch

STOP = b"stop"
COUNT = b"count"
ANEW = b"anew"


def main(name: str, folder: Path, config: VllmConfig, pipe: Connection, room: int) -> None:
    """Serve until STOP comes. ``folder``: with the service's key, and for its record; ``room``: as of ``install``."""
    os.environ |= {launch.ENV_RUN_DIR: str(folder), launch.ENV_KEY_FILE: str(folder / "key"),
                   launch.ENV_HOST: "127.0.0.1", launch.ENV_INSTANCE: name}
    threading.current_thread().name = counting.ENGINE
    counters = Counters()
    work = ByteWork(counters)
    scripted = device.ScriptedDevice(counters)
    work.watch()
    counting.watch(counters)
    device.install(scripted, work, room)
    core = engine_loop.engine_core(config, scripted, counters)
    gc.collect()
    gc.freeze()  # as EngineCore.__init__ does
    tell = Told(pipe)
    threading.Thread(target=_take_in, args=(core, pipe, tell, counters), name="input", daemon=True).start()
    threading.Thread(target=_put_out, args=(core, tell), name="output", daemon=True).start()
    tell(("ready", work.late_s, None))
    try:
        core.run_busy_loop()
    except SystemExit:
        core.scheduler.shutdown()
        core.model_executor.shutdown()


class Told:
    """The pipe to the parent, for several threads."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def __call__(self, message: tuple[str, float, Any]) -> None:
        """Send (what, when, more)."""
        with self._lock:
            self._pipe.send(message)


def _take_in(core: EngineCoreProc, pipe: Connection, tell: Told, counters: Counters) -> None:
    """As ``process_input_sockets``."""
    decoder = MsgpackDecoder(EngineCoreRequest)
    while True:
        message: Any = pipe.recv_bytes()
        if message == COUNT:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            tell(("count", time.monotonic(), counters.taken() | {"rss": peak}))
        elif message == ANEW:
            counters.anew()
        elif message == STOP:
            core.shutdown_state = EngineShutdownState.SHUTTING_DOWN
            core.input_queue.put((EngineCoreRequestType.WAKEUP, None))
            return
        else:
            core.input_queue.put_nowait((EngineCoreRequestType.ADD, core.preprocess_add_request(decoder.decode([message]))))


def _put_out(core: EngineCoreProc, tell: Told) -> None:
    """As ``process_output_sockets``: everything is encoded, and what has tokens is told."""
    encoder = MsgpackEncoder()
    while True:
        found: Any = core.output_queue.get()
        outputs = found[1]
        encoder.encode(outputs)
        now = time.monotonic()
        for one in outputs.outputs:
            tell(("token", now, (one.request_id, len(one.new_token_ids), one.finish_reason is not None)))
