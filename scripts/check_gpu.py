"""``make check-gpu``: KV from GPU to GPU over NCCL, by the connector's own sender and receiver, on a machine without vLLM.

Needs torch with CUDA, nccl4py, and what ``requirements/sidecar.in`` names; nothing else. Two processes, each with a small
KV cache, on two GPUs or on one (NCCL is then told that they are on different hosts, and moves through sockets: figures of
one GPU say nothing of two). What is checked:

    bytes      every block of every layer is in its place, for blocks of 16 KiB to 1 MiB; GB/s from READY to commit
    ordering   blocks written by kernels that still run, and written over right after the copy was ordered
    memory     GPU memory of the group, as NCCL says and as the device shows, beside the bound that docs state
    kill -9    prefill dies in the middle: decode reports the load as lost and its group ends

Exit code: 0 all of it held; 1 something did not, or there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, TransferId
from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine import memory
from xpyd_sidecar.engine.arrivals import Arrived
from xpyd_sidecar.engine.bounds import Chunk, Mark, Staging
from xpyd_sidecar.engine.links.nccl_driver import load
from xpyd_sidecar.engine.memory import Memory
from xpyd_sidecar.engine.receiver import Receiver
from xpyd_sidecar.engine.sender import Kept, Sender
from xpyd_sidecar.engine.session import Me
from xpyd_sidecar.engine.ways import choose, most_bytes
from xpyd_sidecar.kv.copies import Copy
from xpyd_sidecar.kv.keys import Key, Outcome
from xpyd_sidecar.kv.mapping import Cut, Part
from xpyd_sidecar.kv.receiving import Finished, From, Instruction, Order, Receiving
from xpyd_sidecar.kv.sending import Sending

LAYERS, BLOCKS, COUNT = 8, 128, 64
SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
TIMEOUT_S = 5.0
OPTIONS = KvOptions(peer_timeout_s=TIMEOUT_S)
ONE = KvOptions(nccl_groups=1)
KEY = bytes(32)


def pattern(layer: int, block: int) -> int:
    """What a block is filled with."""
    return layer * 1000 + block


def key_of(turn: int) -> Key:
    """Of one transfer."""
    return Key(TransferId(f"{turn:032x}"), Attempt(1), 1)


class Rank:
    """One process: a cache, and sender or receiver."""

    def __init__(self, device: torch.device, block: int) -> None:
        shape = (BLOCKS, block // 4)
        self.device = device
        self.caches = {f"layer{n}": torch.zeros(shape, dtype=torch.int32, device=device) for n in range(LAYERS)}
        self.memory = Memory(self.caches, BLOCKS)
        self.ways, self.grouping = choose(OPTIONS, device, self.memory.largest_frame)
        self.me = Me(InstanceName("check"), Incarnation(secrets.token_hex(16)), 0, KEY)


class Prefill(Rank):
    """Sends what it is told to."""

    def __init__(self, device: torch.device, block: int) -> None:
        super().__init__(device, block)
        machine = Sending[Kept](keep_s=60, send_s=60, regions=LAYERS, block_bytes=LAYERS * block, cover=True)
        self.sender = Sender(self.me, machine, host="127.0.0.1", port=0, ways=self.ways, keep_bytes=4 << 30,
                             peer_timeout_s=TIMEOUT_S, largest_frame=self.memory.largest_frame, grouping=self.grouping)

    def push(self, turn: int) -> None:
        """Fill the blocks, by kernels that take a while, have them copied out, and write over them at once."""
        index = self.memory.index(tuple(range(COUNT)))
        for region, cache in enumerate(self.caches.values()):
            for block in range(COUNT):
                cache[block] = -1
            if self.device.type == "cuda":
                torch.cuda._sleep(20_000_000)
            for block in range(COUNT):
                cache[block] = pattern(region, block)
            size = self.memory.block_bytes[region] * COUNT
            if not self.sender.budget.reserve(size):
                raise RuntimeError("no room to keep")
            out = self.memory.copy_out(region, index)
            self.sender.push(key_of(turn), Copy(region, 0, COUNT, Kept(out.data, out.mark)))
        self.memory.fence()
        for cache in self.caches.values():
            cache.fill_(-2)


class Decode(Rank):
    """Loads, and looks at what has come."""

    def __init__(self, device: torch.device, block: int) -> None:
        super().__init__(device, block)
        make = self.memory.largest_frame
        self.staging = Staging(lambda: memory.chunk(make, pinned=device.type == "cuda"), 16)
        self.receiver = Receiver(self.me, self.staging, block_bytes=self.memory.block_bytes, largest_frame=make, cover=True,
                                 peer_timeout_s=TIMEOUT_S, ways=self.ways, caches=self.memory.caches(),
                                 grouping=self.grouping)
        self.loads = Receiving(load_s=60, grace_s=0, regions=LAYERS, cover=True)
        self.block = block
        self.finished: list[Finished] = []
        self.moved: dict[str, int] = {}
        self.placing: list[tuple[Mark, Chunk]] = []

    def load(self, turn: int, address: HostPort, life: Incarnation, limit_s: float = 60.0) -> dict[str, Any]:
        """One transfer into the last blocks, in reverse order; what became of it."""
        ids = tuple(range(BLOCKS - 1, BLOCKS - 1 - COUNT, -1))
        source = From(address, life, (Part(Cut(0, LAYERS, 0, 0, self.block), 0, 0),))
        began = time.monotonic()
        self.moved = {}
        self._carry_out(self.loads.load(Order(f"r{turn}", key_of(turn), 0, ids, (source,), b""), began))
        while len(self.finished) < turn or self.placing:
            self._poll()
            if time.monotonic() - began > limit_s:
                return {"outcome": "nothing came", "seconds": limit_s, "moved": self.moved, "wrong": -1}
        seconds = time.monotonic() - began
        wrong = sum(int((cache[ids[at]] != pattern(layer, at)).any()) for layer, cache in enumerate(self.caches.values())
                    for at in range(COUNT))
        for cache in self.caches.values():
            cache.zero_()
        return {"outcome": self.finished[-1].outcome.value, "seconds": seconds, "moved": self.moved, "wrong": wrong}

    def _poll(self) -> None:
        now = time.monotonic()
        for _ in range(len(self.receiver.inbox)):
            event = self.receiver.inbox.popleft()
            if not isinstance(event, Arrived):
                self._carry_out(self.loads.broken(event.key, event.source, (event.outcome, event.reason), now,
                                                  final=event.final))
                continue
            place = self.loads.arrived(event.key, event.source, event.region, (event.first, event.blocks), event.size)
            if place is not None:
                self.moved[event.way] = self.moved.get(event.way, 0) + event.size
                if event.chunk is not None:
                    mark = self.memory.place(place.region, place.ids, event.chunk, event.size)
                    self.placing.append((mark, event.chunk))
                self._carry_out(self.loads.placed(event.key))
            elif event.chunk is not None:
                self.staging.give(event.chunk)
        while self.placing and self.placing[0][0].done():
            self.staging.give(self.placing.pop(0)[1])
        self._carry_out(self.loads.tick(now))

    def _carry_out(self, steps: Sequence[Instruction]) -> None:
        for step in steps:
            if isinstance(step, Finished):
                self.receiver.close(step.request)
                self.finished.append(step)
            else:
                self.receiver.carry_out(step)

    def usage(self) -> dict[str, int]:
        """Groups and GPU memory, as NCCL counts and as the device shows."""
        usage = self.grouping.usage if self.grouping is not None else None
        free, total = torch.cuda.mem_get_info(self.device) if self.device.type == "cuda" else (0, 0)
        return {"groups": usage.groups if usage else 0, "bytes": usage.memory if usage else 0, "used": total - free}


def child(role: str, device: torch.device, block: int) -> None:
    """Obey lines on stdin, answer each with a line."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank = Prefill(device, block) if role == "prefill" else Decode(device, block)
    say({"address": rank.sender.address, "life": rank.me.incarnation} if isinstance(rank, Prefill) else rank.usage())
    for line in sys.stdin:
        order = json.loads(line)
        if isinstance(rank, Prefill):
            rank.push(order["turn"])
            say({})
        elif "turn" in order:
            say(rank.load(order["turn"], HostPort(order["address"]), Incarnation(order["life"])))
        else:
            say(rank.usage())


