"""The cluster's programs, built once from the Go modules beside this package into a cache outside the tree.

    $XPYD_CLUSTER_CACHE or ~/.cache/xpyd/cluster
    ├── kube-3f2a…/bin/kube, kubectl → kube …   the name holds a hash of module, sources, compiler and flags
    ├── kube.lock                               one build at a time
    └── kube.log                                what the compiler said last

A folder with its final name is complete: it is written under another name and renamed, so an interrupted build leaves
nothing that could be taken for a program.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from testcluster.errors import BuildFailed, Missing

SOURCES = Path(__file__).resolve().parent.parent / "go"
KUBERNETES = "1.34.4"
DEADLINE_S = 3600.0
"""For one build, or for waiting until somebody else's is done. The slowest takes ten minutes on two idle cores."""
KEPT = 3
"""Builds of one program that stay in the cache; older ones are removed after a new one."""
REPORT_S = 30.0
FLAGS = ("-trimpath", "-p", "2")


class Program(NamedTuple):
    """One Go module and the binary made of it."""

    package: str = "."
    links: tuple[str, ...] = ()
    """Further names of the binary; it acts by the name it is called by."""
    stamps: tuple[str, ...] = ()
    """Variables that the linker sets."""
    assets: tuple[str, ...] = ()
    """Files and folders of the package's module that are needed at run time; beside the binary under their last name."""


_VERSION = "k8s.io/component-base/version"
PROGRAMS = {
    "kube": Program(
        links=("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"),
        stamps=(
            f"{_VERSION}.gitVersion=v{KUBERNETES}",
            f"{_VERSION}.gitMajor={KUBERNETES.split('.', maxsplit=1)[0]}",
            f"{_VERSION}.gitMinor={KUBERNETES.split('.')[1]}",
            f"{_VERSION}.gitTreeState=clean",
        ),
    ),
    "kwok": Program(
        package="sigs.k8s.io/kwok/cmd/kwok",
        assets=(
            "kustomize/stage/node/fast/node-initialize.yaml",
            "kustomize/stage/node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
            "kustomize/stage/pod/fast/pod-ready.yaml",
            "kustomize/stage/pod/fast/pod-complete.yaml",
            "kustomize/stage/pod/fast/pod-delete.yaml",
        ),
    ),
    "coredns": Program(),
    "netpol": Program(),
    "pause": Program(),
    "netprobe": Program(),
    "gang": Program(),
    "kueue": Program(package="sigs.k8s.io/kueue/cmd/kueue", assets=("config",)),
    "gitops": Program(
        links=("helm", "judge"),
        stamps=("helm.sh/helm/v4/internal/version.version=v4.0.5", f"{_VERSION}.gitVersion=v{KUBERNETES}"),
    ),
}
PROFILES = {"light": ("kube",), "kwok": ("kube", "kwok"), "full": ("kube", "pause", "coredns", "netpol")}


def cache() -> Path:
    """Where programs are kept."""
    return Path(os.environ.get("XPYD_CLUSTER_CACHE") or Path.home() / ".cache/xpyd/cluster")


def ensure(names: Iterable[str]) -> dict[str, Path]:
    """The ``bin`` folders of these programs, built where they are not in the cache.

    Raises:
        Missing: there is no Go compiler, or it is another one than the modules ask for.
        BuildFailed: the compiler failed, or it took longer than an hour.
    """
    return {name: _ensure(name, PROGRAMS[name]) for name in names}


def identity(name: str, program: Program) -> str:
    """Hash of everything that the binary depends on."""
    digest = hashlib.sha256(repr((_compiler(), FLAGS, program)).encode())
    for path in sorted((SOURCES / name).iterdir()):
        if path.is_file():
            digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _ensure(name: str, program: Program) -> Path:
    root = cache()
    final = root / f"{name}-{identity(name, program)}"
    if (final / "bin").is_dir():
        return final / "bin"
    root.mkdir(parents=True, exist_ok=True)
    with open(root / f"{name}.lock", "w") as lock, _exclusive(lock, name):
        if not (final / "bin").is_dir():
            for stale in root.glob(f"{name}.partial-*"):
                shutil.rmtree(stale)
            partial = Path(tempfile.mkdtemp(prefix=f"{name}.partial-", dir=root))
            _build(name, program, partial)
            partial.chmod(0o755)
            partial.rename(final)
            _forget_old(root, name, final)
    return final / "bin"


