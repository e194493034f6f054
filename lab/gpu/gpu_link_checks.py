"""KV from GPU to GPU over NCCL, by the connector's own sender and receiver, on two GPUs or on one.

On one, NCCL is told that the two processes are on different hosts, and moves through sockets: its figures say nothing of
two. On a CPU the same goes over the links of a host, which tries the check itself.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from gpu_link import OPTIONS, TIMEOUT_S, Process
from gpu_seen import Figures, NotHeldError, held

from xpyd_sidecar.engine.nccl_setup import most_bytes
from xpyd_sidecar.kv.groups import group_bytes
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.transport.nccl.driver import load

TURNS = (1, 2, 3)
MIB = 2**20


def link(device: torch.device, block: int, turns: tuple[int, ...] = TURNS) -> Figures:
    """Every block of every layer comes to its place; memory stays within its bound; prefill dies in the middle."""
    cuda = device.type == "cuda"
    if cuda:
        *_, reason = load(device, ctas=OPTIONS.nccl_ctas, piece=8, groups=1, flight=1)
        if reason:
            raise NotHeldError(reason, {})
    count = torch.cuda.device_count() if cuda else 0
    peer = "cuda:1" if count > 1 else str(device)
    p = Process("prefill", str(device), block, apart=count == 1)
    try:
        d = Process("decode", peer, block, apart=count == 1)
    except BaseException:
        p.end()
        raise
    try:
        both = _ask(d, {})["used"]
        figures, wrong = _moves(p, d, turns, "nccl" if cuda else None)
        usage = _ask(d, {})
        most = most_bytes(OPTIONS) - (OPTIONS.nccl_groups - 1) * group_bytes(OPTIONS.nccl_ctas)
        figures |= {"groups": usage["groups"], "nccl_mib": round(usage["bytes"] / MIB, 1),
                    "both_grown_mib": round((usage["used"] - both) / MIB, 1), "at_most_mib": round(most / MIB, 1)}
        if usage["bytes"] > most:
            wrong.append(f"NCCL has {usage['bytes']} bytes, the bound is {most}")
        figures["allocations_after_empty_cache"] = _emptied(p, d, len(turns) + 1)
        more, lost = _killed(p, d, len(turns) + 2)
        return held(figures | more, *wrong, *lost)
    finally:
        p.end()
        d.end()


def _ask(process: Process, order: dict[str, Any]) -> dict[str, Any]:
    process.tell(order)
    return process.hear()


def _moves(p: Process, d: Process, turns: tuple[int, ...], expected: str | None) -> tuple[Figures, list[str]]:
    """Transfers, one after the other."""
    rates, wrong, ways = [], [], set[str]()
    for turn in turns:
        _ask(p, {"turn": turn})
        found = _ask(d, {"turn": turn, **p.hello})
        rates.append(round(sum(found["moved"].values()) / found["seconds"] / 1e9, 3))
        ways |= set(found["moved"])
        if found["outcome"] != Outcome.OK.value or found["wrong"]:
            wrong.append(f"turn {turn}: {found['outcome']}, {found['wrong']} blocks wrong")
    if expected is not None and ways != {expected}:
        wrong.append(f"blocks came over {sorted(ways)}")
    return {"ways": sorted(ways), "gb_s": rates}, wrong


def _emptied(p: Process, d: Process, turn: int) -> int:
    """Allocations of the device in a transfer after torch has given back what it keeps (all was to be taken before)."""
    before = _ask(d, {"empty": True})["allocations"]
    _ask(p, {"turn": turn})
    return int(_ask(d, {"turn": turn, **p.hello})["allocations"] - before)


def _killed(p: Process, d: Process, turn: int) -> tuple[Figures, list[str]]:
    """Prefill dies by kill -9 in the middle of a transfer: decode says so in time, and its group ends."""
    _ask(p, {"turn": turn})
    d.tell({"turn": turn, **p.hello})
    time.sleep(0.02)
    p.end()
    found, wrong = d.hear(), []
    if found["outcome"] not in {Outcome.PEER_LOST.value, Outcome.OK.value} or found["seconds"] >= 2 * TIMEOUT_S:
        wrong.append(f"after kill -9 of prefill decode says {found['outcome']}, after {found['seconds']:.2f} s")
    end = time.monotonic() + 2 * TIMEOUT_S
    groups = _ask(d, {})["groups"]
    while groups and time.monotonic() < end:
        time.sleep(0.2)
        groups = _ask(d, {})["groups"]
    if groups:
        wrong.append(f"{groups} groups are left after kill -9 of prefill")
    return {"killed": found["outcome"], "killed_s": round(found["seconds"], 3)}, wrong
