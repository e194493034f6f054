"""Programs of an image for another processor, run by qemu: in a user namespace with a binfmt_misc of its own.

    with Emulated(root) as image:
        image.run("xpyd", "--version").stdout
        process = image.start("python", "-m", "xpyd_sidecar", "--config-json", "{}")

What is mounted and registered is in that namespace alone, and gone with its last process; the kernel must be Linux 6.7 or
later, which has a binfmt_misc for each user namespace. The image's root is used as it lies there. A program is root of the
namespace, which is this user outside.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

QEMU = "qemu-aarch64-static"
MAGIC = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
MASK = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
ENTER = r"""
root=$1; program=$2; shift 2
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
printf '%s' ":arm64:M::$MAGIC:$MASK:$program:F" > /proc/sys/fs/binfmt_misc/register
mount --bind "$root" "$root"
mkdir -p "$root/proc" "$root/dev" "$root/tmp"
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
while [ "$1" != -- ]; do
  mkdir -p "$root$2"
  mount --rbind "$1" "$root$2"
  shift 2
done
shift
exec chroot "$root" /usr/bin/env -i "$@"
"""


class Emulated:
    """One unpacked root, with folders of this machine bound into it."""

    def __init__(self, root: Path, env: Mapping[str, str], binds: Sequence[tuple[Path, str]] = ()) -> None:
        found = shutil.which(QEMU)
        assert found is not None, f"{QEMU} is missing; install it: apt-get install qemu-user-static"
        self._qemu, self._root, self._env, self._binds = found, root, dict(env), tuple(binds)
        self._started: list[subprocess.Popen[str]] = []

    def command(self, *command: str, **env: str) -> list[str]:
        """What runs a command of the image."""
        binds = [word for outside, inside in self._binds for word in (str(outside), inside)]
        settings = [f"{name}={value}" for name, value in (self._env | env).items()]
        return ["unshare", "--user", "--map-root-user", "--mount", "--propagation", "private", "sh", "-euc",
                f"MAGIC='{MAGIC}' MASK='{MASK}'\n{ENTER}", "enter", str(self._root), self._qemu, *binds, "--", *settings,
                *command]

    def run(self, *command: str, timeout_s: float = 120.0, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(self.command(*command, **env), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=timeout_s, check=False)

    def start(self, *command: str, **env: str) -> subprocess.Popen[str]:
        """Start a command, which ends with this."""
        started = subprocess.Popen(self.command(*command, **env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True)
        self._started.append(started)
        return started

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self._started:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(timeout=20)
            if process.stdout is not None:
                process.stdout.close()
