"""``check-gpu-engines``: real vLLM engines on one GPU, 1P1D behind a router and a plain engine beside it.

    python -m lab check-gpu-engines [PART[:MODEL,…] …] [--seconds S] [--out FOLDER] [--models FOLDER] [--check SCRIPT …]
                                    [--nixl] [--write] [--cpu]

All services are started side by side, then the parts run in the order they are named (all, where none is): equal, times,
where, leave, beside, kill. A part that fails is named, and the next one runs. What is found is written at once, to
result.json in the folder; ends of logs, stacks and all that was said lie beside it. After so many seconds all ends.
``--check`` runs a script, a module (``"-m lab.gpu --only mapped"``), or with tests/… pytest, while they start. ``--nixl``
adds two engines with vLLM's NixlConnector to ``times``. ``--cpu`` tries the driver itself, with one tiny model for all.
Exit code: 0 all parts ran and no answer was lost or wrong; 1 else. docs/development/gpu.md says how it gets to a machine
without a registry, and what each part shows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

from lab.gpu import machine, runner
from lab.gpu_engines import clients
from lab.gpu_engines.models import MODELS, TRIAL, environment
from lab.gpu_engines.parts import LIMITS_S, PARTS, USUAL, Ask, Run
from lab.gpu_engines.processes import Processes
from lab.gpu_engines.report import OutOfTimeError, Report, TooLongError
from lab.gpu_engines.services import Service, telling

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = ROOT / "bench/results/gpu_engines.json"
CLEAN_UP_S: Final = 12.0
CHECK_S: Final = 90.0
START_S: Final = 200.0
TIMED: Final = frozenset({"times", "where", "beside"})
NIXL: Final = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
NIXL_PORT: Final = 11_900
Steps = list[tuple[str, tuple[str, ...]]]


def steps(named: Sequence[str]) -> Steps:
    """Parts with their models, as they are named on the command line.

    Raises:
        ValueError: there is no such part or model.
    """
    out: Steps = []
    for text in named or list(PARTS):
        part, _, models = text.partition(":")
        if part not in PARTS:
            raise ValueError(f"no such part: {part}; there are: {', '.join(PARTS)}")
        chosen = tuple(models.split(",")) if models else USUAL[part]
        if unknown := [model for model in chosen if model not in MODELS]:
            raise ValueError(f"no such model: {', '.join(unknown)}; there are: {', '.join(MODELS)}")
        out.append((part, chosen))
    return out


def wanted(parts: Steps) -> list[str]:
    """The models that parts ask for, in the order in which they are first asked for."""
    return list(dict.fromkeys(model for _, models in parts for model in models))


class Driver:
    """One run."""

    def __init__(self, given: argparse.Namespace, parts: Steps) -> None:
        self._given, self._parts = given, parts
        state = given.out / "state" if given.cpu else Path("/tmp/check-gpu-engines")  # noqa: S108 (of a lent machine)
        shutil.rmtree(state, ignore_errors=True)  # services of an earlier run, which were killed
        self.report = Report(given.out, given.seconds - CLEAN_UP_S)
        paths = [part for part in (os.environ.get("PYTHONPATH", ""),) if part]
        self._processes = Processes({**os.environ, **environment(cpu=given.cpu), "XPYD_HOME": str(state / "home"),
                                     "PYTHONPATH": os.pathsep.join(paths)})
        self._folder = state
        self._services: dict[str, Service] = {}
        self._began, self._start_s = time.monotonic(), START_S * (4 if given.cpu else 1)
        self.failed: list[str] = []

    def run(self) -> None:
        """Everything; what fails is put down."""
        load, self._began = os.getloadavg()[0], time.monotonic()
        for number, name in enumerate(wanted(self._parts)):
            model = TRIAL if self._given.cpu else MODELS[name]
            self._services[name] = Service(name, number, model, self._processes, folder=self._folder,
                                           models=self._given.models, cpu=self._given.cpu)
            self._services[name].start()
        here = runner.run(machine.CHECK, "cpu" if self._given.cpu else "cuda", self._processes.environ)
        self.report.note("machine", load_before=round(load, 2), **here.figures, **({"fault": here.why} if here.why else {}))
        self.report.say("machine:", self.report.found["machine"])
        for script in self._given.check:
            self._guarded(f"check {script}", partial(self._check, script))
        peers = self._nixl() if self._given.nixl else {}
        run = Run(self.report, self._processes, self._folder, 0.1 if self._given.cpu else 1.0, peers)
        for part, models in self._parts:
            for name in self._services if part in TIMED else models:  # who still starts takes processors from who is timed
                self._guarded(f"start {name}", partial(self._wait, name))
            for name in models:
                if f"start {name}" not in self.failed:
                    self._guarded(f"{part} {name}", partial(PARTS[part], run, self._services[name]),
                                  LIMITS_S[part] * (10 if self._given.cpu else 1))

    def over(self, _signal: int, _frame: FrameType | None) -> None:
        """A signal has come: the time of a part is over, or that of the run."""
        if self.report.left() > 1.0 and _signal == signal.SIGALRM:
            raise TooLongError("it takes too long")
        raise OutOfTimeError

    def _guarded(self, name: str, work: Callable[[], None], limit_s: float = 3600.0) -> None:
        """Do something, or put down why not. What has failed is not done again."""
        if name in self.failed:
            return
        began = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, max(1.0, min(limit_s, self.report.left())))
        try:
            work()
        except Exception as error:  # noqa: BLE001 (it is named in the result, and makes the exit code 1)
            self.failed.append(name)
            self.report.say(f"{name} FAILED: {type(error).__name__}: {error}")
            if not isinstance(error, clients.Failed):
                self.report.say(traceback.format_exc())
            self.report.note("failed", **{name: f"{type(error).__name__}: {error}"[:800]})
            self._show(name)
            return
        if not name.startswith("start"):
            self.report.say(f"{name}: {time.monotonic() - began:.0f} s; {self.report.left():.0f} s left")

    def _check(self, script: str) -> None:
        how = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"] if script.startswith("tests/") else []
        done = subprocess.run([sys.executable, *how, *script.split()], cwd=ROOT, env=self._processes.environ, check=False,
                              capture_output=True, text=True, timeout=min(CHECK_S, self.report.left()))
        self.report.say(f"check {script}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-2500:]}")
        self.report.note("checks", **{script: {"exit_code": done.returncode, "said": done.stdout[-2000:]}})
        if done.returncode:
            raise clients.Failed(f"exit code {done.returncode}")

    def _wait(self, name: str) -> None:
        """Until a service serves."""
        service = self._services[name]
        if name in self.report.found.get("serving_after_s", {}):
            return
        while not service.ready():
            if time.monotonic() - self._began > self._start_s:
                raise clients.Failed(f"it does not serve after {self._start_s:.0f} s")
            time.sleep(0.5)
        at = round(time.monotonic() - self._began, 1)
        self.report.note("serving_after_s", **{name: at})
        self.report.say(f"{name} serves, {at} s after its start")

    def _nixl(self) -> Mapping[str, Ask]:
        """Two engines with vLLM's own connector beside the timed model, as a contender once they serve."""
        service, urls, waited = self._services["big"], [f"http://127.0.0.1:{NIXL_PORT + n}" for n in range(2)], [False]
        config = json.dumps(NIXL | ({"kv_buffer_device": "cpu"} if self._given.cpu else {}))
        for number, role in enumerate(("prefill", "decode")):
            environ = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "UCX_TLS": "all",
                       "VLLM_NIXL_SIDE_CHANNEL_PORT": str(15_600 + 100 * number)}
            service.engine(f"nixl-{role}", NIXL_PORT + number, "--kv-transfer-config", config, environ=environ)

        def ask(prompt: list[int], tokens: int) -> Any:
            while not waited[0] and not all(map(clients.serves, urls)):
                if self.report.left() < 60:
                    raise clients.Failed("it does not serve")
                time.sleep(0.5)
            waited[0] = True
            return clients.two_legs(urls[0], urls[1], prompt, tokens)

        return {"nixl": ask}

    def _show(self, name: str) -> None:
        """Pack all logs, and print what a service's tell of faults."""
        self.report.keep([found for service in self._services.values() for found in service.logs()])
        service = self._services.get(name.rpartition(" ")[2])
        for log, path in service.logs() if service is not None else ():
            if lines := telling(path, 9):
                self.report.say(f"{log}:\n" + "\n".join(f"    | {line}" for line in lines))

    def end(self) -> None:
        """End what was started, and keep the logs."""
        self.report.keep([found for service in self._services.values() for found in service.logs()])
        killed = self._processes.end()
        self.report.note("machine", processes_at_the_end=killed, load_at_the_end=round(os.getloadavg()[0], 1))
        self.report.say(f"ended; {killed} processes were there; failed: {', '.join(self.failed) or 'nothing'}")


