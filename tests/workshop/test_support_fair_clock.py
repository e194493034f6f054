"""A clock of tests that goes on only while their process does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fair_clock
from fair_clock import STEP_S, FairClock


def test_what_passes_between_two_looks_counts_up_to_a_step() -> None:
    passed = 100.0
    clock = FairClock(lambda: passed)
    assert clock.now() == 100.0
    passed += STEP_S
    assert clock.now() == 100.0 + STEP_S
    passed += 30.0
    assert clock.now() == 100.0 + 2 * STEP_S
    passed += 0.1
    assert abs(clock.now() - 100.1 - 2 * STEP_S) < 1e-9


PROGRAM = """
import sys, time
from fair_clock import fair_clock
real = time.monotonic
with fair_clock():
    began, really = time.monotonic(), real()
    print("up", flush=True)
    for _ in sys.stdin:
        print(time.monotonic() - began, real() - really, flush=True)
assert time.monotonic is real
"""


def test_a_process_that_stood_still_has_lost_no_time_and_one_that_waits_has() -> None:
    environment = {"PYTHONPATH": str(Path(fair_clock.__file__).parent)}
    for stops in (True, False):
        with subprocess.Popen([sys.executable, "-S", "-c", PROGRAM], env=environment, text=True, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            if stops:
                os.kill(process.pid, signal.SIGSTOP)
                time.sleep(2.0)
                os.kill(process.pid, signal.SIGCONT)
                fair, real = asked(process)
                assert real >= 2.0
                assert fair <= real - 2.0 + 2 * STEP_S + 0.1
            else:
                end = time.monotonic() + 60
                while asked(process)[0] < 1.0:  # sooner, on a machine that has a processor for it
                    assert time.monotonic() < end
                    time.sleep(0.1)
            process.stdin.close()


def asked(process: subprocess.Popen[str]) -> tuple[float, float]:
    """Seconds that have passed for it, and in truth."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    fair, real = map(float, process.stdout.readline().split())
    return fair, real
