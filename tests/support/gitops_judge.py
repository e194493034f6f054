"""What Argo CD and Flux think of objects, by their own code (lab/cluster/go/gitops).

    judge = Judge.found()                                   None where the program was not built
    said = judge.of(live, target=document)
    assert (said.synced, said.health, said.flux) == (True, "Healthy", "Current")
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any, Self

import msgspec
import yaml
from testcluster import build

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ROOT / "manifests/gitops/argocd-cm.yaml"
Object = dict[str, Any]


class Verdict(msgspec.Struct):
    """Of one object."""

    synced: bool
    health: str
    message: str
    flux: str
    before: Any = None
    """Where it is not synced: the live object as it is compared."""
    after: Any = None
    """What a sync would make of it."""


class Judge:
    """See the module."""

    def __init__(self, program: Path) -> None:
        self._program = program
        data = yaml.safe_load(SETTINGS.read_text())["data"]
        self._scripts = {key.rpartition("_")[2]: text for key, text in data.items()}

    @classmethod
    def found(cls) -> Self | None:
        """With the program of $JUDGE, or the newest that was built."""
        built = sorted(build.cache().glob("gitops-*/bin/judge"), key=lambda path: path.lstat().st_mtime)
        program = os.environ.get("JUDGE") or (built[-1] if built else None)
        return cls(Path(program)) if program is not None else None

    def of(self, live: Object | None, target: Object | None = None) -> Verdict:
        """Judge one object, against ``target`` as Git has it.

        Argo CD asks for the live object in the version that Git has; without conversion nothing else of it differs.
        """
        if live is not None and target is not None:
            live = live | {"apiVersion": target["apiVersion"]}
        kind = (live or target or {})["kind"]
        asked = msgspec.json.encode([{"live": live, "target": target, "lua": self._scripts.get(kind, "")}])
        done = subprocess.run([self._program], input=asked, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr.decode()
        verdict, = msgspec.json.decode(done.stdout, type=list[Verdict])
        return verdict
