"""What the API server says by itself names what is wrong and what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
from api_documents import document
from api_server import admit, told

from xpyd_operator.api import owned
from xpyd_operator.api.crds import service_crd

CRD = service_crd()


@pytest.mark.parametrize(("changes", "words"), [
    ({"spec.engine.args": ["--seed", "1", "--tensor-par=2"]},
     "spec.engine.args: --tensor-parallel-size is set by xpyd; write spec.prefill.parallelism or spec.decode.parall"),
    ({"spec.decode.args": ["-tp", "2"]}, "spec.decode.args: --tensor-parallel-size is set by xpyd; write spec.prefill.par"),
    ({"spec.engine.args": ["--hf_tok=x"]}, "spec.engine.args: one of these is set by xpyd; see the reference of engine."),
    ({"spec.engine.args": ["--seed 1"]}, "spec.engine.args: args: an option and its value are two items, or --optio"),
    ({"spec.model.source": "ftp://bucket/a"}, "spec.model.source: ftp://bucket/a is no source of a model; write a hub"),
    ({"spec.model.source": "1 s"}, "spec.model.source: 1 s is no source of a model; write a hub"),
], ids=str)
def test_it_names_what_is_wrong(changes: dict[str, Any], words: str) -> None:
    (said,) = admit(CRD, document(changes))
    assert said.startswith(words)


def test_every_owned_argument_is_named_with_what_check_says() -> None:
    rule = {"message": "", "messageExpression": owned.message()}
    listed = dict(owned.listing())
    for option, instead in listed.items():
        assert told(rule, ["--seed", option.rstrip("*"), "x"]) == f"{option.rstrip('*')} is set by xpyd; {instead}"
    for short, option in owned.SHORT.items():
        found = owned.option_of(option)
        assert found is not None
        assert told(rule, [short, "2"]).endswith(f" is set by xpyd; {found[1]}")
