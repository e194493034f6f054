"""An instance of two data-parallel ranks, as decode and then as prefill: KV goes from and to the rank that was asked, and
the tokens are right.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from dp_engines import ARGS, PLUGIN, read_steps
from engine_pair import UNHURRIED
from engines import complete
from make_model import ensure_moe

from xpyd_sidecar.contract import assignment, launch
from xpyd_sidecar.contract.assignment import Assignment
from xpyd_sidecar.contract.ids import Role

pytestmark = pytest.mark.engines
PROMPTS = [[3 + i, 40, 50 + i, 7] * (3 + 9 * i) for i in range(6)]
OTHERS = [[90 + i, 41, 60 + i, 8] * (3 + 9 * i) for i in range(6)]
"""That nobody has cached."""
TOKENS = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dp")


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    (folder / "steps").mkdir()
    made = Cluster(folder, prefill=1, decode=0, engine_args=ARGS, model=ensure_moe(), options=UNHURRIED)
    env = {"PYTHONPATH": str(PLUGIN), "XPYD_TEST_STEPS": str(folder / "steps"), "VLLM_HOST_IP": "127.0.0.1",
           launch.ENV_DP_SYNC: "auto"}
    made.add(Role.DECODE, data_parallel=2, args=("--data-parallel-size", "2", *ARGS), env=env)
    with made:
        made.wait_ready()
        yield made


@pytest.mark.smoke
def test_answers_are_those_of_one_engine_and_kv_reaches_both_ranks(cluster: Cluster, folder: Path) -> None:
    plain, decode = cluster.prefill[0].engine, cluster.decode[0].engine
    expected = [plain.complete(prompt, TOKENS)["token_ids"] for prompt in PROMPTS]
    found = [complete(cluster.url, prompt, TOKENS)["token_ids"] for prompt in PROMPTS]
    assert found == expected
    loaded = {rank: decode.metric("xpyd_kv_loaded_tokens_total", engine=str(rank)) for rank in (0, 1)}
    assert loaded == {rank: sum(len(prompt) - 1 for prompt in PROMPTS[rank::2]) for rank in (0, 1)} or \
        loaded == {1 - rank: sum(len(prompt) - 1 for prompt in PROMPTS[rank::2]) for rank in (0, 1)}
    # Each forward with tokens computed one: nothing of a prompt was computed again.
    assert {step.tokens for rank in (0, 1) for step in read_steps(folder / "steps", rank) if step.real} == {1}


@pytest.mark.smoke
def test_no_step_is_run_for_requests_that_wait_for_kv(cluster: Cluster, folder: Path) -> None:
    """Steps on decode are those in which a rank had tokens: requests of equal length in turn leave nothing to waste."""
    dummies = [{step.number for step in read_steps(folder / "steps", rank) if not step.real} for rank in (0, 1)]
    assert dummies[0]
    assert not dummies[0] & dummies[1]
    assert cluster.decode[0].engine.metric("xpyd_dp_dummies_total") > 0
    assert cluster.decode[0].engine.metric("xpyd_dp_local_step") > 0
    assert "runs in step by shm" in cluster.decode[0].engine.log.read_text("utf-8")


def test_as_prefill_each_rank_computes_its_share_and_decode_none_of_it(cluster: Cluster) -> None:
    """The instances change their roles: no engine is started for this."""
    ranks, plain = cluster.decode[0], cluster.prefill[0]
    roles = {ranks.name: Role.PREFILL, plain.name: Role.DECODE}
    for one in (ranks, plain):
        assignment.keep(one.engine.run_dir, Assignment(roles[one.name], 2))
    cluster.wait_fleet(lambda fleet: {one.instance: one.role for one in fleet.instances} == roles, 120.0, "in other roles")
    before = plain.engine.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
    pushed = [ranks.engine.metric("xpyd_kv_pushed_tokens_total", engine=str(rank)) for rank in (0, 1)]
    found = [complete(cluster.url, prompt, TOKENS)["token_ids"] for prompt in OTHERS]
    computed = plain.engine.metric("vllm:prompt_tokens_by_source_total", source="local_compute") - before
    assert computed <= len(OTHERS), "decode computes the last token of each"
    assert found == [plain.engine.complete(prompt, TOKENS)["token_ids"] for prompt in OTHERS]
    shares = [sum(len(prompt) - 1 for prompt in OTHERS[first::2]) for first in (0, 1)]

    def shared() -> list[float]:
        after = [ranks.engine.metric("xpyd_kv_pushed_tokens_total", engine=str(rank)) for rank in (0, 1)]
        return [late - early for late, early in zip(after, pushed, strict=True)]

    # Decode has answered before prefill's ranks have heard that what they pushed came, and count it.
    ranks.engine.group.wait_until(lambda: sum(shared()) == sum(shares), 120.0, "through with what it pushed")
    assert sorted(shared()) == sorted(shares)
