"""Arguments, environment and revision of engines."""

from __future__ import annotations

import json
from typing import Any

import pytest
from render_service import service

from xpyd_operator.render.engine import engine_args, engine_env, engine_revision, shutdown_args
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.contract.launch import CONNECTOR_CLASS


def value(args: tuple[str, ...], option: str) -> str:
    return args[args.index(option) + 1]


def test_own_arguments_first_then_the_users_for_both_roles_then_the_roles() -> None:
    one = service(
        engine={"args": ["--enforce-eager"]},
        decode={"args": ["--max-num-seqs", "8"], "parallelism": {"tensor": 2, "pipeline": 2}},
    )
    args = engine_args(one, Role.DECODE, "/models/qwen")
    assert args[:4] == ("--model", "/models/qwen", "--served-model-name", "Qwen/Qwen3-8B")
    assert args[-3:] == ("--enforce-eager", "--max-num-seqs", "8")
    assert value(args, "--tensor-parallel-size") == "2"
    assert value(args, "--pipeline-parallel-size") == "2"
    assert "--distributed-executor-backend" not in args, "vLLM runs workers in processes of the pod by itself"
    assert "--max-num-seqs" not in engine_args(one, Role.PREFILL, "m")
    assert "--pipeline-parallel-size" not in engine_args(one, Role.PREFILL, "m")


def test_what_roles_speculate_with_is_passed_as_it_is_written() -> None:
    eagle, ngram = ('{"method": "eagle", "model": "a/b"}', '{"method": "ngram", "num_speculative_tokens": 2}')
    both = service(engine={"args": ["--speculative-config", eagle]})
    assert {value(engine_args(both, role, "m"), "--speculative-config") for role in Role} == {eagle}
    one = service(decode={"args": ["--speculative-config", ngram]})
    assert value(engine_args(one, Role.DECODE, "m"), "--speculative-config") == ngram
    assert "--speculative-config" not in engine_args(one, Role.PREFILL, "m")


def test_the_connector_gets_the_kv_section() -> None:
    one = service(kv={"transport": "tcp", "mode": "get", "encryption": "enabled"})
    config = json.loads(value(engine_args(one, Role.PREFILL, "m"), "--kv-transfer-config"))
    assert config["kv_connector"] == CONNECTOR_CLASS
    assert config["kv_role"] == "kv_both"
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"]["xpyd"]["transport"] == "tcp"
    assert config["kv_connector_extra_config"]["xpyd"]["checksum"] == "enabled"
    assert config["kv_connector_extra_config"]["xpyd"]["encryption"] == "enabled"
    assert config["kv_connector_extra_config"]["xpyd"]["mode"] == "get"


def test_model_revision_and_served_name() -> None:
    args = engine_args(service(model={"source": "a/b", "revision": "v1", "servedName": "s"}), Role.DECODE, "a/b")
    assert value(args, "--revision") == "v1"
    assert value(args, "--served-model-name") == "s"


def test_shutdown_follows_the_drain_timeout_in_whole_seconds() -> None:
    assert shutdown_args(service(drain={"timeout": "1m"})) == ("--shutdown-timeout", "60")
    assert shutdown_args(service(drain={"timeout": "1500ms"})) == ("--shutdown-timeout", "2")


def test_environment_of_the_user() -> None:
    assert engine_env(service(engine={"env": [{"name": "A", "value": "1"}, {"name": "B"}]})) == {"A": "1", "B": ""}


@pytest.mark.parametrize(
    "spec",
    [
        {"engine": {"args": ["--enforce-eager"]}},
        {"engine": {"env": [{"name": "A", "value": "1"}]}},
        {"kv": {"encryption": "enabled"}},
        {"kv": {"mode": "put"}},
        {"kv": {"memory": "2Gi"}},
        {"model": {"source": "Qwen/Qwen3-8B", "revision": "v2"}},
        {"decode": {"args": ["--max-num-seqs", "8"]}},
    ],
)
def test_what_an_engine_is_made_of_changes_its_revision(spec: dict[str, Any]) -> None:
    before = engine_revision(service(), Role.DECODE, "m")
    assert engine_revision(service(**spec), Role.DECODE, "m") != before


@pytest.mark.parametrize(
    "spec",
    [
        {"decode": {"replicas": 3}},
        {"drain": {"timeout": "1m"}},
        {"router": {"policy": "least_loaded"}},
        {"prefill": {"args": ["--max-num-seqs", "8"]}},
        {"rollout": {"maxSurge": 2}},
    ],
)
def test_what_an_engine_is_not_made_of_keeps_its_revision(spec: dict[str, Any]) -> None:
    assert engine_revision(service(**spec), Role.DECODE, "m") == engine_revision(service(), Role.DECODE, "m")


def test_equal_roles_have_equal_revisions() -> None:
    assert engine_revision(service(), Role.DECODE, "m") == engine_revision(service(), Role.PREFILL, "m")


def test_a_size_of_copies_that_nobody_has_chosen_is_the_engines_to_find() -> None:
    for kv, written in (({}, None), ({"memory": "2Gi"}, 1 << 30), ({"memory": "512Mi"}, 256 << 20)):
        config = json.loads(value(engine_args(service(kv=kv), Role.DECODE, "m"), "--kv-transfer-config"))
        assert config["kv_connector_extra_config"]["xpyd"]["keep_bytes"] == written
    revisions = {engine_revision(service(kv=kv), Role.DECODE, "m") for kv in ({}, {"memory": "512Mi"}, {"memory": "2Gi"})}
    assert len(revisions) == 3, "on devices each means something else"