def say(answer: dict[str, Any]) -> None:
    """One line."""
    print(json.dumps(answer), flush=True)


class Process:
    """A child."""

    def __init__(self, role: str, device: str, block: int, *, apart: bool) -> None:
        environ = dict(os.environ)
        if apart:
            environ |= {"NCCL_HOSTID": f"check-{role}", "NCCL_SOCKET_IFNAME": "lo"}
        command = [sys.executable, __file__, "--role", role, "--device", device, "--block", str(block)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        self.hello = self.hear()

    def tell(self, order: dict[str, Any]) -> None:
        """Give an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """The next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("check-gpu: a process has ended; see above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """Kill -9."""
        self.process.kill()
        self.process.wait()


def check(devices: tuple[str, str], *, apart: bool) -> bool:
    """Everything; one line for each. Whether all held."""
    held = True

    def line(name: str, good: bool, text: str) -> None:
        nonlocal held
        held &= good
        print(f"{'ok ' if good else 'BAD'} {name:9} {text}", flush=True)

    expected = "nccl" if devices[0].startswith("cuda") else None
    for block in SIZES:
        p, d = Process("prefill", devices[0], block, apart=apart), Process("decode", devices[1], block, apart=apart)
        try:
            found = {}
            for turn in (1, 2, 3):
                p.tell({"turn": turn})
                p.hear()
                d.tell({"turn": turn, **p.hello})
                found = d.hear()
                fine = found["outcome"] == Outcome.OK.value and not found["wrong"]
                fine &= expected is None or set(found["moved"]) == {expected}
                size = sum(found["moved"].values())
                line("bytes", fine, f"{block >> 10} KiB, turn {turn}: {found['outcome']}, {found['wrong']} blocks wrong, "
                                    f"{found['moved']}, {size / found['seconds'] / 1e9:.2f} GB/s")
            d.tell({})
            usage = d.hear()
            most = most_bytes(ONE)
            shown = (usage["used"] - d.hello["used"]) / 2**20
            line("memory", usage["bytes"] <= most, f"{usage['groups']} groups, {usage['bytes'] / 2**20:.1f} MiB by NCCL's "
                 f"count, {shown:.1f} MiB more on the device, at most {most / 2**20:.1f}")
            p.tell({"turn": 4})
            p.hear()
            d.tell({"turn": 4, **p.hello})
            time.sleep(0.02)
            p.end()
            found = d.hear()
            lost = found["outcome"] in {Outcome.PEER_LOST.value, Outcome.OK.value} and found["seconds"] < 2 * TIMEOUT_S
            line("kill -9", lost, f"decode says {found['outcome']} after {found['seconds']:.2f} s")
            end = time.monotonic() + 2 * TIMEOUT_S
            while usage["groups"] and time.monotonic() < end:
                time.sleep(0.2)
                d.tell({})
                usage = d.hear()
            line("abort", not usage["groups"], f"{usage['groups']} groups are left")
        finally:
            p.end()
            d.end()
    return held


def main() -> int:
    """Say what is there, then check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cpu: try the script itself; says nothing of NCCL")
    parser.add_argument("--role", choices=["prefill", "decode"], help=argparse.SUPPRESS)
    parser.add_argument("--block", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        child(given.role, torch.device(given.device), given.block)
        return 0
    if given.device == "cpu":
        return 0 if check(("cpu", "cpu"), apart=False) else 1
    if not torch.cuda.is_available():
        print("check-gpu: there is no CUDA device here; nothing was checked")
        return 1
    _, version, reason = load(torch.device("cuda", 0), ctas=OPTIONS.nccl_ctas, piece=8, groups=1, flight=1)
    if reason:
        print(f"check-gpu: {reason}; nothing was checked")
        return 1
    count = torch.cuda.device_count()
    print(f"{count} of {torch.cuda.get_device_name(0)}, torch {torch.__version__}, NCCL {version}")
    print("two GPUs" if count > 1 else "one GPU for both: through sockets of loopback, not between GPUs")
    return 0 if check(("cuda:0", "cuda:1" if count > 1 else "cuda:0"), apart=count == 1) else 1


if __name__ == "__main__":
    sys.exit(main())
