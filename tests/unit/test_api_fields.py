from __future__ import annotations

import msgspec
import pytest

from xpyd_sidecar.contract import legs
from xpyd_sidecar.router.api.fields import FORCED, TABLE, Api, OnPrefill, is_null


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_every_set_value_is_json_and_what_is_always_set_is_one_token_unstreamed_and_greedy(api: Api) -> None:
    for name, rule in TABLE[api].items():
        if rule.leg is OnPrefill.SET and rule.value:
            msgspec.json.decode(rule.value)
        assert not (rule.always and rule.leg is not OnPrefill.SET), name
    assert {name: bytes(raw) for name, raw in FORCED[api].items()} == {"max_tokens": b"1", "stream": b"false",
                                                                       "temperature": b"0"}


@pytest.mark.parametrize("name", ["messages", "tools", "tool_choice", "chat_template", "chat_template_kwargs", "documents",
                                  "add_generation_prompt", "continue_final_message", "add_special_tokens",
                                  "reasoning_effort",
                                  "mm_processor_kwargs", "media_io_kwargs", "response_format", "truncate_prompt_tokens",
                                  "truncation_side", "cache_salt", "model", "priority", "vllm_xargs"])
def test_what_changes_the_prompt_or_its_kv_is_kept(name: str) -> None:
    assert TABLE["chat"][name].leg is OnPrefill.KEEP


def test_only_the_routers_own_fields_are_refused() -> None:
    for table in (TABLE["completions"], TABLE["chat"]):
        assert {name for name, rule in table.items() if rule.refused} == {legs.FIELD, "ec_transfer_params"}


def test_null_is_told_without_decoding() -> None:
    assert is_null(msgspec.Raw(b"null"))
    assert not is_null(msgspec.Raw(b'"null"'))
    assert not is_null(msgspec.Raw(b"1"))
