"""LoRA adapters on real engines: loaded while they run, from other folders on prefill than on decode, and handed over as
the model itself is.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from engines import HttpError, complete, get, post
from make_model import ADAPTER_RANK, ensure_adapter

from xpyd_operator.local import agents
from xpyd_operator.render.engine import ADAPTER_MIDDLEWARE
from xpyd_sidecar.contract import adapters, metrics
from xpyd_sidecar.contract.adapters import Adapter, AdapterReport
from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.engine.adapter_files import CONFIG

pytestmark = [pytest.mark.engines, pytest.mark.smoke]
# In a batch with an adapter, vLLM on CPUs gives the other requests that of the last slot: one more than there are adapters.
ARGS = ("--enable-lora", "--max-loras", "3", "--max-lora-rank", str(ADAPTER_RANK), "--middleware", ADAPTER_MIDDLEWARE)
PROMPT = list(range(5, 133))


class Engines:
    """One prefill and one decode instance; each has its own copy of every adapter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = Cluster(folder, prefill=0, decode=0)
        self.own: dict[str, Path] = {}
        for role in (Role.PREFILL, Role.DECODE):
            self.own[role] = folder / role
            self.copy(role, "begun")
            self.cluster.add(role, args=(*ARGS, "--lora-modules", f"begun={self.own[role] / 'begun'}"))

    def copy(self, role: Role, name: str) -> Path:
        """The files of the one adapter that there is, in a folder of this name."""
        shutil.copytree(ensure_adapter(), found := self.own[role] / name)
        return found

    def order(self, **names: str) -> None:
        """Have both engines have these adapters: name → folder."""
        for instance in self.cluster.instances:
            made = adapters.order_of(tuple(Adapter(name, str(self.own[instance.role] / of)) for name, of in names.items()))
            asyncio.run(agents.order_adapters(instance.engine.run_dir, made))

    def reports(self, fleet: Fleet) -> list[AdapterReport | None]:
        return [one.adapters for one in fleet.instances]

    def listed(self) -> set[str]:
        return {card["id"] for card in json.loads(get(f"{self.cluster.url}/v1/models"))["data"]}

    def handed_over(self, model: str, start: int) -> float:
        """Tokens of a new prompt that decode received, and did not compute; those of others that come meanwhile with it."""
        before = self.cluster.decode[0].engine.metric(f"{metrics.LOADED_TOKENS}_total")
        answer = complete(self.cluster.url, [start, *PROMPT], 8, model)
        plain = self.cluster.prefill[0].engine.complete([start, *PROMPT], 8, model=model)
        assert answer["token_ids"] == plain["token_ids"], model
        return self.cluster.decode[0].engine.metric(f"{metrics.LOADED_TOKENS}_total") - before


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("adapters"))
    with made.cluster as cluster:
        cluster.wait_ready()
        yield made


def loaded(made: Engines, *names: str) -> None:
    """Wait until both have them."""
    made.cluster.wait_fleet(
        lambda fleet: len(fleet.instances) == 2 and all(
            told is not None and not told.waiting for told in made.reports(fleet)) and {*names} <= made.listed(),
        120.0, f"{names} loaded")


def test_an_adapter_of_two_folders_is_handed_over_as_the_model_is(engines: Engines) -> None:
    engines.cluster.wait_fleet(lambda _: "begun" in engines.listed(), 60.0, "listed")
    for instance in engines.cluster.instances:
        links = [*(instance.engine.run_dir / adapters.LINKS).iterdir()]
        assert [link.resolve() for link in links] == [engines.own[instance.role] / "begun"]
    base = engines.handed_over("tiny", 300)
    assert base >= len(PROMPT) - 16
    assert engines.handed_over("begun", 301) == base


def test_adapters_are_loaded_and_unloaded_while_requests_run(engines: Engines) -> None:
    for role in (Role.PREFILL, Role.DECODE):
        engines.copy(role, "later")
    stop, failures, asked = threading.Event(), list[str](), itertools.count()

    def ask_on() -> None:
        while not stop.is_set():
            try:
                complete(engines.cluster.url, [400 + next(asked) % 100, *PROMPT], 4, "begun")
            except (HttpError, OSError) as error:
                failures.append(str(error))

    traffic = threading.Thread(target=ask_on)
    traffic.start()
    try:
        assert "later" not in engines.listed()
        with pytest.raises(HttpError, match="later"):
            complete(engines.cluster.url, PROMPT, 1, "later")
        engines.order(later="later")
        loaded(engines, "later")
        assert engines.handed_over("later", 310) >= len(PROMPT) - 16
        engines.order()
        engines.cluster.wait_fleet(lambda _: "later" not in engines.listed(), 30.0, "no longer listed")
        assert engines.cluster.decode[0].engine.complete(PROMPT, 1, model="later"), "what was on its way is served still"
        engines.order(later="later")
        loaded(engines, "later")
        assert engines.handed_over("later", 311) >= len(PROMPT) - 16
    finally:
        stop.set()
        traffic.join(120.0)
    assert not traffic.is_alive()
    assert next(asked) > 10
    assert failures == []


def test_one_that_an_engine_cannot_load_is_told_with_its_reason(engines: Engines) -> None:
    for role in (Role.PREFILL, Role.DECODE):
        folder = engines.copy(role, "wide")
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | {"r": 64}))
    engines.order(wide="wide", gone="gone")

    def told(fleet: Fleet) -> bool:
        return all(one is not None and len(one.problems) == 2 for one in engines.reports(fleet))

    engines.cluster.wait_fleet(told, 60.0, "both reasons")
    for report in engines.reports(engines.cluster.fleet()):
        assert report is not None
        reasons = {one.name: one.reason for one in report.problems}
        assert "64" in reasons["wide"], reasons
        assert "there is no folder" in reasons["gone"], reasons
    assert not {"wide", "gone"} & engines.listed()
    assert engines.handed_over("begun", 320) > 0, "nothing else suffers"


def test_the_port_of_an_engine_loads_nothing(engines: Engines) -> None:
    for instance in engines.cluster.instances:
        asked = {"lora_name": "x", "lora_path": str(engines.own[Role.DECODE])}
        with pytest.raises(HttpError) as caught:
            post(f"{instance.engine.url}/v1/load_lora_adapter", asked)
        assert caught.value.status in {404, 405}
