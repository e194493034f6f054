"""1P1D behind its router, started by ``xpyd up``, and one plain engine beside it with the same arguments."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from lab.gpu_engines import clients, figures
from lab.gpu_engines.models import Model, arguments
from lab.gpu_engines.processes import Processes

SERVER: Final = "vllm.entrypoints.launchers.api_server.entry"
XPYD: Final = (sys.executable, "-m", "xpyd_operator.cli.main")
PORT: Final = 11_000
TELLING: Final = re.compile(r'Error\b|ERROR|Traceback|Exception|Fatal|xpyd.*WARN|WARN.*xpyd|"level":"(warning|error)"|'
                            r"/xpyd_sidecar/")
LINK: Final = re.compile(r"come over")
STATUS_S: Final = 30.0


class Service:
    """One model, twice."""

    def __init__(self, name: str, number: int, model: Model, run: Processes, *, folder: Path, models: Path,
                 cpu: bool) -> None:
        """``number``: unlike others' for its ports. ``folder``: for logs."""
        port = PORT + 10 * number
        self.name, self.model = name, model
        self.url, self.plain_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"
        self.args = arguments(model, cpu=cpu)
        self._source, self._run, self._folder, self._port = models / model.folder, run, folder / name, port
        self._up: subprocess.Popen[bytes] | None = None
        self._plain: subprocess.Popen[bytes] | None = None
        self._before: dict[str, Any] = {}

    def document(self) -> dict[str, Any]:
        """What ``xpyd up`` is given. JSON is YAML."""
        return {"apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService", "metadata": {"name": self.name}, "spec": {
            "model": {"source": str(self._source), "servedName": clients.MODEL}, "engine": {"args": self.args},
            "prefill": {"replicas": 1}, "decode": {"replicas": 1},
            "router": {"ports": {"http": self._port, "members": self._port + 5, "admin": self._port + 6}}}}

    def start(self) -> None:
        """Both; waits for nothing."""
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / "service.yaml"
        file.write_text(json.dumps(self.document(), indent=1))
        self._up = self._run.start([*XPYD, "up", "-f", file, "--detach", "--timeout", "3600"], self._folder / "up.log")
        self._plain = self.engine("plain", self._port + 1)

    def engine(self, name: str, port: int, *args: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """An engine with the same arguments and some more, which xpyd knows nothing of."""
        return self._run.start([sys.executable, "-m", SERVER, "--model", self._source, "--served-model-name", clients.MODEL,
                                "--host", "127.0.0.1", "--port", str(port), *self.args, *args],
                               self._folder / f"{name}.log", environ)

    def ready(self) -> bool:
        """Whether both serve.

        Raises:
            Failed: one of them never will.
        """
        assert self._up is not None
        assert self._plain is not None
        ended = self._up.poll()
        if ended:
            raise clients.Failed(f"{self.name}: xpyd up ended with {ended}")
        if (code := self._plain.poll()) is not None:
            raise clients.Failed(f"{self.name}: the plain engine ended with {code}")
        if ended is None and (died := self._restarts()):
            raise clients.Failed(f"{self.name}: {died}")
        return ended == 0 and clients.serves(self.plain_url)

    def _restarts(self) -> str:
        """An engine that came to an end while it started: it will do so again."""
        for log in self._home().glob("instances/*/engine.log"):
            if b"EngineCore failed to start" in (text := log.read_bytes()) or b"Engine core initialization failed" in text:
                return f"{log.parent.name} cannot start"
        return ""

    def _home(self) -> Path:
        return Path(self._run.environ["XPYD_HOME"]) / self.name

    def status(self) -> list[dict[str, Any]]:
        """Rows of ``xpyd status``: name, role, address, pid, state, log."""
        found = json.loads(self._run.call([*XPYD, "status", self.name, "-o", "json"], STATUS_S) or "{}")
        rows: list[dict[str, Any]] = found.get("instances", [])
        return rows

    def traces(self, count: int) -> list[str]:
        """Where the time of the last requests went, as ``xpyd trace`` shows it."""
        return (self._run.call([*XPYD, "trace", self.name, "--last", str(count)], STATUS_S) or "none").splitlines()

    def counters(self) -> dict[str, dict[str, float]]:
        """What each engine counts of hand-overs, by role; ``unreachable`` where one does not answer."""
        out = {}
        for row in self.status():
            try:
                out[str(row["role"])] = figures.samples(clients.get(f"http://{row['address']}/metrics"))
            except OSError:
                out[str(row["role"])] = {"unreachable": 1.0}
        return out

    def held(self, limit_s: float) -> dict[str, dict[str, float]]:
        """What engines still hold once nothing is left, or after so long; by role, empty where all is gone."""
        end = time.monotonic() + limit_s
        while True:
            left = {role: what for role, counted in self.counters().items() if (what := figures.held(counted))}
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.5)

    def links(self) -> list[str]:
        """What engines say of the way by which blocks come."""
        return [line for _, path in self.logs() for line in telling(path, 1, LINK)]

    def logs(self) -> Iterator[tuple[str, Path]]:
        """Every log there is of it, with a name."""
        for path in sorted(self._folder.glob("*.log")):
            yield f"{self.name}.{path.stem}", path
        for path in sorted(self._home().rglob("*.log")):
            yield f"{self.name}.{'.'.join(path.relative_to(self._home()).with_suffix('').parts)}", path


def telling(path: Path, most: int, what: re.Pattern[str] = TELLING) -> list[str]:
    """The lines of a log that tell of faults, the last ones, each cut."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        return [str(error)]
    return [line[:260] for line in lines if what.search(line)][-most:]
