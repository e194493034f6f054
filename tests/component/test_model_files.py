"""What stands for the weights of an engine's model in its fingerprint."""

from __future__ import annotations

from types import SimpleNamespace

from xpyd_sidecar.engine.compat import common


def config(**model: object) -> SimpleNamespace:
    settings = {"model": "org/tiny", "revision": None, "hf_config": SimpleNamespace(), "model_weights": ""} | model
    return SimpleNamespace(model_config=SimpleNamespace(**settings))


def test_a_bucket_is_named_by_its_address_and_not_by_the_folder_of_its_configuration() -> None:
    """vLLM reads the weights from ``model_weights``; two of one architecture differ in nothing that lies in the folder."""
    found = common.model_files(config(model="/home/.cache/vllm/assets/model_streamer/0a1b", model_weights="s3://b/v2"))
    assert found == ("s3://b/v2", "")


def test_others_are_named_as_before() -> None:
    hub = SimpleNamespace(_commit_hash="c0ffee")
    assert common.model_files(config(hf_config=hub)) == ("org/tiny", "c0ffee")
    assert common.model_files(config(model="/models/x", revision="main")) == ("/models/x", "main")
    assert common.model_files(config(model="/models/x", model_weights="/models/y")) == ("/models/x", "")
