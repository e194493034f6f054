"""The processors that images are made for, and how each is called by the tools that have to do with it."""

from __future__ import annotations

import platform
from typing import NamedTuple

from images.tools import ImageError


class Platform(NamedTuple):
    """One kind of processor, with Linux."""

    name: str
    """As images and Debian call it."""
    machine: str
    """As wheels and the kernel call it."""
    elf: int
    """``e_machine`` of its programs."""
    compiler: str
    """The compiler for it on another machine."""
    packages: tuple[str, ...]
    """Where these come from, with the C library's headers."""

    @property
    def headers(self) -> str:
        """One of the C library's headers, on another machine."""
        return f"/usr/{self.machine}-linux-gnu/include/stdio.h"


PLATFORMS = (
    Platform("amd64", "x86_64", 62, "x86_64-linux-gnu-gcc", ("gcc-x86-64-linux-gnu", "libc6-dev-amd64-cross")),
    Platform("arm64", "aarch64", 183, "aarch64-linux-gnu-gcc", ("gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross")),
)
NAMES = tuple(each.name for each in PLATFORMS)


def native() -> Platform:
    """What this machine is.

    Raises:
        ImageError: something that no image is made for.
    """
    for each in PLATFORMS:
        if each.machine == platform.machine():
            return each
    raise ImageError(f"images are made on {' and '.join(NAMES)}, not on {platform.machine()}")


def parse(text: str) -> tuple[Platform, ...]:
    """Platforms from names between commas, each once, in the order of `PLATFORMS`; nothing means this machine's.

    Raises:
        ImageError: a name that is none.
    """
    names = {name.strip().removeprefix("linux/") for name in text.split(",") if name.strip()}
    if unknown := sorted(names - set(NAMES)):
        raise ImageError(f"no images are made for {', '.join(unknown)}; there are {', '.join(NAMES)}")
    return tuple(each for each in PLATFORMS if each.name in names) or (native(),)
