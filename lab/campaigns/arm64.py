"""``campaign-arm64``: images of both platforms, built twice, and what those of arm64 do under emulation.

Into bench/results/campaign_arm64.json. Exit code 1: something of it was not right; the output says what. Needs root for
the cross compiler and the emulator, which are installed from the distribution where they are missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support")]

import image_parts  # noqa: E402, F401 (brings `images` onto the path)
import msgspec  # noqa: E402
from beats import SERVICE, Beater, beat  # noqa: E402
from emulated import QEMU, Emulated  # noqa: E402
from images import elf, wheels  # noqa: E402
from images.platforms import PLATFORMS  # noqa: E402
from images.tools import default_cache, need  # noqa: E402
from processes import free_port  # noqa: E402
from router_fleet import read_answer, request_bytes  # noqa: E402
from scripted_engine import ScriptedEngine  # noqa: E402

from xpyd_sidecar.contract import keys  # noqa: E402
from xpyd_sidecar.contract.ids import InstanceName, Role  # noqa: E402
from xpyd_sidecar.contract.launch import RouterConfig, SidecarConfig  # noqa: E402

_, ARM64 = PLATFORMS
RESULT = ROOT / "bench" / "results" / "campaign_arm64.json"
PUBLISHED = ("operator", "sidecar")
TESTS = ("sockets/test_relay_fast.py", "unit/test_relay_answer.py", "unit/test_stream_answers.py",
         "sockets/test_transport_moves.py")
"""Tests of what is written in C."""
LEFT_OUT = {
    "test_every_source_compiles_without_a_warning": "images hold no compiler",
}
NEEDED = ("pytest", "pytest-asyncio", "pytest-timeout", "pluggy", "iniconfig", "packaging", "sortedcontainers",
          "pygments")
"""What these import and the image has not: Python alone."""
COMPILED = ("numpy", "hypothesis")
"""The same, compiled; an engine's environment has it."""
TAKEN = """
import json, platform, sys
from xpyd_sidecar.transport import gates, moves
from xpyd_sidecar.router.relay import fast
print(json.dumps({"machine": platform.machine(), "python": platform.python_version(), "taken": {
    "_fast": fast.COMPILED, "_answer": fast.COMPILED, "_moves": moves.COMPILED,
    "_stripes": gates.COMPILED}}))
"""
CHECK = """
import subprocess, sys
open("/tmp/x.yaml", "w").write(sys.argv[1])
sys.exit(subprocess.run(["xpyd", "check", "-f", "/tmp/x.yaml"]).returncode)
"""
TEST_S = 1500.0
REQUESTS = 20


def say(text: str) -> None:
    """Progress."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def built(cache: Path) -> dict[str, Any]:
    """Both images for both platforms, in a cache."""
    done = subprocess.run([sys.executable, "-m", "images", "build", *PUBLISHED, "--platforms", "amd64,arm64", "--cache",
                           str(cache)], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=1800, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def unpack(archive: Path, architecture: str, root: Path) -> Mapping[str, Any]:
    """One platform's files of an index, into a folder; its settings."""
    with tarfile.open(archive) as tar:
        def blob(digest: str) -> Any:
            file = tar.extractfile(f"blobs/{digest.replace(':', '/')}")
            assert file is not None
            return file

        index = tar.extractfile("index.json")
        assert index is not None
        top = json.load(blob(json.load(index)["manifests"][0]["digest"]))
        (entry,) = [each for each in top["manifests"] if each["platform"]["architecture"] == architecture]
        manifest = json.load(blob(entry["digest"]))
        for layer in manifest["layers"]:
            with tarfile.open(fileobj=blob(layer["digest"]), mode="r:gz") as files:
                files.extractall(root, filter=lambda member, _: member)
        config: Mapping[str, Any] = json.load(blob(manifest["config"]["digest"]))["config"]
    return config


def compiled(root: Path) -> dict[str, int]:
    """Compiled files of an image by the processor that they are for."""
    found: dict[str, int] = {}
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink() and (module := elf.read(path.read_bytes())) is not None:
            found[str(module.machine)] = found.get(str(module.machine), 0) + 1
    return found


