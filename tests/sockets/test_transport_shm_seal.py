"""Whoever is handed the memory of copies reads it: whatever it tries, it changes no copy and no ticket."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from xpyd_sidecar.transport.shm.serve import HEAD_BYTES, TICKETS_AT, SharedCopies

SIZE = 64 << 10
ATTACKS = f"""
import ctypes, fcntl, json, mmap, os, sys
fd, uid = int(sys.argv[1]), int(sys.argv[2])
if uid:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
libc, done = ctypes.CDLL(None, use_errno=True), []
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
READ, WRITE, REMOVE, PUNCH, SIZE = 1, 2, 9, 3, {HEAD_BYTES + SIZE}

def tried(name, call):
    try:
        call()
    except OSError as error:
        return
    done.append(name)

def asked(found):
    if found in (-1, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "refused")
    return found

def mapped(one, protection):
    return asked(libc.mmap(None, SIZE, protection, mmap.MAP_SHARED, one, 0))

def attack(how, one):
    for place, at in (("copy", {HEAD_BYTES}), ("ticket", {TICKETS_AT}), ("name", 0)):
        tried(how + " pwrite " + place, lambda: os.pwrite(one, b"WRONG", at))
    tried(how + " mmap", lambda: mapped(one, READ | WRITE))
    tried(how + " mprotect", lambda: asked(libc.mprotect(mapped(one, READ), SIZE, READ | WRITE)))
    tried(how + " madvise", lambda: asked(libc.madvise(mapped(one, READ), SIZE, REMOVE)))
    tried(how + " punch", lambda: asked(libc.fallocate(one, PUNCH, ctypes.c_long(0), ctypes.c_long(SIZE))))
    tried(how + " shrink", lambda: os.ftruncate(one, 0))
    tried(how + " grow", lambda: os.ftruncate(one, 1 << 30))
    tried(how + " seals", lambda: fcntl.fcntl(one, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE))

attack("as handed over:", fd)
for flags in ("O_RDWR", "O_WRONLY"):
    try:
        again = os.open(f"/proc/self/fd/{{fd}}", getattr(os, flags))
    except OSError:
        continue
    attack(f"opened again with {{flags}}:", again)
print(json.dumps([done, os.pread(fd, 5, {HEAD_BYTES}).decode()]))
"""
USERS = [0, *([65534] if not os.getuid() else [])]
"""The user that a test runs as, and nobody."""


def attacked(fd: int, uid: int) -> tuple[list[str], str]:
    """What another process has managed to do with a descriptor, and the copy that it reads by it."""
    done = subprocess.run([sys.executable, "-c", ATTACKS, str(fd), str(uid)], pass_fds=[fd], capture_output=True, text=True,
                          check=True, timeout=60)
    changed, seen = json.loads(done.stdout)
    return changed, seen


@pytest.mark.parametrize("uid", USERS)
def test_another_process_changes_neither_a_copy_nor_a_ticket(uid: int) -> None:
    shared = SharedCopies(SIZE)
    cell = shared.tickets.take()
    assert cell is not None
    _, ticket = shared.tickets.descriptor(cell)
    shared.copies[:5] = b"right"
    assert attacked(shared.fd, uid) == ([], "right")
    assert bytes(shared.copies[:5]) == b"right"
    assert shared.tickets.descriptor(cell)[1] == ticket
    assert os.fstat(shared.fd).st_size == shared.size
    shared.copies[:5] = b"later"
    assert attacked(shared.fd, uid) == ([], "later"), "prefill writes on"


def test_memory_that_is_not_sealed_would_be_changed() -> None:
    """What is tried above works where nothing forbids it."""
    fd = os.memfd_create("bare", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, HEAD_BYTES + SIZE)
    os.pwrite(fd, b"right", HEAD_BYTES)
    readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        done, _ = attacked(readable, 0)
    finally:
        os.close(fd)
        os.close(readable)
    names = {name.rpartition(":")[2].strip() for name in done if name.startswith("opened again")}
    assert names >= {"pwrite copy", "pwrite ticket", "pwrite name", "mmap", "mprotect", "madvise", "punch",
                     "shrink", "grow"}
