"""Real engines that component tests share, since starting one costs about a minute of two cores.

    cluster     1P1D with router and agents, started by the first test that asks for it. Before each test everything
                runs and is ready (what the last test killed is started again); after it both engines must be empty: no
                request, no block in use, no transfer open.
    cluster.plain_url    the prefill engine asked directly: what a plain engine answers.

    skip      moves time on for what runs in the test's own process.
    copies    what engines stepped by hand are given: a test that makes some runs with copies that are complete at once, as
              on a CPU, and with late ones, as on a GPU.

Tests with real engines are marked ``engines``, so that the others can run without them; those that are marked ``smoke``
besides, one for each class of faults, run with every change. In a test without the mark no engine starts.

Tests that bring engines of their own run first, so that they do not share the machine with the cluster: those without the
cluster, then those that compare it with ``plain``, then the rest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from cluster import PATIENT, Cluster
from engines import Engine
from fair_session import fair  # noqa: F401 (a fixture)

HERE = Path(__file__).parent
TIMEOUT_S = 1200
ENGINE_ARGS = ("--max-num-batched-tokens", "512", "--num-gpu-blocks-override", "96")
"""Prompts above 512 tokens are prefilled in chunks; 96 blocks of 128 tokens hold six of the longest prompts."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give these tests the time that engines take, and put those with the shared cluster last."""
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    names = {item: set(getattr(item, "fixturenames", ())) if item in ours else set() for item in items}
    items.sort(key=lambda item: ("shared_cluster" in names[item], "plain" not in names[item]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Engines start for those tests alone that say so."""
    marked = HERE not in item.path.parents or item.get_closest_marker("engines") is not None
    Engine.refused = "" if marked else f"{item.name} starts engines, so mark it with pytest.mark.engines"


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """1P1D for the whole session, not started. Ask for ``cluster`` instead."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), prefill=1, decode=1, engine_args=ENGINE_ARGS, options=PATIENT)
    try:
        yield cluster
    finally:
        cluster.kill()


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """1P1D, ready before the test and empty after it."""
    shared_cluster.repair()
    yield shared_cluster
    shared_cluster.wait_idle()


@pytest.fixture(params=["at once", "late"])
def copies(request: pytest.FixtureRequest) -> dict[str, Any]:
    """When the copies of engines stepped by hand are complete."""
    from copies import clock_of

    return clock_of(request.param)


@pytest.fixture(scope="session")
def parser() -> argparse.ArgumentParser:
    """The parser of the vLLM that is installed; raises ValueError where it would end the process."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm_places import at_its_place

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    made: argparse.ArgumentParser = at_its_place("make_arg_parser")(Parser())
    return made


@pytest.fixture
def skip(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the time of all threads on. Asked for before what has threads: time must not go back while a thread stops."""
    real, ahead = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead[0])

    def skipped(seconds: float) -> None:
        ahead[0] += seconds

    return skipped
