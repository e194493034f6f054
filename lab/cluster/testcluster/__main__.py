"""``python -m testcluster up|down|status|build``: a cluster for hand work; tests use the classes."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from testcluster import build, remains
from testcluster.base import Cluster
from testcluster.errors import ClusterError
from testcluster.full import FullCluster
from testcluster.light import LightCluster
from testcluster.state import Folder
from xpyd_operator.local import procs


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, or 1 after an error (or, for ``status``, when something does not run)."""
    parser = argparse.ArgumentParser(prog="testcluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("up", "start what does not run"), ("down", "remove everything"), ("status", "say what runs"),
                       ("build", "build the programs alone")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--profile", choices=("light", "full"), default="light")
        if name != "build":
            command.add_argument("--dir", type=Path, help="the cluster's folder (default: one per profile)")
        if name in ("up", "build"):
            command.add_argument("--kwok", action="store_true", help="fake nodes; with it comes the scheduler")
        if name == "build":
            command.add_argument("--gitops", action="store_true", help="Helm, and what Argo CD and Flux think of objects")
        if name == "up":
            command.add_argument("--scheduler", action="store_true", help="with the light profile: bind pods to nodes")
            command.add_argument("--ipv6", action="store_true", help="with the full profile: IPv6 alone, instead of both")
    given = parser.parse_args(arguments)
    try:
        return {"up": _up, "down": _down, "status": _status, "build": _build}[given.command](given)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _up(given: argparse.Namespace) -> int:
    cluster = _cluster(given)
    begin = time.monotonic()
    started = cluster.up()
    running = [name for name in cluster.components() if name not in started]
    if started:
        print(f"started in {time.monotonic() - begin:.1f} s: {', '.join(started)}")
    if running:
        print(f"ran already: {', '.join(running)}")
    print(f"export KUBECONFIG={cluster.kubeconfig}\nkubectl: {cluster.kubectl.program}")
    return 0


def _down(given: argparse.Namespace) -> int:
    folder = _folder(given)
    remains.remove(folder)
    print(f"nothing is left of the cluster in {folder.path}; its logs stay")
    return 0


def _status(given: argparse.Namespace) -> int:
    folder = _folder(given)
    record = folder.load()
    if record is None:
        left = remains.leftovers(folder)
        print(f"no cluster in {folder.path}" + "".join(f"\nleft over: {line}" for line in left))
        return 1
    print(f"{record.profile} cluster in {folder.path}")
    dead = 0
    for name, identity in record.processes.items():
        alive = procs.alive(identity)
        dead += not alive
        print(f"  {name:24} {'pid ' + str(identity.pid) if alive else 'ended; see ' + str(folder.log(name))}")
    return 1 if dead or not record.processes else 0


def _build(given: argparse.Namespace) -> int:
    more = [name for name in ("kwok", "gitops") if getattr(given, name)]
    names = (*build.PROFILES[given.profile], *more)
    for name, path in build.ensure(names).items():
        print(f"{name}: {path}")
    return 0


def _cluster(given: argparse.Namespace) -> Cluster:
    if given.profile == "full":
        return FullCluster(_folder(given).path, kwok=given.kwok, ipv6=given.ipv6)
    return LightCluster(_folder(given).path, scheduler=given.scheduler, kwok=given.kwok)


def _folder(given: argparse.Namespace) -> Folder:
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    return Folder(given.dir or state / "xpyd" / f"cluster-{given.profile}")


if __name__ == "__main__":
    sys.exit(main())
