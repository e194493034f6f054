"""A prefill or a decode rank over NIXL itself, in a process of its own, which a test may kill, stop, or have lie.

    python nixl_peers.py prefill BLOCK          says its address, then does what it is told, a line of JSON at a time:
        {"push": "a", "count": 4, "ahead": 0}   offers blocks of every array, of their right content; "wrong": of another
        {"shown": {"ticket": "…"}}              shows this of its memory from now on (hex, or as it is)
        {"summed": 0}                           answers when all its copies have their checksums
        {"used": 0}                             answers with the bytes of copies that it holds
        {"memory": 0}                           answers with what it shows of its memory
    python nixl_peers.py decode BLOCK COUNT ADDRESS     asks for them, and says so when some have been read; then waits

UCX_TLS in the environment says what they travel over.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from fair_clock import fair_clock
from kv_ranks import REGIONS, PrefillRank, content, key
from nixl_ranks import PATIENT, NixlProcess

from xpyd_sidecar.contract.ids import HostPort
from xpyd_sidecar.kv.bodies import NixlMemory
from xpyd_sidecar.memory.marks import NOW
from xpyd_sidecar.transport.nixl import driver as nixl_driver
from xpyd_sidecar.transport.nixl.prefill import NixlLink

KEEP: int = 512 << 20


class Peer:
    """The process; killed at the end."""

    def __init__(self, *argv: str, tls: str, site: str) -> None:
        env = os.environ | {"UCX_TLS": tls, "UCX_LOG_FILE": "stderr", "XPYD_NIXL_SITE": site}
        self.process = subprocess.Popen([sys.executable, __file__, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, env=env)

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, **order: Any) -> Any:
        """Have an order carried out; its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.hear())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class PrefillPeer(Peer):
    """A prefill rank."""

    def __init__(self, *, block: int, tls: str, site: str, timeout_s: float = PATIENT.silence_s) -> None:
        super().__init__("prefill", str(block), str(timeout_s), tls=tls, site=site)
        self.address = HostPort(self.hear())


def driver() -> nixl_driver.NixlDriver:
    made, reason = nixl_driver.load()
    if made is None:
        raise RuntimeError(reason)
    return made


def shown(link: NixlLink, changed: dict[str, Any], true: Any = NixlLink.shown) -> NixlMemory:
    memory: NixlMemory = true(link)
    fields = {name: getattr(memory, name) for name in memory.__struct_fields__}
    return NixlMemory(**fields | {name: bytes.fromhex(value) if isinstance(fields[name], bytes) else value
                                  for name, value in changed.items()})


def told(memory: NixlMemory) -> dict[str, Any]:
    fields = {name: getattr(memory, name) for name in memory.__struct_fields__}
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in fields.items()}


def wait_summed(rank: PrefillRank) -> None:
    """What was pushed so far is complete, and its checksums are made: on the loop, one copy after the other."""
    def passed(post: Callable[[Callable[[], None]], None]) -> None:
        reached = threading.Event()
        post(reached.set)
        reached.wait()

    loop = rank.sender._loop
    passed(lambda call: rank.completions.add(NOW, call))
    passed(loop.post)
    while rank.sender._unsummed:
        passed(loop.post)
    passed(loop.post)  # the last one's may still be made


def prefill(block: int, timeout_s: float) -> None:
    changed: dict[str, Any] = {}
    seen: list[NixlMemory] = []

    def show(link: NixlLink) -> NixlMemory:
        seen.append(shown(link, changed))
        return seen[-1]

    NixlLink.shown = show  # type: ignore[method-assign]
    process = NixlProcess(driver(), keep=KEEP, piece=max(block, 1 << 20), limits=PATIENT)
    with process.prefill(block=block, keep_s=60, timeout_s=timeout_s) as rank:
        print(rank.address, flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            answer: Any = None
            if "push" in order:
                count, wrong = order["count"], order.get("wrong", 0)
                for region in range(REGIONS):
                    blocks = [content(region, n + wrong, block) for n in range(count)]
                    rank.copy(key(order["push"], order.get("attempt", 1)), region, 0, blocks)
            elif "shown" in order:
                changed.clear()
                changed.update(order["shown"])
            elif "summed" in order:
                wait_summed(rank)
            elif "memory" in order:
                answer = told(seen[-1])
            else:
                answer = rank.store.used
            print(json.dumps(answer), flush=True)
    process.stop()


def decode(block: int, count: int, address: str) -> None:
    process = NixlProcess(driver(), piece=max(block, 1 << 20), limits=PATIENT)
    with process.decode(block=block, timeout_s=30, load_s=60, chunks=2) as rank:
        rank.load("r", key(), HostPort(address), first=0, count=count)
        while not rank.receiver.inbox:  # two chunks hold the rest up
            time.sleep(0.01)
        print("reads", flush=True)
        time.sleep(120)


def reading(block: int, count: int, address: str, attempt: int) -> None:
    """A decode that says when it asks, and takes all that comes."""
    process = NixlProcess(driver(), piece=max(block, 1 << 20), limits=PATIENT)
    with process.decode(block=block, timeout_s=30, load_s=60, direct=True) as rank:
        print("go", flush=True)
        rank.load("r", key("a", attempt), HostPort(address), first=0, count=count)
        rank.wait_outcomes()
        time.sleep(120)


def main() -> None:
    role, block = sys.argv[1], int(sys.argv[2])
    sys.path.append(os.environ["XPYD_NIXL_SITE"])
    with fair_clock():
        if role == "prefill":
            prefill(block, float(sys.argv[3]))
        elif role == "kill":
            reading(block, int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
        else:
            decode(block, int(sys.argv[3]), sys.argv[4])


if __name__ == "__main__":
    main()
