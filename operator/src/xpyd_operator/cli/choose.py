"""Which service a command is about."""

from __future__ import annotations

from typing import Any

from xpyd_operator.errors import NotFound
from xpyd_operator.local import lock
from xpyd_operator.local.paths import ServiceFolder, home_folder, services


def add_name(parser: Any) -> None:
    """The optional argument NAME."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="the service; not needed where there is only one")


def choose(name: str | None) -> ServiceFolder:
    """The folder of the named service, or of the only one (that runs, if others do not).

    Raises:
        NotFound: there is none of this name, none at all, or several.
    """
    known = services()
    if name is not None:
        if name not in known:
            there = f"; there are {', '.join(known)}" if known else ""
            raise NotFound(f"no service {name} in {home_folder()}{there}")
        return ServiceFolder(name)
    if not known:
        raise NotFound(f"no service in {home_folder()}; `xpyd up -f FILE` starts one")
    running = [one for one in known if lock.holder(ServiceFolder(one).lock)]
    for candidates in (known, running):
        if len(candidates) == 1:
            return ServiceFolder(candidates[0])
    raise NotFound(f"there are several services ({', '.join(known)}); name one")
