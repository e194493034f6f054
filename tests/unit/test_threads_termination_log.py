"""What ends an engine is left in the container's termination log."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from xpyd_sidecar.threads import termination_log

CORE, WORKERS = termination_log.FATAL


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "termination-log"
    made.touch()
    termination_log.listen(made)
    yield made
    for name in termination_log.FATAL:
        logger = logging.getLogger(name)
        logger.handlers[:] = [each for each in logger.handlers if not isinstance(each, termination_log.TerminationLog)]


def fails(logger: str, words: str, error: Exception, cause: Exception | None = None) -> None:
    error.__cause__ = cause
    logging.getLogger(logger).error(words, exc_info=error)


def test_the_first_process_that_fails_is_the_cause(path: Path) -> None:
    fails(WORKERS, "WorkerProc failed to start.", OSError("no space"))
    fails(CORE, "EngineCore failed to start.", Exception("WorkerProc initialization failed"))
    assert path.read_text() == "OSError: no space"


def test_the_innermost_exception_with_its_module(path: Path) -> None:
    fails(CORE, "EngineCore failed to start.", RuntimeError("outer"), KeyError("x"))
    assert path.read_text() == "KeyError: 'x'"


def test_what_is_not_fatal_leaves_nothing(path: Path) -> None:
    fails(CORE, "one request failed", ValueError("x"))
    logging.getLogger(CORE).error("EngineCore failed to start.")
    fails("vllm.other", "EngineCore failed to start.", ValueError("x"))
    assert path.read_text() == ""


def test_it_is_bounded_and_listens_once(path: Path) -> None:
    termination_log.listen(path)
    fails(CORE, "EngineCore encountered a fatal error.", ValueError("x" * 5000))
    assert len(path.read_text()) == termination_log.LONGEST
    assert sum(isinstance(each, termination_log.TerminationLog) for each in logging.getLogger(CORE).handlers) == 1


def test_without_such_a_file_nothing_happens(tmp_path: Path) -> None:
    termination_log.listen(tmp_path / "none")
    assert not any(isinstance(each, termination_log.TerminationLog) for each in logging.getLogger(CORE).handlers)
    termination_log.leave(tmp_path / "none", "words")
    assert not (tmp_path / "none").exists()


def test_vllm_says_so() -> None:
    vllm = importlib.util.find_spec("vllm")
    if vllm is None:
        pytest.skip("without vLLM")
    for name, phrases in termination_log.FATAL.items():
        source = (Path(vllm.origin).parent.parent / f"{name.replace('.', '/')}.py").read_text()
        assert all(f'logger.exception("{phrase}' in source for phrase in phrases), name
