"""The table of vLLM's options against the parser of the vLLM that is installed; each version in its turn."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path
from typing import Any

import pytest

from xpyd_operator.api import options, tables

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts/vllm_options.py"))
NUMBER: str = SCRIPT["version"]()


def test_the_table_is_that_of_this_version() -> None:
    kept = {one["names"][0]: one for one in SCRIPT["options"]()}
    found = {one.names[0]: one for one in tables.vllm().of_version(NUMBER)}
    assert NUMBER in tables.vllm().versions, "write it with scripts/vllm_options.py"
    assert found.keys() == kept.keys()
    for name, raw in kept.items():
        assert as_written(found[name]) == raw, f"{name}: run scripts/vllm_options.py"


def as_written(one: tables.Option) -> dict[str, Any]:
    made: dict[str, Any] = {"names": list(one.names), "value": one.value}
    made |= {"type": one.type} if one.type != "text" else {}
    made |= {field: list(getattr(one, field)) for field in ("words", "choices") if getattr(one, field)}
    bounds = {bound: getattr(one, bound) for bound in ("above", "least", "below", "most")}
    return made | {bound: number for bound, number in bounds.items() if number is not None}


@pytest.mark.parametrize("args", [
    ["--max-model-len", "8k", "--gpu-memory-util", "0.9", "--seed", "-1"],
    ["--enable-prefix-caching", "--enforce_eager", "-q", "fp8", "--dtype=half"],
    ["--speculative-config.method", "mtp", "--kv-events-config.topic=x", "-O3"],
    ["--lora-modules", "a=/x", "b=/y", "--served", "x"],
    ["--override-generation-config", "{}", "--cudagraph-capture-sizes", "1", "2"],
    ["--no-such"], ["--seed"], ["--seed", "x"], ["--enforce-eager=true"], ["--dtype", "fp16"], ["--enable-p"],
    ["--max-model-len", "long"], ["--max-num-seqs", "1.5"], ["--speculative-config", "mtp"],
], ids=str)
def test_both_have_the_same_verdict(args: list[str], parser: argparse.ArgumentParser) -> None:
    said = list(options.faults(args, f"vllm/vllm-openai:v{NUMBER}.0"))
    try:
        parser.parse_args(args)
    except ValueError:
        assert said, "the parser refuses it"
    else:
        assert not said
