"""The demo takes its service down, however it ends."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
DRIVER = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell runs in the background
sys.path.insert(0, sys.argv[1])
import demo
from pathlib import Path
said, at = Path(sys.argv[2]), sys.argv[3]
demo.STATE = said.parent

def step(name):
    with said.open("a") as file:
        file.write(name + "\\n")
    print(name, flush=True)
    if name == at:
        time.sleep(60)

def xpyd(*arguments, capture=False):
    step(arguments[0])
    return '{"url": "http://h:1", "instances": []}'

def ask(*_, **__):
    step("answer")
    return "yes", {"prompt_tokens": 1, "completion_tokens": 1}

demo.xpyd, demo.answer, demo.readings, demo.settled = xpyd, ask, dict, lambda *_: {}
sys.argv[1:] = []
sys.exit(demo.main())
"""


@pytest.mark.parametrize("gone", [False, True], ids=["terminal", "no terminal"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize("at", ["up", "answer"])
def test_a_signal_takes_the_service_down(tmp_path: Path, at: str, number: signal.Signals, gone: bool) -> None:
    said = tmp_path / "said"
    master, terminal = pty.openpty()
    command = [sys.executable, "-c", DRIVER, str(SCRIPTS), str(said), at]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)
    try:
        end = time.monotonic() + 60
        while not said.exists() or at not in said.read_text().split():
            assert time.monotonic() < end
            time.sleep(0.02)
        if gone:
            os.close(master)
        process.send_signal(number)
        code = process.wait(20)
    finally:
        process.kill()
        if not gone:
            os.close(master)
    assert code != 0
    assert said.read_text().split()[-1] == "down"
    assert said.read_text().split().count("down") == 1
