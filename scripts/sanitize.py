"""The sanitizer tier: what is written in C, under the address and the undefined-behaviour sanitizer (needs gcc).

    python scripts/sanitize.py tests                    the tests next to it: they import it, or a module that does
    python scripts/sanitize.py far-tests                all other tests that run any of it
    python scripts/sanitize.py races                    the tests of what has threads in C, under the sanitizer of threads
    python scripts/sanitize.py fuzz --seconds 30        each entry point against its oracle, two at a time; --only a,b
    python scripts/sanitize.py again answers FILE       one input that failed

Everything is built into a folder that goes with the run; what a release has stays as it is. Inputs that failed lie in
.cache/fuzz.
Exit code: 0 nothing was found; 1 something was.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import fuzz  # noqa: E402 (its folder is known only now)
import sanitized  # noqa: E402
from fuzz import processes  # noqa: E402

FOUND = ROOT / ".cache" / "fuzz"
TESTS_LIMIT_S = 1800.0
CASES = "500"
"""Of tests that compare made-up cases: the fuzz has more of them."""


def tests(package: Path, far: bool, arguments: list[str]) -> int:
    """Run the tests next to what is written in C, or the others; pytest's exit code."""
    paths = " ".join(map(str, (package, *sanitized.PATHS)))
    near = sanitized.near_tests_of_c()
    wanted = [path for path in sanitized.tests_of_c() if path not in near] if far else near
    files = [str(path.relative_to(ROOT)) for path in wanted]
    command = [sys.executable, "-m", "pytest", "-o", f"pythonpath={paths}", "--numprocesses", "3", "--dist", "loadfile",
               "--timeout", "300", "-m", "not unsanitized", *files, *arguments]
    env = sanitized.environment(package, XPYD_FUZZ=CASES)
    return subprocess.run(command, cwd=ROOT, env=env, check=False, timeout=TESTS_LIMIT_S).returncode


def races(folder: Path) -> int:
    """Run the tests of threads; pytest's exit code, or 66 for a race. The sanitizer wants addresses that are not drawn."""
    package = sanitized.build_for_races(folder)
    paths = " ".join(map(str, (package, *sanitized.PATHS)))
    # reports go to standard error, of which pytest would keep what it captures
    command = ["setarch", "--addr-no-randomize", sys.executable, "-m", "pytest", "--capture=sys", "-o",
               f"pythonpath={paths}", "--timeout", "300", "-m", "not reads_while_written", *sanitized.THREADED]
    return subprocess.run(command, cwd=ROOT, env=sanitized.environment_for_races(package), check=False,
                          timeout=TESTS_LIMIT_S).returncode


def search(package: Path, seconds: float, seed: int, only: list[str], jobs: int) -> int:
    """Fuzz; 1 if anything was found."""
    began = time.monotonic()
    found = processes.run(only, FOUND, sanitized.environment(package), seconds=seconds, seed=seed, jobs=jobs)
    failed = [one.target for one in found if one.failure]
    outcome = f"failed: {', '.join(failed)}" if failed else "nothing was found"
    print(f"seed {seed}, {time.monotonic() - began:.0f} s: {outcome}")
    return 1 if failed else 0


def again(package: Path, target: str, path: Path) -> int:
    """Try one input; the exit code of its process."""
    FOUND.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "fuzz.worker", target, str(FOUND), "--input", str(path)]
    return subprocess.run(command, env=sanitized.environment(package), check=False, timeout=60.0).returncode


def main() -> int:
    """As asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tests", help="tests next to what is written in C")
    commands.add_parser("far-tests", help="all other tests that run C")
    commands.add_parser("races", help="tests of what has threads in C")
    fuzzing = commands.add_parser("fuzz", help="each entry point against its oracle")
    fuzzing.add_argument("--seconds", type=float, default=30.0, help="for each target")
    fuzzing.add_argument("--seed", type=int, default=1)
    fuzzing.add_argument("--jobs", type=int, default=2, help="targets at a time")
    fuzzing.add_argument("--only", default=",".join(fuzz.TARGETS), help="targets, by comma")
    once = commands.add_parser("again", help="one input that failed")
    once.add_argument("target", choices=fuzz.TARGETS)
    once.add_argument("file", type=Path)
    args, rest = parser.parse_known_args()
    of_tests = args.command in ("tests", "far-tests")
    if rest and not of_tests:
        parser.error(f"unknown: {' '.join(rest)}")
    only = args.only.split(",") if args.command == "fuzz" else []
    if unknown := set(only) - set(fuzz.TARGETS):
        parser.error(f"no targets: {', '.join(sorted(unknown))}; there are {', '.join(fuzz.TARGETS)}")
    with tempfile.TemporaryDirectory(prefix="xpyd-sanitized-") as folder:
        if args.command == "races":
            return races(Path(folder))
        package = sanitized.build(Path(folder))
        if of_tests:
            return tests(package, args.command == "far-tests", rest)
        if args.command == "again":
            return again(package, args.target, args.file.resolve())
        return search(package, args.seconds, args.seed, only, args.jobs)


if __name__ == "__main__":
    sys.exit(main())
