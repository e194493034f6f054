"""Extensions are built so that a fault in them ends the process: guarded stacks, fortified functions, read-only tables."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import compiled
import elf
import pytest
from scripts import load

ROOT = Path(__file__).resolve().parents[2]
hook = load(ROOT / "sidecar/hatch_build.py")
PROBE = """
#include <string.h>
__attribute__((visibility("default"))) char probe(const char *from, unsigned long size)
{
    char to[16];
    memcpy(to, from, size);
    return to[size / 2];
}
"""
built = pytest.mark.skipif(bool(compiled.missing()), reason="nothing was compiled here")


def build_probe(folder: Path, flags: tuple[str, ...]) -> elf.Library:
    (folder / "probe.c").write_text(PROBE, encoding="utf-8")
    command = [*shlex.split(os.environ.get("CC") or "cc"), *flags, "-o", str(folder / "probe.so"), str(folder / "probe.c")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return elf.read(folder / "probe.so")


@built
@pytest.mark.parametrize("source", hook.SOURCES, ids=lambda source: source.stem)
def test_every_extension_guards_its_stack_and_its_tables(source: Path) -> None:
    found = elf.read(ROOT / "sidecar" / hook.made_of(source))
    assert "__stack_chk_fail" in found.undefined
    assert found.bind_now
    assert found.relro


@built
def test_functions_of_the_c_library_are_fortified_by_the_same_flags(tmp_path: Path) -> None:
    """In a probe, since an extension need not call any function whose fortified form is another."""
    assert "__memcpy_chk" in build_probe(tmp_path, hook.FLAGS).undefined


@built
def test_without_the_flags_nothing_of_it_is_there(tmp_path: Path) -> None:
    """So the tests above see the flags, not what a compiler does on its own."""
    without = ("-O2", "-U_FORTIFY_SOURCE", "-fno-stack-protector", "-Wl,-z,norelro,-z,lazy")
    bare = build_probe(tmp_path, (*hook.NEEDED, *without))
    assert (bare.undefined & {"__memcpy_chk", "__stack_chk_fail"}, bare.bind_now, bare.relro) == (set(), False, False)


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no library", encoding="utf-8")
    with pytest.raises(ValueError, match="no 64-bit"):
        elf.read(tmp_path / "text")
