"""The package with its C files built under the address and the undefined-behaviour sanitizer, in a tree of its own.

    tree = sanitized.build(folder)            sidecar/src, copied, with sanitized extensions in it
    subprocess.run(…, env=sanitized.environment(tree))
    sanitized.tests_of_c()                    tests without engines that run any of it
    sanitized.near_tests_of_c()               those of them that stand next to it
    sanitized.build_for_races(folder)         the same with the sanitizer of threads, which cannot go with the others

What a release has beside its source stays as it is. Fortified functions are left out, since they hide faults from the
sanitizers; every fault ends the process. Each extension counts which ways its calls take (``fuzz/edges.c``).
"""

from __future__ import annotations

import ast
import math
import os
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from scripts import load

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "sidecar" / "src"
EDGES = ROOT / "tests" / "support" / "fuzz" / "edges.c"
PATHS = ("operator/src", "tests/support", "lab/cluster", "e2e/support")
"""What pytest imports from beside the package, as in pyproject.toml."""
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g")
RACES = ("-fsanitize=thread", "-fno-omit-frame-pointer", "-g", "-Wno-tsan")
"""Looks for memory that two threads use at once with nothing between them. It does not see fences that stand alone, of
which none orders what threads share here."""
THREADED = ("tests/sockets/test_transport_stripes.py", "tests/sockets/test_transport_sealed_stripes.py")
"""Tests of what has threads in C."""
NEAR = 2
"""Imports between an extension and a test that stands next to it."""
FOLDERS = tuple(ROOT / "tests" / name for name in ("unit", "sockets", "workshop"))
LIMIT_S = 600

hook = load(ROOT / "sidecar" / "hatch_build.py")


def compiler() -> list[str]:
    """The compiler's command: gcc, whose library is known by name; CC names another."""
    return shlex.split(os.environ.get("CC") or "gcc")


def build_for_races(tree: Path) -> Path:
    """As ``build``, with the sanitizer of threads alone.

    Raises:
        RuntimeError: it cannot be compiled here, and why.
    """
    shutil.copytree(SOURCES, tree / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for source in hook.SOURCES:
        if wrong := hook.compile_one(tree, source, (*hook.NEEDED, "-O1", *RACES)):
            raise RuntimeError(wrong)
    return tree / "src"


def environment_for_races(package: Path) -> dict[str, str]:
    """Of a process that is to load what ``build_for_races`` has made; it shows all reports, and ends with 66 after any."""
    options = {"TSAN_OPTIONS": "halt_on_error=0:abort_on_error=0:exitcode=66:report_thread_leaks=0",
               "LD_PRELOAD": library("libtsan.so"),
               "PYTHONPATH": os.pathsep.join(map(str, (package, *(ROOT / path for path in PATHS))))}
    return os.environ | options


def flags(counter: Path) -> tuple[str, ...]:
    """For an extension; ``counter``: what counts its ways, compiled."""
    return (*hook.NEEDED, "-O1", *SANITIZERS, "-fsanitize-coverage=trace-pc", str(counter))


def build(tree: Path) -> Path:
    """Make the tree in an empty folder; returns where its package is.

    Raises:
        RuntimeError: it cannot be compiled here, and why.
    """
    shutil.copytree(SOURCES, tree / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    counter = tree / "edges.o"
    command = [*compiler(), "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-c", "-o", str(counter), str(EDGES)]
    made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if made.returncode:
        raise RuntimeError(f"{EDGES.name}: {made.stderr[-2000:]}")
    with ThreadPoolExecutor(2) as pool:
        all_ = pool.map(lambda source: hook.compile_one(tree, source, flags(counter)), hook.SOURCES)
        wrong = [one for one in all_ if one]
    if wrong:
        raise RuntimeError("; ".join(wrong))
    return tree / "src"


def environment(package: Path, **more: str) -> dict[str, str]:
    """Of a process that is to load what was built. The interpreter is not sanitized itself, so the libraries come first."""
    options = {
        # An interpreter ends without giving back what it made once; every such object would be reported.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:disable_coredump=1:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONMALLOC": "malloc",  # each object has memory of its own, whose end is watched
        # libstdc++: other extensions throw exceptions, which the sanitizer hands on to what it finds when it begins
        "LD_PRELOAD": " ".join(map(library, ("libasan.so", "libubsan.so", "libstdc++.so.6"))),
        "PYTHONPATH": os.pathsep.join(map(str, (package, *(ROOT / path for path in PATHS)))),
    }
    return os.environ | options | more


@cache
def library(name: str) -> str:
    """Where the compiler has one of its libraries.

    Raises:
        RuntimeError: it has none of that name.
    """
    found = subprocess.run([*compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True,
                           timeout=LIMIT_S).stdout.strip()
    if not Path(found).is_absolute():  # gcc gives back the name where it has none
        raise RuntimeError(f"{' '.join(compiler())} has no {name}: gcc and its libraries are needed")
    return str(Path(found).resolve())


def tests_of_c(*folders: Path) -> list[Path]:
    """Test files whose imports reach an extension, over however many modules."""
    return _tests_within(math.inf, folders)


def near_tests_of_c(*folders: Path) -> list[Path]:
    """Those of ``tests_of_c`` that import an extension, or a module that imports one."""
    return _tests_within(NEAR, folders)


def _tests_within(steps: float, folders: tuple[Path, ...]) -> list[Path]:
    files = (path for folder in folders or FOLDERS for path in sorted(folder.glob("test_*.py")))
    return [path for path in files if _steps_to_c(path) <= steps]


@cache
def _steps_to_c(path: Path) -> float:
    """How many imports lead from a file to the nearest extension; NaN, which is below nothing, where none does."""
    seen, left, steps = {path}, {path}, 0
    while left:
        if any(one.suffix == ".c" for one in left):
            return steps
        left = {found for one in left for found in _imports(one)} - seen
        seen |= left
        steps += 1
    return math.nan


@cache
def _imports(path: Path) -> frozenset[Path]:
    """Files of this repository that a file imports by name, wherever in it. An extension is its C file."""
    names: set[str] = set()
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {one.name for one in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return frozenset(found for name in names if (found := _file_of(name)) is not None)


@cache
def _file_of(module: str) -> Path | None:
    parts = module.split(".")
    for folder in (SOURCES, *(ROOT / path for path in PATHS)):
        at = folder.joinpath(*parts)
        for path in (at.with_suffix(".py"), at / "__init__.py", at.with_suffix(".c")):
            if path.exists():
                return path
    return None
