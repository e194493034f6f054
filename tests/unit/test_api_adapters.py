"""``spec.adapters``: what is refused, and what engines and agents are given."""

from __future__ import annotations

from typing import Any

import pytest
from api_documents import document

from xpyd_operator.api import outside
from xpyd_operator.api.decode import decode_service
from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService
from xpyd_operator.errors import SpecError
from xpyd_operator.render.engine import ADAPTER_MIDDLEWARE, adapter_order, engine_args, engine_revision
from xpyd_sidecar.contract.adapters import Adapter, AdapterOrder
from xpyd_sidecar.contract.ids import Role

SQL = {"name": "sql", "source": "/adapters/sql"}


def accepted(changes: dict[str, Any], **sections: Any) -> DisaggService:
    return decode_service(document(changes, **sections)).service


def wrong(*adapters: dict[str, Any], target: Target = Target.KUBERNETES, **sections: Any) -> str:
    with pytest.raises(SpecError) as caught:
        decode_service(document({"spec.adapters": list(adapters)}, **sections), target=target)
    return str(caught.value)


@pytest.mark.parametrize(("adapters", "path", "right"), [
    ([SQL, SQL], "spec.adapters[1].name", "each may stand once"),
    ([{**SQL, "name": "a b"}], "spec.adapters[0].name", "letters, digits"),
    ([{**SQL, "name": "-a"}], "spec.adapters[0].name", "letters, digits"),
    ([{**SQL, "source": "sql"}], "spec.adapters[0].source", "a hub id (org/sql-lora)"),
    ([{**SQL, "source": "pvc://claim/sql"}], "spec.adapters[0].source", "a folder as the engines see it"),
    ([{**SQL, "source": "./sql"}], "spec.adapters[0].source", "`xpyd up` only"),
    ([{**SQL, "revision": "v1"}], "spec.adapters[0].revision", "only for a hub id"),
    ([{"name": "sql"}], "spec.adapters[0].source", ""),
    ([{**SQL, "sorce": "x"}], "spec.adapters[0].sorce", "source"),
    ([{"name": f"{index}{'x' * 120}", "source": "/x"} for index in range(300)], "spec.adapters", "at most 32768"),
])
def test_what_cannot_be_is_refused_where_it_stands(adapters: list[dict[str, Any]], path: str, right: str) -> None:
    words = wrong(*adapters)
    assert path in words
    assert right in words


def test_an_adapter_cannot_have_the_name_of_the_model() -> None:
    model = {"source": "Qwen/Qwen3-8B"}
    assert "the model itself" in wrong({**SQL, "name": "Qwen/Qwen3-8B"}, model=model)
    assert "the model itself" in wrong(SQL, model={**model, "servedName": "sql"})


def test_instances_of_several_pods_have_adapters_of_vllm_alone() -> None:
    words = wrong(SQL, decode={"parallelism": {"tensor": 2, "pods": 2}})
    assert "decode.parallelism.pods above 1" in words
    assert "--lora-modules" in words


def test_engines_are_replaced_for_the_first_adapter_and_for_no_other() -> None:
    def revision(*adapters: dict[str, Any], **engine: Any) -> str:
        service = accepted({"spec.adapters": list(adapters)}, **({"engine": engine} if engine else {}))
        return engine_revision(service, Role.DECODE, "m")

    law = {"name": "law", "source": "org/law-lora", "revision": "v2"}
    assert revision() != revision(SQL) == revision(SQL, law) == revision({**SQL, "source": "/adapters/other"})
    enabled = {"args": ["--enable-lora"]}
    assert revision(**enabled) != revision(), "vLLM's own adapters are known by their files, too"
    assert revision(SQL, **enabled) == revision(**enabled), "not even for the first one"


def test_an_engine_with_adapters_is_told_so_and_one_without_has_nothing_of_it() -> None:
    args = engine_args(accepted({"spec.adapters": [SQL]}), Role.PREFILL, "m")
    assert args[args.index("--middleware") + 1] == ADAPTER_MIDDLEWARE
    assert "--enable-lora" in args
    assert "--middleware" not in engine_args(accepted({}), Role.PREFILL, "m")


def test_engines_of_a_local_model_may_fetch_adapters_from_the_hub() -> None:
    local = {"spec.model.source": "/models/qwen"}
    assert outside.variables(accepted(local), "/cache") == {"HF_HUB_OFFLINE": "1"}
    assert outside.variables(accepted(local | {"spec.adapters": [SQL]}), "/cache") == {"HF_HOME": "/cache"}


def test_agents_are_told_what_the_document_says() -> None:
    service = accepted({"spec.adapters": [SQL, {"name": "law", "source": "org/law-lora", "revision": "v2"}]})
    assert adapter_order(service) == AdapterOrder((Adapter("law", "org/law-lora", "v2"), Adapter("sql", "/adapters/sql")))
    assert adapter_order(accepted({})) == AdapterOrder()