def copied(names: Sequence[str], folder: Path) -> None:
    """Packages of this environment that are Python alone, into a folder."""
    for name in names:
        for file in distribution(name).files or ():
            source, place = Path(str(file.locate())), folder / file
            if ".." not in file.parts and source.is_file() and source.suffix not in {".pyc", ".so"}:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, place)


def downloaded(names: Sequence[str], python: str, folder: Path) -> None:
    """Packages for arm64 as requirements/cpu.txt pins them, into a folder."""
    blocks = re.split(r"\n(?=[a-z0-9])", (ROOT / "requirements/cpu.txt").read_text())
    lock = folder.with_suffix(".txt")
    lock.write_text("".join(f"{block.partition('    # via')[0].rstrip()}\n" for block in blocks
                            if block.partition("==")[0] in names))
    kept = wheels.download(default_cache(), ARM64, lock, python, "2.28")
    for path in kept.iterdir():
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)


def checked(operator: Emulated) -> dict[str, int]:
    """``xpyd check`` of an example and of one with a wrong word: its exit codes."""
    right = (ROOT / "examples/kubernetes/1p3d.yaml").read_text()
    codes = {}
    for name, text in {"right": right, "wrong": right.replace("replicas:", "replica:", 1)}.items():
        done = operator.run("python", "-c", CHECK, text)
        say(f"check of a {name} example: {done.returncode}\n{(done.stdout + done.stderr)[-500:]}")
        codes[name] = done.returncode
    return codes


def tested(sidecar: Emulated) -> dict[str, int]:
    """The unit tests of what is compiled; how many ended how."""
    done = sidecar.run(
        "python", "-m", "pytest", "-p", "no:cacheprovider", "-k", f"not ({' or '.join(LEFT_OUT)})",
        "--timeout", "600", "--rootdir", "/tree", "-c", "/tree/pyproject.toml",
        *(f"/tree/tests/{name}" for name in TESTS), timeout_s=TEST_S, CI="true", PYTHONPATH="/packages",
        HYPOTHESIS_STORAGE_DIRECTORY="/tmp/hypothesis")
    say(done.stdout[-6000:] + done.stderr[-3000:])
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout)}
    return {"passed": counts.get("passed", 0), "skipped": counts.get("skipped", 0),
            "failed": counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)}


