"""Bodies of sealed frames, as threads read them."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import msgspec._utils
from typing import get_args
from xpyd_sidecar.kv.messages import MessageError
from xpyd_sidecar.kv import session_bodies as bodies

def looked_at(*_):
    raise AssertionError("a type is looked at when its first body comes")

msgspec._utils.get_class_annotations.__code__ = looked_at.__code__
for kind in get_args(bodies.Body):
    raw = msgspec.msgpack.encode([] if kind.__struct_config__.array_like else {})
    try:
        bodies.read_body(raw, kind)
    except MessageError as error:
        assert str(error).startswith(kind.__name__), error
print("read", len(get_args(bodies.Body)))
"""
"""Two threads that look at a type for the first time in the same moment end the process, rarely; what makes that possible
is seen here every time.
"""


def test_types_of_bodies_are_known_before_a_thread_reads_one() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "read 14\n"), done.stderr
