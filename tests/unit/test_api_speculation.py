"""What ``xpyd check`` says of speculation: warnings where it costs something, notes where states make it matter."""

from __future__ import annotations

from typing import Any

import pytest
from render_service import service

from xpyd_operator.api import speculation
from xpyd_operator.api.speculation import RoleDraft, read

NGRAM = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}']
EAGLE = ["--speculative-config", '{"method": "eagle", "model": "a/draft", "num_speculative_tokens": 3}']
LONGER = ["--speculative-config", '{"method": "eagle", "model": "a/draft", "num_speculative_tokens": 5}']
OTHER = ["--spec-method=eagle", "--spec-model", "b/draft", "--spec-tokens=3"]
MTP = ["--speculative-config.method=mtp", "--speculative-config.num_speculative_tokens", "1"]
STATES = "where the model has states (Mamba, gated delta nets), prefill's KV is refused"
FEW = "so the draft's KV is not handed over and decode accepts few drafts; write it in spec.engine.args"
Args = dict[str, list[str]]
CASES: list[tuple[str, Args, dict[str, str], dict[str, str]]] = [
    ("nobody", {}, {}, {}),
    ("both, by tokens", {"engine": NGRAM}, {}, {}),
    ("both, by a model", {"engine": EAGLE}, {}, {}),
    ("both, told twice alike", {"prefill": EAGLE, "decode": [*MTP[:0], *EAGLE]}, {}, {}),
    ("decode alone, by tokens", {"decode": NGRAM}, {},
     {"spec.decode.args[0]": f"one role speculates and the other does not: {STATES}"}),
    ("decode alone, by a model", {"decode": ["--seed=1", *EAGLE]},
     {"spec.decode.args[1]": f"prefill does not draft, {FEW}"},
     {"spec.decode.args[1]": f"one role speculates and the other does not: {STATES}"}),
    ("decode alone, by its own modules", {"decode": MTP}, {"spec.decode.args[1]": f"prefill does not draft, {FEW}"},
     {"spec.decode.args[1]": f"one role speculates and the other does not: {STATES}"}),
    ("decode alone, the method left to vLLM", {"decode": ["--spec-model=a/draft", "--spec-tokens=2"]},
     {"spec.decode.args[1]": f"prefill does not draft, {FEW}"},
     {"spec.decode.args[1]": f"one role speculates and the other does not: {STATES}"}),
    ("prefill alone", {"prefill": EAGLE},
     {"spec.prefill.args[0]": "prefill makes one token, so its drafts are for nothing unless decode drafts alike"},
     {"spec.prefill.args[0]": f"one role speculates and the other does not: {STATES}"}),
    ("more drafts on decode", {"engine": EAGLE, "decode": LONGER}, {},
     {"spec.decode.args[0]": f"num_speculative_tokens is 3 for prefill and 5 for decode: {STATES}"}),
    ("another model on prefill", {"engine": EAGLE, "prefill": OTHER},
     {"spec.prefill.args[3]": f"model is b/draft for prefill and a/draft for decode, {FEW}"},
     {"spec.prefill.args[3]": f"model is b/draft for prefill and a/draft for decode: {STATES}"}),
    ("by tokens on prefill, by a model on decode", {"prefill": NGRAM, "decode": EAGLE},
     {"spec.prefill.args[0]": f"method is ngram for prefill and eagle for decode, {FEW}"},
     {"spec.prefill.args[0]": f"method is ngram for prefill and eagle for decode: {STATES}"}),
    ("ngram and suffix", {"prefill": NGRAM, "decode": ["-sc.method=suffix"]}, {},
     {"spec.prefill.args[0]": f"method is ngram for prefill and suffix for decode: {STATES}"}),
    ("two names of one method", {"prefill": ["--spec-method=qwen3_next_mtp", "--spec-tokens=1"],
                                 "decode": ["--spec-method=mtp", "--spec-tokens=1"]}, {}, {}),
    ("a method that is not handed over", {"engine": ["--spec-method=dflash", "--spec-model=a/b"]},
     {"spec.engine.args[1]": "an engine that drafts by dflash ends at its start, as xpyd's connector does not know that "
                             "method"}, {}),
    ("no JSON", {"decode": ["--speculative-config={method: ngram}"]},
     {"spec.decode.args[0]": "--speculative-config: an engine with it ends at its start, as its value is no JSON object"},
     {}),
    ("no object", {"engine": ["-sc", "[1]"]},
     {"spec.engine.args[0]": "-sc: an engine with it ends at its start, as its value is no JSON object"}, {}),
    ("a variable", {"decode": ["--speculative-config", "$(DRAFTS)"]}, {}, {}),
    ("none", {"decode": ["--speculative-config", "None"]}, {}, {}),
    ("one type by two names", {role: ["-sc", f'{{"method": "eagle", "model": "m", "kv_cache_dtype": "{name}"}}']
                               for role, name in (("prefill", "fp8"), ("decode", "fp8_e4m3"))}, {}, {}),
]


def given(args: Args, **prefill: Any) -> Any:
    spec: dict[str, Any] = {name: {"args": list(each)} for name, each in args.items()}
    if prefill:
        spec["prefill"] = spec.get("prefill", {}) | prefill
    return service(**spec)


@pytest.mark.parametrize(("args", "warned", "noted"), [each[1:] for each in CASES], ids=[each[0] for each in CASES])
def test_it_is_said_where_it_stands(args: Args, warned: dict[str, str], noted: dict[str, str]) -> None:
    found = given(args)
    assert dict(speculation.warnings(found)) == warned
    assert {fault.path: fault.message for fault in speculation.notes(found)} == noted


def test_without_prefill_instances_nothing_is_compared() -> None:
    alone = given({"decode": EAGLE, "prefill": ["-sc", "[1]"]}, replicas=0)
    assert list(speculation.warnings(alone)) == []
    assert speculation.notes(alone) == []


@pytest.mark.parametrize(("args", "fields"), [
    (["--speculative-config", '{"method": "ngram", "num-speculative-tokens": 2}'],
     {"method": "ngram", "num_speculative_tokens": 2}),
    (["--speculative-config={}", "-sc={\"method\": \"suffix\"}"], {"method": "suffix"}),
    (["--speculative_config.method", "ngram", "-sc", '{"method": "eagle"}'], {"method": "ngram"}),
    (["--spec-tok=4", "--speculative-c", '{"method": "ngram"}'], {"method": "ngram", "num_speculative_tokens": 4}),
    (["--specialize-active-lora", "--sc"], {}),
    (["--speculative-config"], None),
    (["--speculative-config", "--enforce-eager"], None),
], ids=str)
def test_arguments_are_put_together_as_vllm_does(args: list[str], fields: dict[str, Any] | None) -> None:
    """``test_vllm_warnings`` holds it against vLLM's parser."""
    assert read([(str(index), one) for index, one in enumerate(args)]).fields == fields


def test_a_role_that_says_nothing_is_one_that_does_not_speculate() -> None:
    assert read([("a", "--seed=1")]) == RoleDraft()
