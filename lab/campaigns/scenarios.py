"""The scenario campaign: random hand-overs with faults, on real engines and without, into a results file.

    python -m lab campaign-scenarios --scripted 1000             real connectors and sockets, no engines (5 minutes)
    python -m lab campaign-scenarios --real 1000 --minutes 4     real engines, a part of it; again for the next part
    python -m lab campaign-scenarios --real 300 --link shm       over that link, whatever is better; nixl: over UCX's TCP
    python -m lab campaign-scenarios --real 300 --link 'encrypted tcp'      with kv.encryption
    python -m lab campaign-scenarios --real 500 --model tiny-granite     of a model of several KV cache groups
    … --unequal                                                     each life has an engine of two tensor-parallel ranks
    … --lag stops                                                   and one of them stands still for 1 to 3 s now and then
    … --lag starves                                                 and both get as much of a processor as of a full one
    … --fresh                                                       forget what the file says

All counts are totals, by link: what the file has already is not run again, and each run adds to it. A part with real
engines is one life of three of them, with a router and agents; it ends with a kill -9 of two, one after the other. Figures
of models of several groups are in a file of their own, by model. Exit code 1: something was that may never be
(``scenario``); the logs of such a life stay in ``.cache/scenarios/lives``, and those of all with ``--keep``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from cluster import HEARTBEAT_S, Cluster, Instance  # noqa: E402 (tests/support is not on the path before)
from corpus import Case, Reference, tokens_of  # noqa: E402
from engines import Engine  # noqa: E402
from lab.extras import install  # noqa: E402
from lagging_ranks import lagging, starving  # noqa: E402
from make_model import NAME  # noqa: E402
from model_pairs import FACTS  # noqa: E402
from model_variants import ensure  # noqa: E402
from processes import Group, free_port  # noqa: E402
from real_scenarios import Host, Run, cases  # noqa: E402
from scenario import MUST_BE_ZERO, REAL, TRIES, Fault, Report, draw, summed  # noqa: E402
from traffic import plain_answers  # noqa: E402
from wire import Wire  # noqa: E402

from xpyd_sidecar.contract.ids import HostPort, Role, State  # noqa: E402
from xpyd_sidecar.contract.launch import KvOptions  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "campaign_scenarios.json"
OF_MODELS = RESULTS.with_name("campaign_scenarios_models.json")
"""The same for each model of several groups, by name."""
REFERENCES = ROOT / ".cache" / "scenarios"
LOGS = REFERENCES / "lives"
AT_ONCE = 25
"""Scenarios of one life without engines."""
Mode = Literal["put_async", "put", "get"]


class Kind(NamedTuple):
    """Of engines. ``blocks`` of a cache: so few that they preempt."""

    model: str
    blocks: int
    options: tuple[str, ...] = ("--max-num-batched-tokens", "512")
    modes: tuple[Mode, Mode, Mode] = ("put_async", "put", "get")
    unequal: bool = True
    """They may be of unequal tensor sizes."""
    life: int = 250
    """Scenarios of one life of three of them."""
    cut: bool = False
    """Prefill computes prompts without their last token, so the token that it answers with means nothing."""

    @property
    def args(self) -> tuple[str, ...]:
        """What they are started with."""
        return *self.options, "--num-gpu-blocks-override", str(self.blocks)


def _of_groups(model: str, blocks: int) -> Kind:
    states = not FACTS[model].window
    return Kind(model, blocks, FACTS[model].args, unequal=not states, life=80, cut=states)


KINDS: Final = {one.model: one for one in (
    Kind(NAME, 24), _of_groups("tiny-gemma-3", 42), _of_groups("tiny-gpt-oss", 34), _of_groups("tiny-granite", 27))}
TWO_RANKS = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")
NO_COMPILER: Final = {"TORCHDYNAMO_DISABLE": "1"}
"""Of two ranks, which compile in the middle of requests: nobody is answered for minutes where many engines do so."""
UNEQUAL_EVERY = 4
"""One life in so many has an engine of two tensor-parallel ranks."""
WAVES = 3
"""Between two signals."""
KILLS = 0.3
"""Share of kill -9 among the signals, as long as nobody is being started again."""
Section = dict[str, Any]
LAGS: Final[dict[str, Callable[[Callable[[], Group | None]], contextlib.AbstractContextManager[None]]]] = {
    "": lambda _: contextlib.nullcontext(), "stops": lambda group: lagging(group, random.Random(1)), "starves": starving}
"""What an engine of two ranks may have to bear besides, whichever of its processes it has at the time."""
SEALED: Final = "encrypted tcp"
LINKS: Final = ("auto", "tcp", SEALED, "shm", "nixl")


def environment(link: str) -> dict[str, str]:
    """What engines need for a link besides its name: NIXL, and what UCX shall take for want of RDMA."""
    if link != "nixl":
        return {}
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(install("nixl") / "site"))))
    return {"PYTHONPATH": path, "UCX_TLS": "tcp,sysv,posix"}


def section_of(link: str, lag: str = "") -> str:
    """Where a file has the scenarios on real engines over a link."""
    return ("real" if link == "auto" else f"real over {link}") + (f", with a group that {lag}" if lag else "")


def references(kind: Kind) -> dict[Case, Reference]:
    """What a plain engine answers; asked once, and kept."""
    prompts = cases()
    file = REFERENCES / f"references-{kind.model}.json"
    if not file.exists():
        with tempfile.TemporaryDirectory() as folder, Engine(
                "plain", Path(folder), connector=False, model=ensure(kind.model), args=kind.options) as engine:
            engine.wait_ready()
            found = asyncio.run(plain_answers(engine.url, prompts, at_once=4, timeout_s=600.0))
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps([found[case] for case in prompts], default=lambda one: [one.tokens, one.gaps]))
        written.rename(file)
    told = json.loads(file.read_text())
    return {case: Reference(tuple(tokens), tuple(gaps)) for case, (tokens, gaps) in zip(prompts, told, strict=True)}


class Life:
    """Three engines, of one mode each, and who starts again what was killed."""

    def __init__(self, folder: Path, kind: Kind, number: int, report: Report, link: str, *, unequal: bool = False) -> None:
        """``unequal``: whatever its number is."""
        self.report, self.number = report, number
        self.unequal = unequal or (kind.unequal and number % UNEQUAL_EVERY == UNEQUAL_EVERY - 1)
        self.cluster = Cluster(folder, prefill=0, decode=0, model=ensure(kind.model))
        self.instances: dict[Host, Instance] = {}
        self._restarts: list[threading.Thread] = []
        for name, mode, role in zip("abc", kind.modes, (Role.PREFILL, Role.DECODE, Role.DECODE), strict=True):
            two = self.unequal and name == "b"
            port = free_port()
            wire = None if two else Wire(port, sealed=link == SEALED)
            options = KvOptions(
                mode=mode, transport={"nixl": "rdma", SEALED: "tcp"}.get(link, link),  # type: ignore[arg-type]
                encryption="enabled" if link == SEALED else "disabled",
                keep_bytes=6 << 20, buffer_bytes=4 << 20, host_pool_bytes=2 << 20,
                peer_timeout_s=4.0 if self.unequal else 2.0, load_timeout_s=8.0, claim_s=3.0, keep_ttl_s=15.0,
                **({"data_port": port, "advertise_data": HostPort(f"127.0.0.1:{wire.port}")} if wire is not None else {}))
            fails = number % 2 == 1 and name == "c"
            instance = self.cluster.add(role, options=options, on_load_failure="fail" if fails else "recompute",
                                        args=(*kind.args, *(TWO_RANKS if two else ())),
                                        env=environment(link) | (NO_COMPILER if two else {}))
            self.instances[Host(instance.engine, wire, fails)] = instance
        self.hosts = list(self.instances)

    def restart(self, host: Host) -> None:
        """Start a killed engine again, while the others go on; up when the router knows it so."""
        def work() -> None:
            try:
                again(self.instances[host])
            except AssertionError as error:
                self.report.blame("deaths", f"{host.engine.name} did not start again: {error}")

        def again(instance: Instance) -> None:
            host.engine.start()
            host.engine.wait_ready()
            warmed(host)
            record = host.engine.record()
            assert record is not None
            began = time.monotonic()
            self.cluster.wait_fleet(lambda fleet: any(
                one.instance == instance.name and one.state is State.READY and one.incarnation == record.incarnation
                for one in fleet.instances), 60.0, "known again")
            self.report.rejoined_s.append(round(time.monotonic() - began, 2))
            self.report.lives += 1
            host.up = True

        self._restarts.append(threading.Thread(target=work))
        self._restarts[-1].start()

    def wait_restarts(self) -> None:
        """Until nobody is being started."""
        for thread in self._restarts:
            thread.join(300)

    @contextlib.contextmanager
    def running(self, lag: str = "") -> Iterator[None]:
        """Start all; and end all. ``lag``: what the ranks of the second do meanwhile."""
        try:
            with self.cluster:
                self.cluster.wait_ready()
                for host in self.hosts:
                    warmed(host)
                self.report.lives += len(self.hosts)
                two = self.hosts[1]
                with LAGS[lag](lambda: two.engine.group if two.up else None):
                    yield
                self.wait_restarts()
        finally:
            for host in self.hosts:
                if host.wire is not None:
                    host.wire.close()


def warmed(host: Host) -> None:
    """What an engine compiles once is behind it. It must not count as a hang, nor be in the middle of what is measured."""
    host.engine.complete(tokens_of("warm", 300), 2, timeout_s=600.0)


def keep(folder: Path, name: str) -> None:
    """Put a life's logs where they stay."""
    to = LOGS / f"{name}-{time.strftime('%m%dT%H%M%S')}"
    to.mkdir(parents=True)
    for log in folder.glob("*.log"):
        shutil.copy(log, to)
    sys.stderr.write(f"logs are in {to}\n")


