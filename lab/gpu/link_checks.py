"""KV from GPU to GPU by the connector's own publisher and receiver, over NCCL or memory of the host, on two GPUs or on one.

On one, NCCL is told that the two processes are on different hosts, and moves through sockets: its figures say nothing of
two. On a CPU NCCL's place is taken by TCP, which tries the check itself.
"""

from __future__ import annotations

import time
from typing import Final

import torch

from lab.gpu.children import Answer, Child, apart
from lab.gpu.findings import Figures, NotHeldError, require
from lab.gpu.link_ranks import OPTIONS, TIMEOUT_S, TransportName
from xpyd_sidecar.kv.groups import group_bytes
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.transport.nccl.driver import load

TURNS: Final = 3
MIB: Final = 2**20
CPU_BLOCK: Final = 64 << 10
"""The largest one that the check itself is tried with."""


def link(device: torch.device, block: int, transport: TransportName = "nccl", turns: int = TURNS) -> Figures:
    """Every block of every layer comes to its place; memory stays within its bound; prefill dies in the middle."""
    cuda = device.type == "cuda"
    if not cuda:
        transport, block = "tcp" if transport == "nccl" else transport, min(block, CPU_BLOCK)
    elif transport == "nccl":
        *_, reason = load(device, ctas=OPTIONS.nccl_ctas, piece=8, groups=1, flight=1)
        if reason:
            raise NotHeldError(reason, {})
    count = torch.cuda.device_count() if cuda else 0
    places = {"prefill": str(device), "decode": "cuda:1" if count > 1 else str(device)}
    p, d = (Child("link_ranks", role, place, str(block), transport, environ=apart(role) if count == 1 else None)
            for role, place in places.items())
    with p, d:
        address, empty = p.hear(), d.hear()
        figures, faults = _moves(p, d, address, range(1, turns + 1), transport)
        usage = d.ask({})
        most = group_bytes(OPTIONS.nccl_ctas)
        figures |= {"groups": usage["groups"], "nccl_mib": round(usage["bytes"] / MIB, 1),
                    "both_grown_mib": round((usage["used"] - empty["used"]) / MIB, 1), "at_most_mib": round(most / MIB, 1)}
        if usage["bytes"] > most:
            faults.append(f"a group has {usage['bytes']} bytes, the bound is {most}")
        figures["allocations_after_empty_cache"] = _emptied(p, d, address, turns + 1)
        more, lost = _killed(p, d, address, turns + 2)
        return require(figures | more, *faults, *lost)


def _moves(p: Child, d: Child, address: Answer, turns: range, transport: TransportName) -> tuple[Figures, list[str]]:
    """Transfers, one after the other."""
    rates, faults, ways = [], [], set[str]()
    for turn in turns:
        p.ask({"turn": turn})
        found = d.ask({"turn": turn, **address})
        rates.append(round(sum(found["moved"].values()) / found["seconds"] / 1e9, 3))
        ways |= set(found["moved"])
        if found["outcome"] != Outcome.OK.value or found["wrong"]:
            faults.append(f"turn {turn}: {found['outcome']}, {found['wrong']} blocks wrong")
    if ways != {transport}:
        faults.append(f"blocks came over {sorted(ways)}, not {transport}")
    return {"ways": sorted(ways), "gb_s": rates}, faults


def _emptied(p: Child, d: Child, address: Answer, turn: int) -> int:
    """Allocations of the device in a transfer after torch has given back what it keeps (all was to be taken before)."""
    before = d.ask({"empty": True})["allocations"]
    p.ask({"turn": turn})
    return int(d.ask({"turn": turn, **address})["allocations"] - before)


def _killed(p: Child, d: Child, address: Answer, turn: int) -> tuple[Figures, list[str]]:
    """Prefill dies by kill -9 in the middle of a transfer: decode says so in time, and its group ends."""
    p.ask({"turn": turn})
    d.tell({"turn": turn, **address})
    time.sleep(0.02)
    p.kill()
    found, faults = d.hear(), []
    if found["outcome"] not in {Outcome.PEER_LOST.value, Outcome.OK.value} or found["seconds"] >= 2 * TIMEOUT_S:
        faults.append(f"after kill -9 of prefill decode says {found['outcome']}, after {found['seconds']:.2f} s")
    end = time.monotonic() + 2 * TIMEOUT_S
    groups = d.ask({})["groups"]
    while groups and time.monotonic() < end:
        time.sleep(0.2)
        groups = d.ask({})["groups"]
    if groups:
        faults.append(f"{groups} groups are left after kill -9 of prefill")
    return {"killed": found["outcome"], "killed_s": round(found["seconds"], 3)}, faults
