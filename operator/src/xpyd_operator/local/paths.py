"""Where the local backend keeps its files.

    $XPYD_HOME, or ${XDG_STATE_HOME:-~/.local/state}/xpyd
    └── <service>/                 0700
        ├── desired.yaml           the document, as given
        ├── planned.json           what the planner decided last
        ├── settings.json          address of the host, folder of the document, run folder
        ├── key                    service key, 0600
        ├── stop                   while it is there, the service ends
        ├── supervisor.lock        held by the supervisor as long as it lives
        ├── supervisor.log
        ├── router/                config.json, router.log, records of the process
        └── instances/<name>/      instance.json, agent.json, engine.log, agent.log, records of the processes

    <run folder>/<short name>/     sockets and temporary files of one instance, 0700

The run folder is apart because a Unix socket's path has at most 107 bytes. Its path is stored in settings.json, so that it
is found again when the environment has changed.
"""

from __future__ import annotations

import glob
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from xpyd_operator.errors import LocalError
from xpyd_operator.plan import names
from xpyd_sidecar.contract.ids import ServiceName
from xpyd_sidecar.contract.launch import AGENT_SOCKET

SOCKET_PATH_MAX = 107
"""Bytes of a Unix socket's path on Linux, without the final zero."""
UUID_LENGTH = 36
"""vLLM names its sockets by a UUID."""
RUN_NAME_MAX = 10
"""``e123456789``, ``e123456-15`` or eight hexadecimal digits."""


def home_folder() -> Path:
    """The folder of xpyd's state on this host, with one folder per service."""
    given = os.environ.get("XPYD_HOME")
    if given:
        return Path(given).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state).absolute() / "xpyd"


class ServiceFolder:
    """Paths of the files of one service, in its folder below ``base`` (default: ``home_folder``)."""

    def __init__(self, service: str, base: Path | None = None) -> None:
        self.service = service
        self.path = (base or home_folder()) / service
        self.desired = self.path / "desired.yaml"
        self.planned = self.path / "planned.json"
        self.settings = self.path / "settings.json"
        self.key = self.path / "key"
        self.stop = self.path / "stop"
        self.lock = self.path / "supervisor.lock"
        self.log = self.path / "supervisor.log"
        self.router = self.path / "router"
        self.instances = self.path / "instances"

    def instance(self, name: str) -> Path:
        """The folder of one instance."""
        return self.instances / name

    def make(self) -> None:
        """Create the service's folders where they are missing, for their owner alone (mode 0700).

        Raises:
            LocalError: a folder cannot be created.
        """
        try:
            for folder in (self.path, self.router, self.instances):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise LocalError(f"cannot make the state folder {self.path}: {error.strerror}; set XPYD_HOME") from None

    def marker(self, *parts: str) -> str:
        """The value of the variable XPYD_UNIT in the environment of processes of this service, by which they are found."""
        return "/".join((str(self.path), *parts))


def matching(folder: Path, pattern: str) -> list[Path]:
    """Entries of a folder that match a glob pattern, sorted; none where it is gone by then (``Path.glob`` would raise)."""
    return [folder / name for name in sorted(glob.glob(pattern, root_dir=folder))]


def services(base: Path | None = None) -> list[str]:
    """Names, sorted, of the services that have a folder with a document below ``base`` (default: ``home_folder``)."""
    folder = base or home_folder()
    try:
        return sorted(entry.name for entry in folder.iterdir() if (entry / "desired.yaml").is_file())
    except OSError:
        return []


def choose_run_dir(state: Path) -> Path:
    """A short path for the folder of a service's sockets, derived from ``state``, its state folder. Creates nothing.

    Raises:
        LocalError: paths of sockets would be too long in every folder for temporary files.
    """
    digest = hashlib.sha256(str(state).encode()).hexdigest()[:8]
    longest = 1 + RUN_NAME_MAX + 1 + max(UUID_LENGTH, len(AGENT_SOCKET))
    for base in (tempfile.gettempdir(), "/tmp"):  # noqa: S108 (made private by make_private)
        path = Path(base) / f"xpyd-{os.getuid()}-{digest}"
        if len(os.fsencode(path)) + longest <= SOCKET_PATH_MAX:
            return path
    raise LocalError(f"{tempfile.gettempdir()} is too long a path for sockets; set TMPDIR to a short one")


def run_folder(base: str, service: str, name: str) -> Path:
    """The run folder of the instance ``name``, or of the router, below ``base``, its service's: short for any name."""
    ordinal = names.ordinal_of(ServiceName(service), name)
    short = f"e{ordinal}" if ordinal is not None else hashlib.sha256(name.encode()).hexdigest()[:8]
    return Path(base) / short


def member_folder(leaders: Path, index: int) -> Path:
    """The run folder of an instance's member ``index``, beside that of its leader (member 0)."""
    return leaders.with_name(f"{leaders.name}-{index}") if index else leaders


def make_private(path: Path) -> None:
    """Make a folder that only its owner can enter; refuse one that somebody else has put there.

    Raises:
        LocalError: it belongs to another user, is a link, or cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise LocalError(f"cannot make {path}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise LocalError(f"{path} belongs to somebody else; remove it or set TMPDIR")
    if found.st_mode & 0o077:
        path.chmod(0o700)
