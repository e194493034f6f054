"""The loader of adapters of one API server, with a server that is played and real files."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, Gauge
from vllm.lora.request import LoRARequest
from vllm.v1.metrics import loggers

from xpyd_sidecar.contract import adapters
from xpyd_sidecar.contract.adapters import Adapter, AdapterState
from xpyd_sidecar.engine import adapter_loader
from xpyd_sidecar.engine.adapter_files import CONFIG, WEIGHTS, AdapterMissing, digest_of
from xpyd_sidecar.engine.adapter_loader import AdapterLoader
from xpyd_sidecar.engine.compat.adapters import AdapterModels, AdapterRefused


class Server:
    """``refuses``: names that the engine cannot load."""

    slots = 4

    def __init__(self, **begun_with: str) -> None:
        self.has = dict(begun_with)
        self.refuses: set[str] = set()
        self.log: list[str] = []

    def recent(self) -> tuple[str, ...]:
        return ()

    def paths(self) -> dict[str, str]:
        return dict(self.has)

    async def load(self, name: str, path: str) -> None:
        self.log.append(f"load {name}")
        if name in self.refuses:
            raise AdapterRefused("rank 64 is above --max-lora-rank 16")
        self.has[name] = path

    def repath(self, name: str, path: str) -> None:
        self.has[name] = path

    def unload(self, name: str) -> None:
        self.log.append(f"unload {name}")
        self.has.pop(name, None)

    def forget_series(self) -> None:
        self.log.append("forget series")


class Clock:
    """What a loader's times are by, in place of its loop."""

    def __init__(self, loader: AdapterLoader) -> None:
        self.now = 0.0
        loader._loop = self  # type: ignore[assignment]

    def time(self) -> float:
        return self.now


def files(folder: Path, content: str = "w") -> Path:
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text("{}")
    (folder / WEIGHTS[0]).write_text(content)
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (found := tmp_path / "run").mkdir()
    return found


def state(run_dir: Path) -> AdapterState:
    found = adapters.read_state(run_dir)
    assert found is not None
    return found


async def tend(loader: AdapterLoader, times: int = 4) -> None:
    for _ in range(times):
        await loader.step()


def order(run_dir: Path, *wanted: Adapter) -> str:
    made = adapters.order_of(wanted)
    adapters.write_order(run_dir, made)
    return made.digest


async def test_an_order_is_followed_and_told_of(run_dir: Path, tmp_path: Path) -> None:
    server = Server()
    loader = AdapterLoader(run_dir, server)
    loader.begin()
    assert state(run_dir) == AdapterState(slots=4)
    digest = order(run_dir, Adapter("sql", str(files(tmp_path / "sql"))), Adapter("law", str(files(tmp_path / "law", "l"))))
    await tend(loader)
    assert state(run_dir) == AdapterState(digest, ("law", "sql"), slots=4)
    assert adapters.digest_in(server.has["sql"]) == digest_of(tmp_path / "sql")
    assert os.readlink(server.has["sql"]) == str(tmp_path / "sql")


async def test_equal_files_in_two_folders_have_one_path_and_changed_ones_another(run_dir: Path, tmp_path: Path) -> None:
    server, one, other, new = Server(), files(tmp_path / "a"), files(tmp_path / "b"), files(tmp_path / "c", "new")
    loader = AdapterLoader(run_dir, server)
    order(run_dir, Adapter("sql", str(one)))
    await tend(loader)
    before = server.has["sql"]
    order(run_dir, Adapter("sql", str(other)))
    await tend(loader)
    assert server.has["sql"] == before
    assert server.log == ["load sql"], "the engine has these files already"
    order(run_dir, Adapter("sql", str(new)))
    await tend(loader)
    assert server.has["sql"] != before
    assert server.log == ["load sql", "load sql"], "the name never means nothing"


async def test_a_surplus_is_told_no_longer_and_answered_to_for_a_while(run_dir: Path, tmp_path: Path) -> None:
    server, sql = Server(), Adapter("sql", str(files(tmp_path / "sql")))
    loader = AdapterLoader(run_dir, server)
    clock = Clock(loader)
    order(run_dir, sql)
    await tend(loader)
    digest = order(run_dir)
    for clock.now in (0.0, adapter_loader.UNLOAD_AFTER_S - 0.1):
        await tend(loader)
        assert state(run_dir) == AdapterState(digest, (), slots=4)
        assert "sql" in server.has
    clock.now = adapter_loader.UNLOAD_AFTER_S + 0.1
    await tend(loader)
    assert server.has == {}
    order(run_dir, sql)
    await tend(loader)
    assert state(run_dir).loaded == ("sql",)


async def test_one_that_is_wanted_again_in_time_stays(run_dir: Path, tmp_path: Path) -> None:
    server, sql = Server(), Adapter("sql", str(files(tmp_path / "sql")))
    loader = AdapterLoader(run_dir, server)
    clock = Clock(loader)
    for wanted in ((sql,), (), (sql,)):
        order(run_dir, *wanted)
        await tend(loader)
    clock.now = 2 * adapter_loader.UNLOAD_AFTER_S
    await tend(loader)
    assert (server.has.keys(), server.log) == ({"sql"}, ["load sql"])


