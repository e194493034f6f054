"""Runs inside an image while it is built, with the base's own python3 and nothing else.

    assemble.py python FOLDER          FOLDER: a virtual environment, from /build/{pip,wheels,own}, requirements.txt
    assemble.py extras FOLDER          FOLDER: what engines need, unpacked from /build/extras
    assemble.py user PATH …            the user that containers run as; PATH: mount points to make
"""

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

BUILD = Path("/build")
USER = 65532
OLDEST = (3, 11)


def python(folder: Path) -> None:
    """Make the environment. Its byte code is complete and never checked again: the root file system is read-only."""
    if sys.version_info < OLDEST:
        raise SystemExit(f"the base has Python {sys.version.split()[0]}: 3.11 or later is needed")
    venv.create(folder, symlinks=True, with_pip=False)
    wheels = list((BUILD / "pip").glob("pip-*.whl"))
    if len(wheels) != 1:
        raise SystemExit(f"{len(wheels)} wheels of pip, not one")
    pip = [str(folder / "bin/python"), str(wheels[0] / "pip"), "--no-cache-dir", "--disable-pip-version-check", "-q"]
    offline = ["--no-index", "--no-deps", "--no-compile", "--root-user-action=ignore"]
    call([*pip, "install", *offline, "--require-hashes", "--find-links", str(BUILD / "wheels"),
          "-r", str(BUILD / "requirements.txt")])
    call([*pip, "install", *offline, *sorted(str(path) for path in (BUILD / "own").glob("*.whl"))])
    call([*pip, "check"])
    for path in sorted(folder.rglob("direct_url.json")):  # names the build's folders
        path.unlink()
    call([str(folder / "bin/python"), "-m", "compileall", "-q", "-f", "--invalidation-mode", "unchecked-hash",
          str(folder / "lib")])


def extras(folder: Path) -> None:
    """Unpack wheels of several versions of Python over each other.

    Their compiled modules carry the version in their names and do not meet; whatever else meets must be equal.
    """
    folder.mkdir(parents=True)
    for wheel in sorted((BUILD / "extras").glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                place, data = folder / name, archive.read(name)
                if ".data/" in name or not place.resolve().is_relative_to(folder):
                    raise SystemExit(f"{wheel.name}: {name} has no place on an engine's path")
                if name.endswith(("/", ".dist-info/RECORD", ".dist-info/WHEEL")):
                    continue
                if place.exists() and place.read_bytes() != data:
                    raise SystemExit(f"{wheel.name}: {name} differs between versions of Python")
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(data)


def user(mount_points: list[Path]) -> None:
    """Name the user (libraries look it up), and make mount points that it can reach."""
    for file, line in (("passwd", f"xpyd:x:{USER}:{USER}::/tmp:/usr/sbin/nologin"), ("group", f"xpyd:x:{USER}:")):
        path = Path("/etc", file)
        text = path.read_text()
        if not any(entry.split(":")[2:3] == [str(USER)] for entry in text.splitlines()):
            path.write_text(f"{text.rstrip()}\n{line}\n")
    for point in mount_points:
        point.mkdir(parents=True, exist_ok=True)
        for folder in (point, *point.parents):
            folder.chmod(folder.stat().st_mode | 0o555)


def call(command: list[str]) -> None:
    """Run a step; its failure is the build's."""
    code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(f"{' '.join(command[1:5])}: exit code {code}")


def main() -> None:
    """One step."""
    step, *words = sys.argv[1:]
    if step == "python":
        python(Path(words[0]))
    elif step == "extras":
        extras(Path(words[0]))
    elif step == "user":
        user([Path(word) for word in words])
        shutil.rmtree(BUILD, ignore_errors=True)
    else:
        raise SystemExit(f"no such step: {step}")


if __name__ == "__main__":
    main()
