"""The fuzz itself: searches are repeatable and guided, faults end up in files, and every target agrees with its oracle."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import sysconfig
from importlib import import_module
from pathlib import Path

import compiled
import fuzz
import pytest
import sanitized
from fuzz.edges import Edges, NotCounted
from fuzz.mutate import MAX_BYTES, mutated
from fuzz.processes import run
from fuzz.search import Search
from fuzz.worker import noted

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.unsanitized
built = pytest.mark.skipif(bool(compiled.missing()), reason="nothing was compiled here")
with_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="the sanitizers are gcc's")


class Nothing:
    """Counts no ways: outcomes alone lead on."""

    def begin(self) -> None: ...

    def news(self) -> int:
        return 0

    def known(self) -> int:
        return 0


def steps(data: bytes) -> int:
    """How much of a word an input begins with."""
    word = b"fuzz"
    return next((n for n, byte in enumerate(word) if data[n:n + 1] != bytes([byte])), len(word))


def test_a_search_of_one_seed_tries_the_same_inputs_each_time_and_other_seeds_others() -> None:
    tried: list[list[bytes]] = []
    for seed in (1, 1, 2):
        seen: list[bytes] = []
        Search(steps, Nothing(), [b"start"], [b"token"], seed, about=seen.append).run(60.0, inputs=2000)
        tried.append(seen)
    assert tried[0] == tried[1] != tried[2]
    assert len(tried[0]) == 2000
    assert len(set(tried[0])) > 1000


def test_what_leads_on_is_kept_so_that_a_word_is_found_letter_by_letter() -> None:
    search = Search(steps, Nothing(), [b""], [], 1)
    figures = search.run(60.0, inputs=200_000)
    assert figures.outcomes == 5
    assert [steps(one) for one in search.kept] == [0, 1, 2, 3, 4]
    assert "200,000 inputs" in str(figures)


def test_a_change_is_bounded_and_needs_no_material() -> None:
    dice = random.Random(1)
    long = bytes(MAX_BYTES)
    for data, other, tokens in ((b"", b"", ()), (long, long, (b"t" * 100,)), (b"a1b22", b"other", (b"t",))):
        made = {mutated(data, other, tokens, dice) for _ in range(500)}
        assert max(map(len, made)) <= MAX_BYTES
        assert len(made) > 100


@built
@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_a_target_agrees_with_its_oracle_on_its_seeds_and_on_some_changes_of_them(target: str) -> None:
    module = import_module(f"fuzz.{target}")
    seeds = module.seeds()
    search = Search(module.check, Nothing(), seeds, module.TOKENS, 1)
    figures = search.run(60.0, inputs=len(seeds) + 100)
    assert figures.outcomes > 3, "seeds go different ways"


@built
def test_what_was_not_built_for_the_fuzz_is_refused() -> None:
    with pytest.raises(NotCounted, match=r"scripts/sanitize\.py"):
        Edges(["xpyd_sidecar.router.relay._answer"])


TOY = """
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdlib.h>
#include <string.h>

static PyObject *look(PyObject *module, PyObject *data)
{
    Py_ssize_t size = PyBytes_Size(data);
    const char *at = PyBytes_AsString(data);
    char *copy = malloc(size + 1);
    (void)module;
    memcpy(copy, at, size);
    copy[size] = 0;
    int found = 0;
    if (size > 3 && copy[0] == 'f' && copy[1] == 'u' && copy[2] == 'z')
        found = copy[PLANTED];
    free(copy);
    return PyLong_FromLong(found);
}

static PyMethodDef methods[] = {{"look", look, METH_O, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "toy", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_toy(void)
{
    return PyModule_Create(&module);
}
"""
TARGET = """
import toy
MODULES, TOKENS = ("toy",), ()
def seeds():
    return [b"start"]
def check(data):
    toy.look(data)
    assert b"wrong" not in data, "a difference"
"""


def toy(folder: Path, planted: str) -> dict[str, str]:
    """A target with a fault of its own; the environment that it runs in."""
    (folder / "toy.c").write_text(TOY.replace("PLANTED", planted), encoding="utf-8")
    (folder / "toys").mkdir()
    (folder / "toys" / "__init__.py").touch()
    (folder / "toys" / "target.py").write_text(TARGET, encoding="utf-8")
    counter = [*sanitized.compiler(), "-O2", "-fPIC", "-c", "-o", str(folder / "edges.o"), str(sanitized.EDGES)]
    subprocess.run(counter, check=True, timeout=60)
    flags = sanitized.flags(folder / "edges.o")
    subprocess.run([*sanitized.compiler(), *flags, f"-I{sysconfig.get_path('include')}", "-o", str(folder / "toy.abi3.so"),
                    str(folder / "toy.c")], check=True, timeout=60)
    return sanitized.environment(folder)


@with_gcc
def test_a_read_beyond_a_buffer_is_found_by_its_ways_written_down_and_shown_again(tmp_path: Path) -> None:
    told: list[str] = []
    env = toy(tmp_path, "size + 1")
    [found] = run(["toys.target"], tmp_path / "found", env, seconds=60.0, seed=1, tell=told.append)
    assert "heap-buffer-overflow" in found.failure
    assert told == [found.failure]
    [kept] = tmp_path.glob("found/toys.target-*")
    assert kept.read_bytes().startswith(b"fuz"), "three bytes, of which each is a way of its own"
    assert f"scripts/sanitize.py again toys.target {kept}" in found.failure
    command = [sys.executable, "-m", "fuzz.worker", "toys.target", str(tmp_path), "--input", str(kept)]
    again = subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=60)
    assert again.returncode != 0
    assert "heap-buffer-overflow" in again.stderr


@with_gcc
def test_a_difference_is_written_down_as_well_and_a_sound_target_ends_with_its_figures(tmp_path: Path) -> None:
    env = toy(tmp_path, "0")
    [found] = run(["toys.target"], tmp_path, env, seconds=0.5, seed=1, tell=lambda _: None)
    assert (found.failure, "inputs in" in found.figures) == ("", True)
    source = tmp_path / "toys" / "target.py"
    source.write_text(TARGET.replace("start", "is wrong"), encoding="utf-8")
    [found] = run(["toys.target"], tmp_path, env, seconds=10.0, seed=1, tell=lambda _: None)
    assert "AssertionError: a difference" in found.failure
    assert noted(tmp_path / "toys.target.now") == b"is wrong"
    source.write_text("import nothing_of_that_name", encoding="utf-8")
    [found] = run(["toys.target"], tmp_path, env, seconds=10.0, seed=1, tell=lambda _: None)
    assert "before the first input" in found.failure
