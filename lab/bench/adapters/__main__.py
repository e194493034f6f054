"""How often engines fetch another LoRA adapter into a place of their batch: 1,000 adapters over 8 prefill and 8 decode
instances with 64 places each (8P8D), asked for by a law of Zipf, through the router's own picker.

    fetches      share of legs whose instance did not have the adapter; an engine gives up the one used longest ago
    known        fetches of who knows how often each adapter is asked for, and keeps the 512 commonest in the 512 places of
                 a role, whatever load that gives each instance: no router can have less
    anywhere     the policy ``least_loaded``, which is not told of adapters
    most_load    the most that an instance had of the mean number of requests

Engines are played: a request is on each of its two legs' instances until 200 others have come. Routers hear beats, which
tell what was asked for last, after every 50 requests, or every 200 (``late``), and know nothing else of each other.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from lab.bench.processor_time import run_command

from xpyd_sidecar.contract.adapters import AdapterReport
from xpyd_sidecar.contract.ids import AgentId, Fingerprint, HostPort, Incarnation, InstanceName, Role, ServiceName, State
from xpyd_sidecar.contract.membership import WIRE_VERSION, Heartbeat, Load
from xpyd_sidecar.router.api.prompt import PromptPrefix
from xpyd_sidecar.router.balance import policies
from xpyd_sidecar.router.balance.picker import Picker
from xpyd_sidecar.router.fleet.roster import Roster

RESULTS = Path(__file__).resolve().parents[3] / "bench/results" / "adapters.json"
SERVICE = ServiceName("bench")
ADAPTERS, INSTANCES, PLACES = 1000, 8, 64
REQUESTS, WARM, TOGETHER = 40_000, 15_000, 200
BEATS, LATE = 50, 200
NAMES = tuple(f"adapter-{index}" for index in range(ADAPTERS))


class Places:
    """The adapters of one engine's batch."""

    def __init__(self) -> None:
        self.running = 0
        self._held: OrderedDict[str, None] = OrderedDict()

    @property
    def recent(self) -> tuple[str, ...]:
        """As a beat tells them."""
        return tuple(self._held)

    def fetches(self, name: str) -> bool:
        """Compute with an adapter; whether it had to be fetched."""
        had = name in self._held
        self._held[name] = None
        self._held.move_to_end(name)
        if len(self._held) > PLACES:
            self._held.popitem(last=False)
        return not had


def beat(name: str, role: Role, seq: int, places: Places) -> Heartbeat:
    """Of an instance that has all adapters."""
    return Heartbeat(WIRE_VERSION, SERVICE, InstanceName(name), seq, role, 1, State.READY, AgentId("a"),
                     Incarnation(f"i-{name}"), (HostPort("127.0.0.1:1"),), (HostPort("127.0.0.1:2"),), "model", 4096,
                     Fingerprint("f"), load=Load(running=places.running, adapters=places.recent), also=NAMES,
                     adapters=AdapterReport(slots=PLACES))


def fetched(exponent: float, routers: int, policy: str, every: int, seed: int = 7) -> tuple[float, float]:
    """Fetches per leg of both roles, and the most that an instance had of the mean load. ``policy``: empty: one that is not
    told which adapter is asked for. ``every``: requests between two beats.
    """
    draw = Random(seed)
    names = list(NAMES)
    draw.shuffle(names)
    engines = {f"{role.value[0]}{index}": (role, Places()) for role in Role for index in range(INSTANCES)}
    rosters = [Roster(SERVICE, started=0.0, settle_s=0.0, missed_beats=3) for _ in range(routers)]
    pickers = [Picker(roster, policies.make(policy or "least_loaded", {}, draw.random)) for roster in rosters]
    seqs, running, legs, misses, most = count(1), deque[tuple[Any, ...]](), 0, 0, 0.0
    for at, name in enumerate(draw.choices(names, [1 / (rank + 1) ** exponent for rank in range(ADAPTERS)], k=REQUESTS)):
        if at % every == 0:
            for roster in rosters:
                for instance, (role, places) in engines.items():
                    roster.on_message(at / 100, beat(instance, role, next(seqs), places))
        if len(running) == TOGETHER:
            for member, places in running.popleft():
                member.in_flight -= 1
                places.running -= 1
        prefix = PromptPrefix(b"%d" % at)
        pair = pickers[draw.randrange(routers)].selection(prefix, 500, at / 100, name if policy else "").pair(alone=False)
        assert pair is not None
        assert pair.prefill is not None
        both = []
        for target in (pair.decode, pair.prefill):
            places = engines[target.instance][1]
            miss = places.fetches(name)
            target.member.in_flight += 1
            places.running += 1
            both.append((target.member, places))
            if at >= WARM:
                legs, misses = legs + 1, misses + miss
        running.append(tuple(both))
        if at >= WARM:
            most = max(most, max(places.running for _, places in engines.values()) * INSTANCES / max(1, len(running)))
    return misses / legs, most


def measured() -> dict[str, float]:
    """All figures."""
    out: dict[str, float] = {}
    for exponent in (0.8, 1.0, 1.2):
        shares = [1 / (rank + 1) ** exponent for rank in range(ADAPTERS)]
        known = out[f"zipf_{exponent}_known"] = sum(shares[INSTANCES * PLACES:]) / sum(shares)
        for name, routers, policy, every in (("1_router", 1, "cost", BEATS), ("4_routers", 4, "cost", BEATS),
                                             ("4_routers_late", 4, "cost", LATE), ("anywhere", 1, "", BEATS)):
            found, most = fetched(exponent, routers, policy, every)
            out[f"zipf_{exponent}_{name}_fetches"] = found
            out[f"zipf_{exponent}_{name}_over_known"] = found / known
            out[f"zipf_{exponent}_{name}_most_load"] = most
    return out


run_command("How often engines fetch another adapter.", RESULTS, measured)
