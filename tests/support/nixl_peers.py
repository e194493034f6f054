"""A prefill or a decode rank over NIXL itself, in a process of its own, which a test may kill, stop, or have lie.

    python nixl_peers.py prefill HEAD RANKS      says where it listens, then does what it is told, a line of JSON at a time:
        {"push": 1, "count": 4}                 computes blocks of every array
        {"shown": {"ticket": "…"}}              shows this of its memory from now on (hex, or as it is)
        {"summed": 0}                           answers when all its copies have their sums
        {"used": 0}                             answers with the bytes of copies that it holds
        {"memory": 0}                           answers with what it has shown of its memory last
    python nixl_peers.py decode HEAD COUNT ADDRESS LIFE   asks for them, and says so when some have been read; then waits

HEAD: bytes of a head. UCX_TLS in the environment says what they travel over.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import Any, Self

from fair_clock import fair_clock
from manifest_ranks import PrefillRank, key, wait_until
from nixl_ranks import PATIENT, NixlProcess

from xpyd_sidecar.contract.ids import HostPort, Incarnation
from xpyd_sidecar.kv.session_bodies import NixlMemory
from xpyd_sidecar.transport.nixl import driver as nixl_driver
from xpyd_sidecar.transport.nixl import thread as nixl_thread
from xpyd_sidecar.transport.nixl.serve import NixlServer

STORE: int = 512 << 20
SMALL_STORE: int = 1 << 20
MANY_POLL_S = 0.005
"""Between two looks of each of many threads, which share two processors."""


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


class PlacedRank:
    """One of its ranks (``manifest_ranks.RankPlace``)."""

    def __init__(self, address: str, life: str) -> None:
        self.place = HostPort(address), Incarnation(life)


class PrefillPeer(Peer):
    """A prefill process with some ranks, of which orders are for the first, but ``push``, which is for all."""

    def __init__(self, *, head_bytes: int, tls: str, site: str, timeout_s: float = PATIENT.silence_s,
                 ranks: int = 1) -> None:
        super().__init__("prefill", str(head_bytes), str(ranks), str(timeout_s), tls=tls, site=site)
        self.ranks = [PlacedRank(*self.hear().split()) for _ in range(ranks)]
        self.place = self.ranks[0].place


def driver() -> nixl_driver.NixlDriver:
    made, reason = nixl_driver.load()
    if made is None:
        raise RuntimeError(reason)
    return made


def changed_memory(memory: NixlMemory, changed: dict[str, Any]) -> NixlMemory:
    fields = {name: getattr(memory, name) for name in memory.__struct_fields__}
    return NixlMemory(**fields | {name: bytes.fromhex(value) if isinstance(fields[name], bytes) else value
                                  for name, value in changed.items()})


def in_json(memory: NixlMemory) -> dict[str, Any]:
    fields = {name: getattr(memory, name) for name in memory.__struct_fields__}
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in fields.items()}


def wait_summed(rank: PrefillRank) -> None:
    """What was pushed so far has its sums: made on the loop, one copy after the other."""
    loop = rank.publisher._loop

    def passed() -> None:
        reached = threading.Event()
        loop.post(reached.set)
        reached.wait()

    passed()
    while rank.publisher._unsummed:
        passed()
    passed()  # the last one's may still be made


def prefill(head_bytes: int, ranks: int, timeout_s: float) -> None:
    changed: dict[str, Any] = {}
    seen: list[NixlMemory] = []
    true = NixlServer.descriptor

    def show(server: NixlServer, cell: int) -> NixlMemory:
        seen.append(changed_memory(true(server, cell), changed))
        return seen[-1]

    NixlServer.descriptor = show  # type: ignore[method-assign]
    if ranks > 1:
        nixl_thread.POLL_S = MANY_POLL_S  # type: ignore[misc]
    size = STORE if ranks == 1 else SMALL_STORE
    made = [NixlProcess(driver()).prefill(head_bytes=head_bytes, store_bytes=size, timeout_s=timeout_s, grace_s=timeout_s)
            for _ in range(ranks)]
    for rank in made:
        print(*rank.place, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer: Any = None
        if "push" in order:
            for rank in made:
                rank.compute(key(order["push"]), 0, order["count"], layers=1)
        elif "shown" in order:
            changed.clear()
            changed.update(order["shown"])
        elif "summed" in order:
            wait_summed(made[0])
        elif "memory" in order:
            answer = in_json(seen[-1])
        else:
            answer = sum(rank.store.used_bytes for rank in made)
        print(json.dumps(answer), flush=True)


def decode(head_bytes: int, count: int, source: PlacedRank) -> None:
    rank = NixlProcess(driver()).decode(head_bytes=head_bytes, blocks=count, timeout_s=30.0, piece=1 << 20)
    rank.want(key(), source, tuple(range(count)))
    wait_until(lambda: rank.receiver.inbox, 60)
    print("reads", flush=True)
    time.sleep(120)


def main() -> None:
    role, head_bytes, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    sys.path.append(os.environ["XPYD_NIXL_SITE"])
    with fair_clock():
        if role == "prefill":
            prefill(head_bytes, count, float(sys.argv[4]))
        else:
            decode(head_bytes, count, PlacedRank(*sys.argv[4:]))


if __name__ == "__main__":
    main()