async def routed(sidecar: Emulated, folder: Path) -> dict[str, Any]:
    """Requests through the image's router to engines of this machine, half of them streams."""
    key_file = folder / "key"
    keys.write(key_file, keys.mint())
    port, members = free_port(), free_port()
    config = SidecarConfig(
        service=SERVICE, instance=InstanceName("router"), key_file="/run-xpyd/key", run_dir="/run-xpyd",
        log_level="warning", router=RouterConfig(
            host="127.0.0.1", port=port, members_port=members, admin_port=free_port(), heartbeat_s=1.0,
            resolve_s=1.0))
    engines = {"p0": Role.PREFILL, "d0": Role.DECODE}
    started = {name: await ScriptedEngine(name).start() for name in engines}
    process = sidecar.start("python", "-m", "xpyd_sidecar", "--config-json", msgspec.json.encode(config).decode())
    agents = {name: Beater(members, keys.read(key_file), name.encode()) for name in engines}

    async def beats() -> None:
        number = 0
        while True:
            number += 1
            for name, agent in agents.items():
                await agent.send(beat(name, engines[name], started[name].address, seq=number, interval_s=20.0))
            await asyncio.sleep(1.0)

    async def ask(path: str, body: dict[str, Any] | None = None) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request_bytes(path, body) if body is not None else request_bytes(path, method="GET"))
            return await read_answer(reader)
        finally:
            writer.close()

    beating, begin = asyncio.create_task(beats()), time.monotonic()
    try:
        async with asyncio.timeout(120):
            while True:
                assert process.poll() is None, process.stdout.read() if process.stdout else ""
                try:
                    if (await ask("/ready")).status == 200:
                        break
                except OSError:
                    pass
                await asyncio.sleep(0.2)
        ready_s = time.monotonic() - begin
        asked = {"model": "tiny", "prompt": "hi", "max_tokens": 3}
        answers = [await ask("/v1/completions", asked | {"stream": number % 2 == 0}) for number in range(REQUESTS)]
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        for agent in agents.values():
            agent.close()
        for engine in started.values():
            await engine.stop()
    right = [answer for answer in answers if answer.status == 200 and answer.complete and answer.body]
    process.terminate()
    return {"asked": REQUESTS, "failed": REQUESTS - len(right), "ready_s": round(ready_s, 1),
            "exit_code_at_sigterm": process.wait(timeout=60)}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--once", action="store_true", help="build once: nothing is said of digests, and nothing written")
    options = parser.parse_args(arguments)
    need(QEMU, "qemu-user-static")
    told: dict[str, Any] = {}
    begin = time.monotonic()
    images = built(default_cache())
    told["images"] = {name: {"digest": each["digest"], "mib": round(each["bytes"] / (1 << 20), 1)}
                      for name, each in images.items()}
    with tempfile.TemporaryDirectory(prefix="xpyd-arm64-") as name:
        folder = Path(name)
        if not options.once:
            begin = time.monotonic()
            again = built(folder / "again")
            told["cold_build_s"] = round(time.monotonic() - begin)
            told["digests_that_differ"] = sum(again[each]["digest"] != images[each]["digest"] for each in images)
            shutil.rmtree(folder / "again")
        (folder / "run").mkdir()
        roots = {each: folder / each for each in images}
        settings = {each: unpack(Path(images[each]["archive"]), "arm64", roots[each]) for each in images}
        (site,) = roots["sidecar"].glob("opt/xpyd/lib/python3.*")
        copied(NEEDED, folder / "packages")
        downloaded(COMPILED, site.name.removeprefix("python"), folder / "packages")
        told["compiled"] = {each: compiled(root) for each, root in roots.items()}
        told["compiled_of_another_kind"] = sum(
            count for found in told["compiled"].values() for kind, count in found.items() if kind != "183")
        env = {each: dict(word.split("=", 1) for word in settings[each]["Env"]) for each in images}
        tree = folder / "tree"
        for part in ("tests/unit", "tests/sockets", "tests/support", "tests/data", "sidecar/hatch_build.py",
                     "pyproject.toml"):
            place = tree / part
            place.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, place, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                shutil.copyfile(ROOT / part, place)
        with Emulated(roots["operator"], env["operator"]) as operator, Emulated(
                roots["sidecar"], env["sidecar"],
                [(folder / "packages", "/packages"), (tree, "/tree"), (folder / "run", "/run-xpyd")]) as sidecar:
            told["check"] = checked(operator)
            done = sidecar.run("python", "-c", TAKEN, PYTHONPATH="/packages")
            say(done.stdout + done.stderr[-3000:])
            told["extensions"] = json.loads(done.stdout)
            told["routed"] = asyncio.run(routed(sidecar, folder / "run"))
            say(f"routed: {told['routed']}")
            told["tests"] = tested(sidecar)
    told |= {"files_of_tests": list(TESTS), "tests_left_out": LEFT_OUT,
             "minutes": round((time.monotonic() - begin) / 60, 1),
             "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
             "qemu": subprocess.run([QEMU, "--version"], capture_output=True, text=True, check=True).stdout.split("\n")[0],
             "date": datetime.now(UTC).date().isoformat()}
    told["faults"] = [name for name, wrong in {
        "check": told["check"] != {"right": 0, "wrong": 1}, "extensions": not all(told["extensions"]["taken"].values()),
        "machine": told["extensions"]["machine"] != "aarch64", "compiled": told["compiled_of_another_kind"],
        "digests": told.get("digests_that_differ", 0), "routed": told["routed"]["failed"],
        "tests": told["tests"]["failed"] or not told["tests"]["passed"]}.items() if wrong]
    if not options.once:
        RESULT.write_text(json.dumps(told, indent=1) + "\n")
    sys.stdout.write(json.dumps(told, indent=1) + "\n")
    return 1 if told["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
