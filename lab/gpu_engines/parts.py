"""The parts of a run. Each asks services that serve, says what it sees, and puts it down.

    equal    answers of 1P1D and of a plain engine to the same greedy prompts, and of that engine to itself
    times    first and second token by prompt length, in turns
    where    processor time by thread, and stacks, of both engines while long prompts come one after the other
    leave    clients that leave at random; then nothing is held, and answers are what they were
    beside   gaps between the tokens of four streams while four long prompts come
    kill     kill -9 of prefill while it hands over; every request is answered, and decode holds nothing
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from lab.gpu_engines import clients, figures
from lab.gpu_engines.figures import Seen
from lab.gpu_engines.processes import Processes, core_of, threads
from lab.gpu_engines.report import Report
from lab.gpu_engines.services import Service

ANSWERS: Final = 160
LEAVERS: Final = 300
HELD_S: Final = 20.0
PROFILE_S: Final = 8.0
SPY: Final = ("record", "-d", f"{PROFILE_S:.0f}", "-r", "100", "--nonblocking", "-t", "-F", "-f", "raw")
STREAMS, ARRIVALS, STREAM_TOKENS, ARRIVE_S = 4, 4, 300, 0.4
Ask = Callable[[list[int], int], Seen]


class Run(NamedTuple):
    """What parts share. ``scale``: a share of their counts, to try them on a CPU. ``peers``: contenders of ``times``."""

    report: Report
    processes: Processes
    folder: Path
    scale: float = 1.0
    peers: Mapping[str, Ask] = {}

    def of(self, count: int) -> int:
        """A count, scaled."""
        return max(4, round(count * self.scale))


def equal(run: Run, service: Service) -> None:
    """See the module."""
    count, longest = run.of(ANSWERS), min(900, service.model.context - 100)
    first = clients.texts(service.plain_url, count, 16, longest)
    again = clients.texts(service.plain_url, count, 3, longest)
    began = time.monotonic()
    routed = clients.texts(service.url, count, 16, longest)
    took = time.monotonic() - began
    wrong = [n for n, (a, b, r) in enumerate(zip(first, again, routed, strict=True)) if r not in (a, b)]
    found = figures.unlike(first, again, routed) | {
        "failed": sum(text.startswith("failed:") for text in routed),
        "plain_failed": sum(text.startswith("failed:") for text in first), "seconds": round(took, 1)}
    run.report.note("equal", **{service.name: found | {"counters": service.counters()}})
    run.report.say(f"equal {service.name}:", found, *service.links())
    for number in wrong[:2]:
        run.report.say("  prompt", number, "of", len(clients.text_prompt(number, longest)), "tokens:",
                       repr(routed[number][:90]), "plain:", repr(first[number][:50]))


def _ways(run: Run, service: Service) -> dict[str, Ask]:
    return {"plain": lambda prompt, tokens: clients.stream(service.plain_url, clients.body(prompt, tokens)),
            "xpyd": lambda prompt, tokens: clients.stream(service.url, clients.body(prompt, tokens)), **run.peers}


def times(run: Run, service: Service) -> None:
    """See the module. A contender that fails is named and left out."""
    ways, seed = _ways(run, service), 0
    for length, rounds in service.model.lengths:
        found: dict[str, list[Seen]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name in sorted(ways, reverse=bool(number % 2)):
                seed += 1
                try:
                    seen = ways[name](clients.token_prompt(length, seed), 6)
                except clients.Failed as error:
                    run.report.say(f"times: {name} failed at {length} tokens: {error}")
                    run.report.note("times", **{f"{name}_failed": f"{length}: {error}"})
                    ways.pop(name)
                    found.pop(name)
                    break
                if number:  # the first of a length compiles what it needs
                    found[name].append(seen)
        if not any(found.values()):
            break
        row = figures.compared({name: seen for name, seen in found.items() if seen}, "plain")
        row["kv_mib"] = round(length * service.model.kv_token / 2**20, 1)
        run.report.note("times", **{str(length): row})
        run.report.note("traces", **{str(length): service.traces(3)})
        told = [_told(name, one) for name, one in row.items() if isinstance(one, dict)]
        run.report.say(f"{length:6} tokens:", "; ".join(told))
    run.report.note("times", counters=service.counters())


def _told(name: str, row: Mapping[str, Any]) -> str:
    ratio = f" ({row['ttft_ratio']:.3f}x, {row['ttft_more_ms']:+.1f})" if "ttft_ratio" in row else ""
    second = f", 2nd +{row['second_ms']['median']:.1f}" if "second_ms" in row else ""
    return f"{name} {row['ttft_ms']['median']:.1f} ms{ratio}{second}"


def where(run: Run, service: Service) -> None:
    """See the module."""
    cores = {row["role"]: core_of(row["pid"]) for row in service.status() if row["pid"]}
    length = service.model.lengths[0][0]
    spy = shutil.which("py-spy", path=run.processes.environ.get("PATH"))
    if spy is not None:
        for role, pid in cores.items():
            run.processes.start([spy, *SPY, "-p", str(pid), "-o", run.report.folder / f"spy-{role}.txt"],
                                run.folder / f"spy-{role}.log")
    before = {role: threads(pid) for role, pid in cores.items()}
    began, count = time.monotonic(), 0
    while time.monotonic() - began < PROFILE_S and run.report.left() > 15:
        clients.stream(service.url, clients.body(clients.token_prompt(length, 70_000 + count), 2))
        count += 1
    took = time.monotonic() - began
    found: dict[str, Any] = {"prompts": count, "of_tokens": length, "ms_each": round(1e3 * took / count, 1)}
    for role, pid in cores.items():
        found[role] = {"threads": figures.shares(before[role], threads(pid), took)}
    run.report.note("where", **found)
    time.sleep(2.0)  # py-spy writes its file
    for role in cores:
        file = run.report.folder / f"spy-{role}.txt"
        found[role]["stacks"] = figures.folded(file.read_text()) if file.exists() else "py-spy left nothing"
    run.report.note("where", **found)
    run.report.say("where:", {name: value for name, value in found.items() if not isinstance(value, dict)})
    for role in cores:
        for row in found[role]["threads"][:7]:
            run.report.say("  ", role, row)


def leave(run: Run, service: Service) -> None:
    """See the module. Prompts of the timed model are long ones."""
    count = run.of(LEAVERS)
    if service.model.lengths:
        lengths = [length for length, _ in service.model.lengths][:4]
        left = clients.storm(service.url, count // 4, 8,
                             lambda n: clients.token_prompt(lengths[n % len(lengths)], 80_000 + n))
    else:
        left = clients.storm(service.url, count, 24, clients.text_prompt)
    held = service.held(HELD_S)
    checked = run.of(40)
    plain, again, routed = (clients.texts(url, checked, beside, 900) for url, beside in (
        (service.plain_url, 8), (service.plain_url, 3), (service.url, 8)))
    found = {"clients": left._asdict(), "held": held, "after": figures.unlike(plain, again, routed) | {
        "failed": sum(text.startswith("failed:") for text in routed)}}
    run.report.note("leave", **{service.name: found | {"counters": service.counters()}})
    run.report.say(f"leave {service.name}:", found)


def beside(run: Run, service: Service) -> None:
    """See the module. Without a hand-over: prefill's engine computes the arriving prompts for itself, on the same GPU."""
    [prefill] = [f"http://{row['address']}" for row in service.status() if row["role"] == "prefill"]
    longest = min(8192, max(length for length, _ in service.model.lengths))
    tokens, found = run.of(STREAM_TOKENS), dict[str, Any]()
    for name, (stream_url, arrival_url) in {"no_handover": (service.url, prefill), "xpyd": (service.url, service.url),
                                            "plain": (service.plain_url, service.plain_url)}.items():
        def one(number: int, stream_url: str = stream_url, arrival_url: str = arrival_url) -> Seen:
            if number < STREAMS:
                prompt = clients.token_prompt(longest // 16, 90_000 + number)
                return clients.stream(stream_url, clients.body(prompt, tokens))
            time.sleep(ARRIVE_S)
            return clients.stream(arrival_url, clients.body(clients.token_prompt(longest, 91_000 + number), 2))

        for _ in range(2):  # the first compiles
            seen = clients.at_once(one, range(STREAMS + ARRIVALS), STREAMS + ARRIVALS)
        gaps = [gap for stream in seen[:STREAMS] for gap in stream.gaps]
        found[name] = {"gap_ms": figures.milliseconds(gaps), "gap_p99_ms": round(1e3 * figures.percentile(gaps, 0.99), 2),
                       "arrivals_ttft_ms": figures.milliseconds([stream.ttft for stream in seen[STREAMS:]])}
        run.report.note("beside", **found)
        row = found[name]
        run.report.say(f"beside: {name} gaps {row['gap_ms']['median']:.2f} ms, p99 {row['gap_p99_ms']:.2f}; arrivals' TTFT "
                       f"{row['arrivals_ttft_ms']['median']:.0f} ms")
    ratio = round(found["xpyd"]["gap_p99_ms"] / found["no_handover"]["gap_p99_ms"], 3)
    run.report.note("beside", p99_ratio=ratio)
    run.report.say("beside: p99 with a hand-over to p99 without", ratio)


def kill(run: Run, service: Service) -> None:
    """See the module. Prefill's engine does not come back in this run's time."""
    rows = {row["role"]: row for row in service.status()}
    length = max(length for length, _ in service.model.lengths[:3])
    alone = statistics.median(service_time(service, length, 96_000 + n) for n in range(2))

    def one(number: int) -> str:
        if number == 0:
            time.sleep(alone * 0.7)
            os.killpg(os.getpgid(rows["prefill"]["pid"]), signal.SIGKILL)
            return "killed"
        try:
            clients.stream(service.url, clients.body(clients.token_prompt(length, 97_000 + number), 4))
        except clients.Failed as error:
            return f"failed: {error}"
        return "answered"

    outcomes = clients.at_once(one, range(7), 7)[1:]
    held = {role: what for role, what in service.held(HELD_S).items() if role == "decode"}
    failed = [text for text in outcomes if text != "answered"]
    found = {"answered": outcomes.count("answered"), "failed": failed, "held": held}
    run.report.note("kill", **{service.name: found | {"counters": service.counters()}})
    run.report.say(f"kill {service.name}:", found)


def service_time(service: Service, length: int, seed: int) -> float:
    """Seconds to the first token of one prompt, with nothing beside it."""
    return clients.stream(service.url, clients.body(clients.token_prompt(length, seed), 2)).ttft


PARTS: Final[Mapping[str, Callable[[Run, Service], None]]] = {
    "equal": equal, "times": times, "where": where, "leave": leave, "beside": beside, "kill": kill}
LIMITS_S: Final[Mapping[str, float]] = {"equal": 90.0, "times": 150.0, "where": 40.0, "leave": 75.0, "beside": 60.0,
                                        "kill": 75.0}
"""Of a part with one model, on a GPU; after it the next part runs."""
USUAL: Final[Mapping[str, tuple[str, ...]]] = {
    "equal": ("demo", "llama", "gemma", "granite"), "times": ("big",), "where": ("big",), "leave": ("llama", "demo", "big"),
    "beside": ("big",), "kill": ("big",)}
"""The models that each part asks for where none are named."""