def _build(name: str, program: Program, folder: Path) -> None:
    """Compile into ``folder``; everything in it is as it will be found later."""
    binary = folder / "bin" / name
    binary.parent.mkdir()
    stamps = " ".join(f"-X {stamp}" for stamp in program.stamps)
    command = ["nice", "-n", "19", "go", "build", *FLAGS, "-ldflags", f"-s -w {stamps}".strip(), "-o", str(binary)]
    log = cache() / f"{name}.log"
    with open(log, "wb") as output:
        process = subprocess.Popen([*command, program.package], cwd=SOURCES / name, env=_environment(),
                                   stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            _watch(process, name, log)
        finally:
            process.kill()
            process.wait()
    for link in program.links:
        (binary.parent / link).symlink_to(name)
    if program.assets:
        module = _go(name, "list", "-f", "{{.Module.Dir}}", program.package)
        (folder / "assets").mkdir()
        for asset in program.assets:
            _copy(Path(module) / asset, folder / "assets" / Path(asset).name)


def _copy(source: Path, target: Path) -> None:
    """A file or folder; what is read-only where it comes from can be changed here."""
    if source.is_dir():
        target.mkdir()
        for each in source.iterdir():
            _copy(each, target / each.name)
    else:
        target.write_bytes(source.read_bytes())


def _watch(process: subprocess.Popen[bytes], name: str, log: Path) -> None:
    begin = time.monotonic()
    print(f"building {name} from {SOURCES / name} (once; the log is {log})", file=sys.stderr, flush=True)
    while True:
        try:
            code = process.wait(REPORT_S)
            break
        except subprocess.TimeoutExpired:
            spent = time.monotonic() - begin
            if spent > DEADLINE_S:
                raise BuildFailed(f"{name} was not built within {DEADLINE_S:.0f} s; see {log}") from None
            print(f"building {name}: {spent:.0f} s", file=sys.stderr, flush=True)
    if code:
        tail = "\n".join(log.read_text("utf-8", errors="replace").splitlines()[-20:])
        raise BuildFailed(f"go build of {name} ended with {code}; {log}:\n{tail}")
    print(f"built {name} in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def _forget_old(root: Path, name: str, newest: Path) -> None:
    others = [path for path in root.glob(f"{name}-*") if path != newest and path.is_dir()]
    for path in sorted(others, key=lambda each: each.stat().st_mtime, reverse=True)[KEPT - 1 :]:
        shutil.rmtree(path)


def _environment() -> dict[str, str]:
    """The compiler never fetches another compiler, and writes nothing into the module files."""
    fixed = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly -buildvcs=false", "GOWORK": "off"}
    return os.environ | fixed


def _compiler() -> str:
    return _go(".", "env", "GOVERSION", "GOOS", "GOARCH")


def _go(name: str, *arguments: str) -> str:
    if shutil.which("go") is None:
        raise Missing("the test cluster is built from Go modules, and there is no go command; install Go 1.26 or later")
    done = subprocess.run(["go", *arguments], cwd=SOURCES / name, env=_environment(), capture_output=True, text=True,
                          timeout=600, check=False)
    if done.returncode:
        raise BuildFailed(f"go {' '.join(arguments)} in {SOURCES / name}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextmanager
def _exclusive(lock: IO[str], name: str) -> Iterator[None]:
    """Hold the lock file; says so when somebody else builds the same program now."""
    end = time.monotonic() + DEADLINE_S
    told = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if not told:
                print(f"waiting for another build of {name}", file=sys.stderr, flush=True)
                told = True
            if time.monotonic() > end:
                raise BuildFailed(f"another build of {name} held {lock.name} for {DEADLINE_S:.0f} s") from None
            time.sleep(0.5)
    yield