async def test_what_cannot_be_loaded_is_told_with_its_reason_and_holds_up_no_other(run_dir: Path, tmp_path: Path) -> None:
    server = Server()
    server.refuses.add("big")
    loader = AdapterLoader(run_dir, server)
    clock = Clock(loader)
    order(run_dir, Adapter("big", str(files(tmp_path / "big", "b"))), Adapter("gone", str(tmp_path / "gone")),
          Adapter("sql", str(files(tmp_path / "sql"))))
    await tend(loader)
    told = state(run_dir)
    assert told.loaded == ("sql",)
    assert [(each.name, each.reason) for each in told.problems] == [
        ("big", "rank 64 is above --max-lora-rank 16"), ("gone", f"there is no folder {tmp_path / 'gone'}")]
    server.refuses.clear()
    files(tmp_path / "gone", "here now")
    clock.now = adapter_loader.AGAIN_S[0] + 0.1
    await tend(loader)
    assert state(run_dir).loaded == ("big", "gone", "sql")
    assert not state(run_dir).problems


async def test_adapters_that_the_engine_began_with_are_known_by_their_files(run_dir: Path, tmp_path: Path) -> None:
    server = Server(own=str(files(tmp_path / "own")), lost=str(tmp_path / "lost"))
    loader = AdapterLoader(run_dir, server)
    loader.begin()
    assert state(run_dir).loaded == ("lost", "own")
    running = asyncio.ensure_future(loader.run())
    async with asyncio.timeout(60):
        while adapters.digest_in(server.has["own"]) is None:  # noqa: ASYNC110 (of a thread)
            await asyncio.sleep(0.01)
    running.cancel()
    assert adapters.digest_in(server.has["own"]) == digest_of(tmp_path / "own")
    assert server.has["lost"] == str(tmp_path / "lost")


async def test_an_order_that_cannot_be_read_changes_nothing(run_dir: Path, tmp_path: Path) -> None:
    server = Server()
    loader = AdapterLoader(run_dir, server)
    order(run_dir, Adapter("sql", str(files(tmp_path / "sql"))))
    await tend(loader)
    (run_dir / adapters.FILE).write_text("{half")
    await tend(loader)
    assert server.has.keys() == {"sql"}


async def test_series_of_sets_of_adapters_do_not_grow_for_ever(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    loader = AdapterLoader(run_dir, server)
    await tend(loader)
    assert server.log == []
    monkeypatch.setattr(adapter_loader, "SERIES_S", 0.0)
    await loader.step()
    assert server.log == ["forget series"]


def test_the_series_of_vllm_is_found_by_its_name() -> None:
    registry_name = "vllm:lora_requests_info"
    assert registry_name in inspect.getsource(loggers)
    gauge = Gauge(registry_name, "as vLLM makes it", ["running_lora_adapters"])
    try:
        for name in ("a", "b", "a,b"):
            gauge.labels(name).set(1)
        AdapterModels(SimpleNamespace(lora_requests={}), SimpleNamespace(lora_config=None)).forget_series()
        assert next(iter(gauge.collect())).samples == []
    finally:
        REGISTRY.unregister(gauge)


async def test_vllms_own_adapters_are_loaded_swapped_and_remembered_by_use() -> None:
    """With vLLM's own class for requests, and its server played."""
    class Client:
        async def add_lora(self, request: LoRARequest) -> bool:
            if request.lora_path == "/bad":
                raise ValueError("rank 64 is above 16")
            return True

    ids = iter(range(1, 100))
    models = SimpleNamespace(
        lora_requests={}, lora_id_counter=SimpleNamespace(inc=lambda _: next(ids)), engine_client=Client(),
        lora_resolver_lock=defaultdict(asyncio.Lock), is_base_model=lambda name: name == "tiny")
    has = AdapterModels(models, SimpleNamespace(lora_config=SimpleNamespace(max_loras=2)))
    for name in ("a", "b", "c"):
        await has.load(name, f"/{name}")
    before = models.lora_requests["a"]
    await has.load("a", "/new")
    assert (before.lora_path, models.lora_requests["a"].lora_path) == ("/a", "/new"), "who runs keeps what it has"
    assert before.lora_int_id != models.lora_requests["a"].lora_int_id
    for wrong, path in (("tiny", "/t"), ("bad", "/bad")):
        with pytest.raises(AdapterRefused):
            await has.load(wrong, path)
    assert models.lora_requests.keys() == {"a", "b", "c"}
    for name in ("b", "c", "b"):
        models.lora_requests[name]
    assert has.recent() == ("c", "b")
    has.repath("c", "/run/c")
    has.unload("b")
    has.unload("b")
    assert (has.recent(), has.paths()) == (("c",), {"a": "/new", "c": "/run/c"})
    none = AdapterModels(SimpleNamespace(lora_requests={}), SimpleNamespace(lora_config=None))
    with pytest.raises(AdapterRefused, match="--enable-lora"):
        await none.load("a", "/a")


def test_a_digest_tells_files_apart_and_names_what_is_missing(tmp_path: Path) -> None:
    one, same, other = files(tmp_path / "1"), files(tmp_path / "2"), files(tmp_path / "3", "x")
    assert digest_of(one) == digest_of(same) != digest_of(other)
    (other / CONFIG).unlink()
    with pytest.raises(AdapterMissing, match=CONFIG):
        digest_of(other)
    with pytest.raises(AdapterMissing, match="no folder"):
        digest_of(tmp_path / "none")
