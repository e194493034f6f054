"""What a router's processor spends on heartbeats: 1,000 agents over real sockets, CURVE on, with the default intervals.

A whole router with the default settings, without requests, runs in a process of its own; its processor time counts all of
its threads, so ZMQ's and the encryption are in it, and what the router does anyway (``beats_idle_core_share``). The agents
are CURVE DEALERs with an agent's socket options; each beats every 3 s, spread evenly, and reads its acknowledgements.
Before the window everybody has joined, so what is counted is the steady state: beats that say nothing new but their load.

    python lab/bench/router/beats.py [AGENTS] [SECONDS]
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection

AGENTS = 1000
WINDOW_S = 30.0
INTERVAL_S = 3.0
JOIN_S = 120.0
SERVICE = "bench"


def measure(agents: int = AGENTS, window_s: float = WINDOW_S) -> dict[str, float]:
    """Run once: ``beats_1000_core_share`` (processor seconds per second), and what it is made of.

    Raises:
        RuntimeError: not every agent was heard, or beats were lost: the figures would say nothing.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    router = spawn.Process(target=_router, args=(theirs, window_s), daemon=True)
    router.start()
    try:
        port = _receive(ours, 30.0)
        mine, yours = spawn.Pipe()
        crowd = spawn.Process(target=_crowd, args=(yours, port, agents), daemon=True)
        crowd.start()
        try:
            deadline = time.monotonic() + JOIN_S
            while True:
                ours.send("count")
                if (known := _receive(ours, 30.0)) == agents:
                    break
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{known} of {agents} agents were heard within {JOIN_S:g} s")
                time.sleep(0.5)
            time.sleep(2 * INTERVAL_S)
            ours.send("measure")
            figures: dict[str, float] = _receive(ours, window_s + 60.0)
            mine.send("stop")
            unacked = _receive(mine, 30.0)
        finally:
            crowd.kill()
            crowd.join()
    finally:
        router.kill()
        router.join()
    expected = agents * window_s / INTERVAL_S
    if figures["beats"] < 0.9 * expected:
        raise RuntimeError(f"{figures['beats']:.0f} beats were heard, {expected:.0f} were due: the machine is too busy")
    return {f"beats_{agents}_core_share": round(figures["share"], 5), "beats_us_each": round(figures["us"], 2),
            "beats_heard": figures["beats"], "beats_unacked": unacked, "beats_idle_core_share": round(figures["idle"], 5)}


def _receive(end: Connection, timeout_s: float):  # type: ignore[no-untyped-def]
    if not end.poll(timeout_s):
        raise RuntimeError(f"no answer within {timeout_s:g} s")
    return end.recv()


def _router(end: Connection, window_s: float) -> None:
    import asyncio  # noqa: PLC0415

    import uvloop  # noqa: PLC0415

    async def run() -> None:
        from xpyd_sidecar.contract import keys  # noqa: PLC0415
        from xpyd_sidecar.contract.launch import RouterConfig, SidecarConfig  # noqa: PLC0415
        from xpyd_sidecar.contract.membership import Up  # noqa: PLC0415
        from xpyd_sidecar.router.app import RouterProcess  # noqa: PLC0415

        loop = asyncio.get_running_loop()
        router = RouterProcess(SidecarConfig(service=SERVICE, instance="r0", key_file="", run_dir="", router=RouterConfig(
            host="127.0.0.1", port=0, members_port=0, admin_port=0)), keys.ServiceKey(bytes(32)))
        take, taken = router.context.watch.on_message, 0

        def counted(message: Up) -> int:
            nonlocal taken
            taken += 1
            return take(message)

        router.members._take = counted

        async def window(seconds: float) -> tuple[float, float, int]:
            before, at, count = time.process_time(), time.perf_counter(), taken
            await asyncio.sleep(seconds)
            return time.process_time() - before, time.perf_counter() - at, taken - count

        await router.start()
        idle_cpu, idle_s, _ = await window(2.0)
        end.send(router.members_port)
        while True:
            asked = await loop.run_in_executor(None, end.recv)
            if asked == "count":
                end.send(len(router.context.roster.members()))
            else:
                cpu, seconds, beats = await window(window_s)
                end.send({"share": cpu / seconds, "us": 1e6 * cpu / max(1, beats), "beats": beats,
                          "idle": idle_cpu / idle_s})

    uvloop.run(run())


def _crowd(end: Connection, port: int, agents: int) -> None:
    import msgspec  # noqa: PLC0415
    import zmq  # noqa: PLC0415

    from xpyd_sidecar.agent.beats import dealer  # noqa: PLC0415
    from xpyd_sidecar.contract import keys  # noqa: PLC0415
    from xpyd_sidecar.contract.ids import Role, State  # noqa: PLC0415
    from xpyd_sidecar.contract.membership import Heartbeat, Load  # noqa: PLC0415

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4 * agents + 64)
    encode = msgspec.msgpack.Encoder().encode
    sockets = []
    for index in range(agents):
        socket = dealer(context, keys.ServiceKey(bytes(32)), INTERVAL_S)
        socket.connect(f"tcp://127.0.0.1:{port}")
        sockets.append(socket)
        if index % 20 == 19:
            time.sleep(0.02)  # handshakes cost the router a millisecond each
    sent = acked = seq = 0
    beat = Heartbeat(
        v=1, service=SERVICE, instance="", seq=0, role=Role.DECODE, epoch=1, state=State.READY, incarnation="f" * 32,
        http=("10.0.0.1:8000",), control=("10.0.0.1:4000",), model="some/model", max_model_len=32768, fingerprint="a" * 32,
        agent="0" * 20)
    began = time.monotonic()
    while not end.poll(0):
        for index, socket in enumerate(sockets):
            due = began + INTERVAL_S * (seq + index / agents)
            while (wait := due - time.monotonic()) > 0:
                time.sleep(wait)
            while socket.poll(0):
                socket.recv()
                acked += 1
            try:
                socket.send(encode(msgspec.structs.replace(
                    beat, instance=f"bench-e{index}", seq=seq, role=(Role.PREFILL, Role.DECODE)[index % 2],
                    load=Load(running=seq % 7, waiting=index % 3, kv_usage=0.5))), zmq.NOBLOCK)
                sent += 1
            except zmq.Again:  # not connected yet: ZMQ_IMMEDIATE
                continue
        seq += 1
    time.sleep(0.5)
    for socket in sockets:
        while socket.poll(0):
            socket.recv()
            acked += 1
        socket.close(linger=0)
    end.send(sent - acked)


if __name__ == "__main__":
    print(json.dumps(measure(*(kind(arg) for kind, arg in zip((int, float), sys.argv[1:], strict=False)))))
