"""``kv.offload``: which connectors stand beside ours, in which order, with what."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from render_service import service

from xpyd_operator.api.offload import NO_STORES
from xpyd_operator.render import paths as at
from xpyd_operator.render.engine import engine_args, engine_revision
from xpyd_operator.render.offload import CPU_REASON, offload_connectors
from xpyd_sidecar.contract.ids import Role


def transfer(role: Role = Role.DECODE, **spec: Any) -> dict[str, Any]:
    """What vLLM is told, as an object."""
    args = engine_args(service(None, **spec), role, "m")
    found = json.loads(args[args.index("--kv-transfer-config") + 1])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("role", Role)
def test_ours_comes_first_in_both_roles_and_every_child_has_the_outer_policy(role: Role) -> None:
    store = {"connector": "LMCacheMPConnector", "options": {"lmcache.mp.port": 7}}
    offload = {"memory": "64Gi", "disk": "500Gi", "store": store}
    outer = transfer(role, kv={"offload": offload})
    alone = transfer(role)
    both = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    assert {"kv_connector": "MultiConnector", **both}.items() <= outer.items()
    disk = {"kv_offload_backend": "disk", "disk_path": f"{at.OFFLOAD}/kv", "disk_capacity_bytes": int((500 << 30) * 0.99)}
    assert outer["kv_connector_extra_config"]["connectors"] == [
        alone,
        {"kv_connector": "OffloadingConnector", **both, "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 30}},
        {"kv_connector": "SimpleCPUOffloadConnector", **both, "kv_connector_extra_config": disk},
        {"kv_connector": "LMCacheMPConnector", **both, "kv_connector_extra_config": {"lmcache.mp.port": 7}},
    ]


def test_sizes_are_of_an_instance_whatever_ranks_it_has() -> None:
    ranks = {"tensor": 2, "data": 4}
    one = service(None, kv={"offload": {"memory": "64Gi"}}, decode={"parallelism": ranks})
    (memory,) = offload_connectors(one, Role.DECODE)
    assert memory["kv_connector_extra_config"] == {"cpu_bytes_to_use": 16 << 30}  # vLLM's figure: of all tensor ranks
    two = service(None, kv={"offload": {"disk": "100Gi"}}, decode={"parallelism": {"tensor": 2, "pipeline": 2}})
    (disk,) = offload_connectors(two, Role.DECODE)
    assert disk["kv_connector_extra_config"]["disk_capacity_bytes"] == int((100 << 30) * 0.99) // 4  # and here of one


def test_a_store_of_the_users_own_comes_by_its_module() -> None:
    found = transfer(kv={"offload": {"store": {"connector": "mine.store.Mine"}}})
    assert found["kv_connector_extra_config"]["connectors"][1] == {
        "kv_connector": "Mine", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_module_path": "mine.store",
    }


def test_without_it_nothing_is_different_and_with_it_engines_are_replaced() -> None:
    assert transfer()["kv_connector"] == "XpydConnector"
    plain = engine_revision(service(None), Role.DECODE, "m")
    with_it = service(None, kv={"offload": {"memory": "1Gi"}})
    assert engine_revision(with_it, Role.DECODE, "m") != plain
    assert engine_revision(with_it, Role.DECODE, "m") == engine_revision(with_it, Role.PREFILL, "m")


def test_every_connector_that_is_no_store_is_known_to_vllm_and_its_words_are_vllms() -> None:
    """The list would be wrong without notice if vLLM gave one another name."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (folder,) = map(Path, spec.submodule_search_locations)
    factory = (folder / "distributed/kv_transfer/kv_connector/factory.py").read_text()
    named = set(re.findall(r'register_connector\(\s*"(\w+)"', factory))
    assert set(NO_STORES) - {"XpydConnector"} < named
    says = re.sub(r'"\s+"', "", (folder / "v1/kv_offload/cpu/spec.py").read_text())
    assert CPU_REASON in says
