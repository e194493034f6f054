"""Which tests run C is found by what they import, and the sanitized package is built beside the release."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import sanitized

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.unsanitized
with_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="the sanitizers are gcc's")


def test_tests_that_import_an_extension_over_any_number_of_modules_are_found(tmp_path: Path) -> None:
    def test(name: str, text: str) -> None:
        (tmp_path / f"test_{name}.py").write_text(text, encoding="utf-8")

    test("direct", "from xpyd_sidecar.router.relay import _fast")
    test("through_a_module", "import xpyd_sidecar.router.app as a")
    test("through_support", "from router_fleet import fleet")
    test("inside", "def test_a():\n    from xpyd_sidecar.transport.moves import sums")
    test("other", "import json\nfrom xpyd_sidecar.contract import keys\nfrom . import nothing")
    (tmp_path / "helper.py").write_text("from xpyd_sidecar.router.relay import _fast", encoding="utf-8")
    assert [path.stem for path in sanitized.tests_of_c(tmp_path)] == [
        "test_direct", "test_inside", "test_through_a_module", "test_through_support"]
    assert [path.stem for path in sanitized.near_tests_of_c(tmp_path)] == ["test_direct", "test_inside"]


def test_of_this_repository_those_of_each_extension_are_among_them() -> None:
    found = {path.stem for path in sanitized.tests_of_c()}
    assert found >= {"test_relay_fast", "test_relay_answer", "test_http_incoming", "test_transport_moves",
                     "test_transport_shm_fetch", "test_session_receiver", "test_session_links"}
    near = {path.stem for path in sanitized.near_tests_of_c()}
    assert near >= {"test_relay_fast", "test_relay_answer", "test_transport_moves", "test_transport_tcp_fetch"}
    assert near < found


@with_gcc
def test_what_is_built_is_sanitized_counts_its_ways_and_leaves_the_release_alone(tmp_path: Path) -> None:
    def release() -> list[tuple[Path, int]]:
        return [(path, path.stat().st_mtime_ns) for path in sorted((ROOT / "sidecar/src").rglob("*.so"))]

    before = release()
    package = sanitized.build(tmp_path)
    made = sorted(path.relative_to(package) for path in package.rglob("*.so"))
    assert made == sorted(sanitized.hook.made_of(source).relative_to("src") for source in sanitized.hook.SOURCES)
    for path in made:
        raw = (package / path).read_bytes()
        assert b"__asan_init" in raw
        assert b"__ubsan_handle" in raw
        assert b"coverage_news" in raw
        assert b"_chk\0" not in raw.replace(b"__stack_chk", b""), "fortified functions hide faults"
    assert release() == before


@with_gcc
def test_the_sanitizers_come_first_in_a_process_that_loads_it() -> None:
    env = sanitized.environment(Path("package"), MORE="1")
    first, *_ = env["LD_PRELOAD"].split()
    assert Path(first).exists()
    assert "libasan" in first
    assert env["PYTHONPATH"].split(os.pathsep)[0] == "package"
    assert (env["MORE"], env["PYTHONMALLOC"]) == ("1", "malloc")


def test_a_compiler_without_the_libraries_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sanitized.library.cache_clear()
    monkeypatch.setenv("CC", "echo")
    with pytest.raises(RuntimeError, match="echo has no libasan"):
        sanitized.library("libasan.so")
    sanitized.library.cache_clear()
