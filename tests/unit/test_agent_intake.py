"""What an agent reads of an engine's prompts."""

from __future__ import annotations

import pytest

from xpyd_sidecar.agent.engine import load_of, parse_load
from xpyd_sidecar.agent.intake import parse
from xpyd_sidecar.contract.intake import MOST_LINKS, Intake

ENGINE = b"""# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 5000.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 300.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 700.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 4000.0
xpyd_kv_loaded_tokens_total{engine="0",model_name="m"} 3900.0
xpyd_kv_wait_seconds_total{engine="0",model_name="m"} 1.25
xpyd_kv_blocks_waiting{engine="0",model_name="m"} 3.0
xpyd_kv_transfers_total{engine="0",model_name="a,\\"b\\"",side="receive",outcome="ok"} 40.0
xpyd_kv_transfers_total{engine="0",model_name="m",side="receive",outcome="checksum"} 1.0
xpyd_kv_transfers_total{engine="0",model_name="m",side="send",outcome="peer_lost"} 9.0
xpyd_kv_link_bytes_total{engine="0",model_name="m",link="tcp"} 1.5e9
xpyd_kv_links_refused_total{engine="0",model_name="m",link="nixl"} 2.0
"""


def test_what_an_engine_counts_is_told_by_link_and_outcome() -> None:
    found = parse(ENGINE)
    assert found == Intake(prompts=5000, cached=700, received=3900, outcomes=(("checksum", 1), ("ok", 40)),
                           links=(("tcp", 1_500_000_000),), refused=(("nixl", 2),), wait_s=1.25, blocks_waiting=3)
    assert parse_load(ENGINE).intake == found, "and goes along with the load"


def test_servers_of_one_engine_are_added() -> None:
    both = load_of([ENGINE, ENGINE]).intake
    assert both is not None
    assert (both.prompts, both.received, both.links) == (10000, 7800, (("tcp", 3_000_000_000),))


@pytest.mark.parametrize("text", [
    b"vllm:prompt_tokens_total 10\n",
    b"xpyd_kv_loaded_tokens_total 10\n",
    b"vllm:prompt_tokens_total NaN\nxpyd_kv_loaded_tokens_total 1\n",
])
def test_an_engine_without_the_connector_tells_nothing(text: bytes) -> None:
    assert parse(text) is None


def test_a_beat_holds_no_more_links_than_it_may() -> None:
    many = b"".join(b'xpyd_kv_link_bytes_total{link="l%d"} %d\n' % (number, number + 1) for number in range(50))
    found = parse(ENGINE + many)
    assert found is not None
    assert len(found.links) == MOST_LINKS
    assert ("tcp", 1_500_000_000) in found.links, "the greatest are kept"
