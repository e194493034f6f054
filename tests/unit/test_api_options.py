"""Options that vLLM's parser would refuse, by version; what it takes is not said."""

from __future__ import annotations

import pytest

from xpyd_operator.api import options, owned, tables
from xpyd_operator.api.model import DEFAULT_IMAGE

NEXT = "vllm/vllm-openai:v0.33.0"
ELSE = "registry.corp/vllm@sha256:0"


def said(*args: str, image: str = DEFAULT_IMAGE, ends: bool = True) -> dict[int, str]:
    return dict(options.faults(args, image, ends=ends))


@pytest.mark.parametrize(("args", "at", "words"), [
    (["--disable-log-requests"], 0, "--disable-log-requests is no option; leave it out: requests are logged with"),
    (["--gpu-memory-utilisation", "0.9"], 0, "--gpu-memory-utilisation is no option; did you mean --gpu-memory-utiliz"),
    (["--seed", "1", "--quantization", "fp9"], 3, "--quantization has no value fp9; did you mean fp8?"),
    (["--quantization=fp9"], 0, "--quantization has no value fp9; did you mean fp8?"),
    (["--gpu-memory-utilization", "9.2"], 1, "--gpu-memory-utilization must be above 0 and at most 1, not 9.2"),
    (["--gpu_memory_utilization=0"], 0, "--gpu-memory-utilization must be above 0 and at most 1, not 0"),
    (["--max-num-seqs", "many"], 1, "--max-num-seqs takes a whole number, not many"),
    (["--max-num-seqs", "1.5"], 1, "--max-num-seqs takes a whole number, not 1.5"),
    (["--max-model-len", "long"], 1, "--max-model-len takes a number, e.g. 8192 or 8k, or auto, not long"),
    (["--dtype", "fp16"], 1, "--dtype has no value fp16; did you mean float16?"),
    (["--speculative-config", "mtp"], 1, "--speculative-config takes JSON, not mtp"),
    (["--enforce-eager", "true"], 1, "true belongs to no option, so it is a second model"),
    (["--enforce-eager=true"], 0, "--enforce-eager is a switch and takes no value; leave =true out"),
    (["--max-model-len", "--seed", "1"], 0, "--max-model-len needs a value"),
    (["--seed"], 0, "--seed needs a value"),
    (["--seed", "1", "2"], 2, "2 belongs to no option"),
    (["--enable-p"], 0, "--enable-p may be --enable-per-request-metrics or --enable-p"),
    (["-x", "1"], 0, "-x is no option"),
    (["--no-such-thing-at-all"], 0, "--no-such-thing-at-all is no option"),
], ids=str)
def test_it_is_said_with_what_was_meant(args: list[str], at: int, words: str) -> None:
    found = said(*args)
    assert list(found) == [at]
    assert found[at].startswith(words.partition(" or --enable-p")[0])
    assert found[at].endswith(" (vLLM 0.32)")


@pytest.mark.parametrize("args", [
    ["--max-model-len", "8k", "--max-num-batched-tokens=16K", "--max-model-len", "auto", "--seed", "-1"],
    ["--enable-prefix-caching", "--no-enable-prefix-caching", "--enforce_eager"],
    ["--gpu-memory-util", "0.9", "-q", "fp8", "-O3", "-O.mode=3", "-cc.mode=3"],
    ["--speculative-config", '{"method": "mtp"}', "--speculative-config.method", "mtp", "--kv-events-config.topic=x"],
    ["--lora-modules", "a=/x", "b=/y", "--served", "x"],
    ["--override-generation-config", "{}", "--cudagraph-capture-sizes", "1", "2", "4"],
    ["--tensor-parallel-size", "x", "--model=x"],  # xpyd's own: refused, with what to write
], ids=str)
def test_what_vllm_takes_is_not_said(args: list[str]) -> None:
    assert said(*args) == {}


def test_the_tag_of_the_image_says_which_version() -> None:
    assert said("--disable-log-requests", image=NEXT) == {}
    assert said("--kv-cache-dtype", "mine", image=NEXT) == {}
    (words,) = said("--no-enable-log-requests", image=NEXT).values()
    assert words.endswith(" (vLLM 0.33)")
    assert said("--disable-log-requests", image=ELSE) == said("--no-enable-log-requests", image=ELSE) == {}
    assert said("--no-such", image=ELSE) == {0: "--no-such is no option (vLLM 0.32 and 0.33)"}
    assert options.versions("localhost:0.32/vllm:latest") == options.versions("vllm:v0.3") == tables.vllm().versions
    assert options.versions("a/b:0.33-cu13") == ("0.33",)


def test_the_last_option_of_the_common_list_may_have_its_value_in_a_roles() -> None:
    assert said("--enforce-eager", "--dtype", ends=False) == {}
    assert said("--dtype", ends=True) != {}


def test_advice_is_for_options_that_no_version_has_or_only_one() -> None:
    known = tables.vllm()
    names = {version: {name for one in known.of_version(version) for name in one.names} for version in known.versions}
    for option in options.INSTEAD:
        assert any(option not in those for those in names.values()), option
        assert owned.option_of(option) is None
    for advice in options.INSTEAD.values():
        for word in advice.replace(",", " ").split():
            if word.startswith("--"):
                assert any(word.partition(".")[0] in those for those in names.values()), advice
