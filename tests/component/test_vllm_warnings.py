"""What we warn of, against the vLLM that is installed: its parser, and what it says of such configurations."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from make_model import ensure_model

from xpyd_operator.api import speculation
from xpyd_operator.api import vllm as warned
from xpyd_sidecar.contract import launch
from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.engine import compat
from xpyd_sidecar.engine.compat import common, drafting

pytest.importorskip("vllm")
FULL = {option.replace("|", "") for option in warned._TABLE}


def parsed(parser: argparse.ArgumentParser, *args: str) -> argparse.Namespace:
    return parser.parse_args(["--model", "a/b", *args])


def names(parser: argparse.ArgumentParser) -> list[str]:
    return sorted({name for action in parser._actions for name in action.option_strings})


def config(**given: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    transfer = launch.kv_transfer_config(KvOptions(), "recompute")
    return EngineArgs(model=str(ensure_model()), enforce_eager=True, dtype="float32", max_model_len=2048,
                      kv_transfer_config=transfer, **given).create_engine_config()


def test_the_version_is_the_one_of_the_connector() -> None:
    assert [f"vLLM {one}".rstrip(".") for one in common.KNOWN if compat.version().startswith(one)] == [warned.VERSION]


def test_every_option_exists_and_its_short_forms_are_known_exactly_where_vllm_knows_them(
    parser: argparse.ArgumentParser
) -> None:
    known = names(parser)
    for option in (*FULL, *warned._EQUAL, *warned._CUMEM, warned._CHOICE, warned._CALLS):
        assert option in known or any(name.startswith(option) for name in known), option
    checked = 0
    for name in known:
        if name.startswith("--no-"):
            continue  # it switches off what we warn of
        for length in range(3, len(name) + 1) if name.startswith("--") else (len(name),):
            try:
                meant = parser._parse_optional(name[:length])
            except ValueError:
                continue  # ambiguous: vLLM refuses it
            if meant is None:
                continue
            action = meant[0][0] if isinstance(meant, list) else meant[0]
            if action is not None:
                checked += 1
                found = bool(warned.full_option_name(name[:length]))
                assert found == any(map(warned.full_option_name, action.option_strings)), name[:length]
    assert checked > 1000


def test_a_second_model_is_left_out_and_a_third_one_ends_the_engine(parser: argparse.ArgumentParser) -> None:
    assert parsed(parser, "c/d").model == "a/b"
    with pytest.raises(ValueError, match="unrecognized arguments: e/f"):
        parsed(parser, "c/d", "e/f")


def test_choosing_tools_needs_a_parser(parser: argparse.ArgumentParser) -> None:
    from vllm_places import at_its_place

    with pytest.raises(TypeError, match="requires --tool-call-parser"):
        at_its_place("validate_parsed_serve_args")(parsed(parser, "--enable-auto-tool-choice"))


def test_tokens_only_means_no_tokenizer() -> None:
    assert config(tokens_only=True).model_config.skip_tokenizer_init
    assert not config().model_config.skip_tokenizer_init


@pytest.mark.parametrize("given", [{"runner": "pooling"}, {"convert": "embed"}])
def test_a_runner_that_pools_does_not_generate(given: dict[str, str]) -> None:
    assert config(**given).model_config.runner_type == "pooling"


def test_methods_of_speculation_are_those_of_vllm() -> None:
    """Where this fails, vLLM knows more of them: the connector and ``check`` must be told what they are."""
    from typing import get_args

    from vllm.config.speculative import MTPModelTypes, SpeculativeMethod

    def flat(kind: Any) -> set[str]:
        return {kind} if isinstance(kind, str) else {name for each in get_args(kind) for name in flat(each)}

    mtp, all_of_them = flat(MTPModelTypes), flat(SpeculativeMethod)
    assert all(name == "mtp" or name.endswith("_mtp") for name in mtp)
    tokens, models = set(drafting.BY_TOKENS), set(drafting.BY_MODELS)
    assert all_of_them - tokens - models - mtp <= speculation.OTHERS
    assert tokens | models <= all_of_them
    assert models == speculation.MODELS
    assert not (tokens | models) & speculation.OTHERS


@pytest.mark.parametrize("args", [
    ["--speculative-config", '{"method": "ngram", "num-speculative-tokens": 2}'],
    ["-sc={}", "-sc", '{"method": "suffix"}'],
    ["--speculative_config.method", "ngram", "--speculative-config.num-speculative-tokens=3", "--speculative-config",
     '{"method": "eagle"}'],
    ["--spec-method", "ngram", "--spec-tok=4", "--speculative-c", '{"prompt_lookup_max": 2}'],
    ["--spec-model=a/b", "--seed", "1", "--spec-tokens", "2"], ["--speculative-config", "None"], ["--enforce-eager"],
], ids=str)
def test_what_a_role_speculates_with_is_read_as_vllm_reads_it(
    parser: argparse.ArgumentParser, args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config.speculative import SpeculativeConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    made: list[dict[str, Any]] = []
    monkeypatch.setattr("vllm.engine.arg_utils.SpeculativeConfig", lambda **fields: made.append(fields))
    assert SpeculativeConfig is not None
    AsyncEngineArgs.from_cli_args(parsed(parser, *args)).create_speculative_config(None, None)
    theirs = [{name: value for name, value in fields.items() if not name.startswith("target_")} for fields in made]
    found = speculation.read([(str(index), one) for index, one in enumerate(args)])
    assert ([found.fields] if found.path else []) == theirs


@pytest.mark.parametrize("value", ["{method: ngram}", "[1", "ngram"])
def test_a_value_that_is_no_json_ends_an_engine(parser: argparse.ArgumentParser, value: str) -> None:
    with pytest.raises((SystemExit, ValueError, argparse.ArgumentError)):
        parsed(parser, "--speculative-config", value)


def test_short_forms_of_speculation_are_known_exactly_where_vllm_knows_them(parser: argparse.ArgumentParser) -> None:
    checked = 0
    for name in names(parser):
        for length in range(3, len(name) + 1) if name.startswith("--spe") else ():
            try:
                meant = parser._parse_optional(name[:length])
            except ValueError:
                continue  # ambiguous: vLLM refuses it
            action = meant[0][0] if isinstance(meant, list) else meant[0] if meant else None
            if action is not None:
                checked += 1
                assert bool(speculation.option(name[:length])) == any(map(speculation.option, action.option_strings))
    assert checked > 20


def test_an_allocator_that_moves_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(warned._ALLOCATOR, "expandable_segments:True")
    with pytest.raises(ValueError, match="expandable_segments"):
        config()


def test_rows_of_experts_are_refused_beside_connectors_by_name_and_so_not_beside_ours() -> None:
    """Where this fails, vLLM knows more of it, and the warning is to say so."""
    import inspect

    from vllm.config import VllmConfig

    text = inspect.getsource(VllmConfig)
    assert '"NixlConnector"' in text
    assert "PD auxiliary output is not supported" in text
    assert "Xpyd" not in text