def right(found: Mapping[str, Any]) -> bool:
    """Whether no answer was lost, nothing was held, and routed answers differ no more than a plain engine's from itself."""
    rows = list(found.get("equal", {}).values())
    left = [row for part in ("leave", "kill") for row in found.get(part, {}).values()]
    return (all(not row["failed"] and row["routed_unlike_plain"] <= max(2, row["plain_unlike_itself"]) for row in rows)
            and not any(row["held"] or row.get("failed") or row.get("after", {}).get("failed") for row in left))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="with :MODEL,… for some models alone")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which all ends (600)")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache/gpu-engines/out")
    parser.add_argument("--models", type=Path, default=ROOT.parent / "models")
    parser.add_argument("--check", action="append", default=[], metavar="SCRIPT")
    parser.add_argument("--nixl", action="store_true")
    parser.add_argument("--write", action="store_true", help="record bench/results/gpu_engines.json")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args(arguments)
    try:
        parts = steps(given.parts)
    except ValueError as error:
        parser.error(str(error))
    if given.nixl and "big" not in wanted(parts):
        parser.error("--nixl is for the part times, with the model big")
    if given.write and (given.cpu or given.parts):
        parser.error("--write records all parts of a GPU: neither --cpu nor names of parts go with it")
    driver = Driver(given, parts)
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, driver.over)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, driver.report.left()))
    try:
        driver.run()
    except OutOfTimeError:
        driver.failed.append("out of time")
        driver.report.say("out of time")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        driver.end()
    if given.write:
        RESULTS.write_text(json.dumps(driver.report.found, indent=1) + "\n")
    ok = not driver.failed and right(driver.report.found)
    sys.stdout.flush()
    os._exit(0 if ok else 1)  # threads of clients may still wait for answers


if __name__ == "__main__":
    main()