def real(kind: Kind, total: int, have: int, minutes: float, seed: int, *, link: str, unequal: bool = False,
         lag: str = "", kept: bool = False) -> Iterator[Report]:
    """Lives of three engines each until ``total`` scenarios have run or the time is over; what came of each.

    ``unequal``: each has an engine of two ranks; ``lag``: and what happens to it (``LAGS``). ``kept``: logs stay, also
    where nothing was.
    """
    if have >= total:
        return
    known = references(kind)
    end = float("inf")
    while have < total and time.monotonic() < end:
        report = Report()
        source = random.Random(f"{seed} {have} {link}")
        with tempfile.TemporaryDirectory() as folder:
            life = Life(Path(folder), kind, have // kind.life, report, link, unequal=unequal or bool(lag))
            ended = False
            try:
                with life.running(lag):
                    end = min(end, time.monotonic() + minutes * 60)
                    run = Run(life.hosts, known, report, source, cut=kind.cut)
                    try:
                        _live(life, run, min(total - have, kind.life), have, end)
                    finally:
                        run.close()
                ended = True
            finally:
                if kept or not (ended and report.clean):
                    keep(Path(folder), f"{kind.model}-{have}")
        have += report.scenarios
        yield report


def _live(life: Life, run: Run, most: int, first: int, end: float) -> None:
    source, report = run.source, run.report
    wave = 0
    weights = TRIES if life.number % 3 == 0 else REAL
    while report.scenarios < most and time.monotonic() < end:
        wave += 1
        if wave % (WAVES + 1):
            run.wave(draw(source, first + report.scenarios, source.randrange(2, 9), weights))
            continue
        whole = len(run.up) == len(life.hosts)
        kill = whole and source.random() < KILLS and end - time.monotonic() > 90
        ways = [Fault.KILL_PREFILL, Fault.KILL_DECODE] if kill else [Fault.STOP_PREFILL, Fault.STOP_DECODE]
        [scenario] = draw(source, first + report.scenarios, 1, dict.fromkeys(ways, 1))
        victim = source.choice(run.up)
        run.signalled(scenario, victim)
        if kill:
            life.restart(victim)
        show(report)
    life.wait_restarts()
    for way in (Fault.KILL_PREFILL, Fault.KILL_DECODE):
        [scenario] = draw(source, first + report.scenarios, 1, {way: 1})
        run.signalled(scenario, source.choice(run.up))
    for host in run.up:
        run.count(host)


def show(report: Report) -> None:
    """A line of progress."""
    sys.stderr.write(f"{report.scenarios} scenarios, {report.answers_200} answers, "
                     f"{sum(map(len, report.signals.values()))} signals; "
                     f"{ {kind: getattr(report, kind) for kind in MUST_BE_ZERO} }\n")


def scripted(total: int, have: int, seed: int) -> Iterator[Report]:
    """Lives without engines."""
    from scripted_scenarios import run_life

    logging.disable(logging.WARNING)  # a line for each transfer that fails
    while have < total:
        with tempfile.TemporaryDirectory() as folder:
            report = run_life(Path(folder), seed * 1_000_000 + have, have, min(AT_ONCE, total - have))
        have += AT_ONCE
        show(report)
        yield report


def summary(sections: Section) -> Section:
    """The figures that the goals speak of, real and scripted apart."""
    told: Section = {}
    for name, one in sections.items():
        told[name] = {key: one[key] for key in ("scenarios", "answers_200", *MUST_BE_ZERO, "late", "lives", "preemptions",
                                                "transfers", "links") if one.get(key) is not None}
        if one["signals"]:
            told[name]["signals"] = {way: len(times) for way, times in one["signals"].items()}
            for at, what in enumerate(("blocks", "everything")):
                told[name][f"free_{what}_longest_s"] = {way: max(pair[at] for pair in times)
                                                        for way, times in one["signals"].items()}
            told[name]["rejoined_longest_s"] = max(one["rejoined_s"], default=None)
            told[name]["heartbeat_s"] = HEARTBEAT_S
    return told


class Results:
    """A part of a file: all of it, or what it says of a model."""

    def __init__(self, model: str) -> None:
        self._file, self._key = (RESULTS, "") if model == NAME else (OF_MODELS, model)

    def _all(self) -> Section:
        found: Section = json.loads(self._file.read_text()) if self._file.exists() else {}
        return found if self._key else {"": found}

    def sections(self) -> Section:
        """What came of all scenarios so far, real and scripted."""
        return dict(self._all().get(self._key, {}).get("sections", {}))

    def write(self, sections: Section) -> None:
        """Put it there; nothing: forget it. Of another model another process may do so at the same time."""
        self._file.parent.mkdir(exist_ok=True)
        REFERENCES.mkdir(parents=True, exist_ok=True)
        with open(REFERENCES / "results.lock", "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = self._all() | {self._key: {"summary": summary(sections), "sections": sections} if sections else {}}
            whole = {name: one for name, one in sorted(found.items()) if one} if self._key else found[""]
            self._file.write_text(json.dumps(whole, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=int, default=0, help="scenarios on real engines, in all")
    parser.add_argument("--scripted", type=int, default=0, help="scenarios without, in all")
    parser.add_argument("--minutes", type=float, default=60.0, help="of real engines that are ready, in this run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", choices=KINDS, default=NAME, help="of real engines")
    parser.add_argument("--link", choices=LINKS, default="auto", help="of real engines; nixl: rdma over UCX's TCP")
    parser.add_argument("--unequal", action="store_true", help="an engine of two ranks in each life")
    parser.add_argument("--lag", choices=LAGS, default="", help="and what happens to its ranks meanwhile")
    parser.add_argument("--keep", action="store_true", help="the logs of lives, also where nothing was that may never be")
    parser.add_argument("--fresh", action="store_true", help="forget what the file says")
    options = parser.parse_args(arguments)
    if options.scripted and options.model != NAME:
        parser.error("--scripted has no models: leave out --model")
    if (options.unequal or options.lag) and not KINDS[options.model].unequal:
        parser.error(f"{options.model} has states, which need equal ranks: leave out --unequal and --lag")
    results = Results(options.model)
    if options.fresh:
        results.write({})
    over = section_of(options.link, options.lag)
    have = {name: results.sections().get(name, {}).get("scenarios", 0) for name in (over, "scripted")}
    parts = {"scripted": scripted(options.scripted, have["scripted"], options.seed),
             over: real(KINDS[options.model], options.real, have[over], options.minutes, options.seed, link=options.link,
                        unequal=options.unequal, lag=options.lag, kept=options.keep)}
    clean = True
    for name, reports in parts.items():
        for report in reports:
            clean = clean and report.clean
            sections = results.sections()
            sections[name] = summed(sections.get(name, {}), report.told())
            results.write(sections)
    sys.stdout.write(json.dumps(summary(results.sections()), indent=1) + "\n")
    return int(not clean)


if __name__ == "__main__":
    sys.exit(main())
