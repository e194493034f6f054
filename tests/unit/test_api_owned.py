"""Arguments that xpyd sets itself, in each of vLLM's spellings."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_operator.api.owned import ENV_PATTERN, env, expression, is_spaced_option, listing, option_of

EXPRESSION = re.compile(expression())
OPTIONS = [option.rstrip("*") for option, _ in listing() if not option.endswith("*")]
PREFIXES = sorted({option[:length] for option in OPTIONS for length in range(len(option) + 1)})


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_in_every_spelling(option: str) -> None:
    underscored = "--" + option[2:].replace("-", "_")
    shortened = option[:-1] if len(option) > 10 else option
    for argument in (option, f"{option}=1", underscored, f"{underscored}=1", f"{option}.key=1", shortened):
        found = option_of(argument)
        assert found is not None, argument
        assert found[0] == option
        assert EXPRESSION.search(argument), argument


@pytest.mark.parametrize(
    ("alias", "option"),
    [
        ("-tp", "--tensor-parallel-size"), ("-tp=2", "--tensor-parallel-size"), ("-t", "--tensor-parallel-size"),
        ("-pp", "--pipeline-parallel-size"), ("-dp", "--data-parallel-size"), ("-dpl", "--data-parallel-size-local"),
        ("-n", "--nnodes"), ("-n2", "--nnodes"), ("-r0", "--node-rank"), ("-asc", "--api-server-count"),
    ],
)  # fmt: skip
def test_aliases(alias: str, option: str) -> None:
    found = option_of(alias)
    assert found is not None
    assert found[0] == option
    assert EXPRESSION.search(alias)


@pytest.mark.parametrize(
    "argument",
    [
        "--max-model-len", "--max-model-len=8192", "--enforce-eager", "--dtype", "float32", "8000", "", "-q", "-ep",
        "--gpu-memory-utilization=0.9", "--config-format", "--model-impl", "--kv-cache-dtype", "--kv-events-config",
        "--kv-cache-memory-bytes", "--prefill-schedule-interval", "--distributed-timeout-seconds", "--tokenizer", "--seed",
        "--enable-expert-parallel", "--pooler-config", "--hf-overrides", "port", "model", '{"--port": 1}', "--", "-", "-_",
        "_tp", "--no-enable-prefix-caching", "--max-num-batched-tokens", "--device-ids", "--data parallel",
    ],
)  # fmt: skip
def test_free_arguments(argument: str) -> None:
    assert option_of(argument) is None
    assert not EXPRESSION.search(argument)


@settings(deadline=None)
@given(st.text("-_=.ptdnr12moeldhsaigk ", max_size=12) | st.sampled_from(PREFIXES))
def test_the_expression_for_the_crd_finds_the_same(argument: str) -> None:
    assert (option_of(argument) is not None) == bool(EXPRESSION.search(argument))


@pytest.mark.parametrize(
    ("argument", "expected"), [("--a b", True), ("-a b", True), ("--a=b c", False), ("a b", False), ("--a", False)]
)
def test_option_and_value_in_one_item(argument: str, expected: bool) -> None:
    assert is_spaced_option(argument) == expected


def test_what_to_write_instead_is_always_said() -> None:
    assert all(len(instead) > 10 for _, instead in listing())


@pytest.mark.parametrize(("name", "owned"), [
    ("VLLM_API_KEY", True), ("XPYD_HOST", True), ("PYTHONPATH", True), ("VLLM_DP_SIZE", True), ("VLLM_PORT", True),
    ("VLLM_API_KEYS", False), ("vllm_api_key", False), ("MY_VLLM_API_KEY", False), ("VLLM_LOGGING_LEVEL", False),
    ("HF_TOKEN", False), ("XPYD", False), ("VLLM_API_KEY\n", False),
])
def test_variables_that_xpyd_sets_itself(name: str, owned: bool) -> None:
    assert bool(env(name)) is owned
    assert bool(re.search(ENV_PATTERN.replace("$", r"\Z"), name)) is owned


def test_a_key_in_the_environment_is_refused_in_the_words_of_its_argument() -> None:
    found = option_of("--api-key")
    assert found is not None
    assert env("VLLM_API_KEY") == found[1]
