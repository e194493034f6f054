"""The Secret with a service's key: made once, adopted, put back, and never somebody else's."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from kube_documents import service
from memory_api import MemoryApi

from xpyd_operator.errors import XpydError
from xpyd_operator.kube.api import ApiError
from xpyd_operator.kube.key import CHECK_S, SOON_S, KeySecret, NameTaken
from xpyd_operator.render.objects import key_secret

AT = ("Secret", "team-a", "qwen-key")


def made(api: MemoryApi, *, dry_run: bool = False) -> KeySecret:
    return KeySecret(api, dry_run=dry_run)  # type: ignore[arg-type]


def stored(text: str) -> dict[str, Any]:
    """As the API server shows it."""
    body = key_secret(service(), "")
    body["data"] = {"key": base64.b64encode(text.encode()).decode()}
    del body["stringData"]
    return body


async def test_it_is_made_once() -> None:
    api = MemoryApi()
    secret = made(api)
    with pytest.raises(XpydError, match="not known yet"):
        _ = secret.key
    for now in (0.0, 1.0, SOON_S - 1):
        await secret.ensure(service(), now, soon=True)
    assert [verb for verb, _, _ in api.asked] == ["get", "create"]
    assert api.objects[AT]["stringData"]["key"] == secret.key.hex()
    assert secret.key.hex() not in secret.identity


async def test_one_that_is_there_is_taken_over() -> None:
    api = MemoryApi()
    api.put("Secret", stored("ab" * 32 + "\n"))
    secret = made(api)
    await secret.ensure(service(), 0.0)
    assert secret.key.hex() == "ab" * 32
    assert [verb for verb, _, _ in api.asked] == ["get"]


async def test_it_is_put_back_with_the_same_key() -> None:
    api = MemoryApi()
    secret = made(api)
    await secret.ensure(service(), 0.0)
    key, identity = secret.key, secret.identity
    del api.objects[AT]
    await secret.ensure(service(), SOON_S)
    assert AT not in api.objects
    await secret.ensure(service(), SOON_S, soon=True)
    assert (api.objects[AT]["stringData"]["key"], secret.identity) == (key.hex(), identity)
    del api.objects[AT]
    await secret.ensure(service(), SOON_S + CHECK_S)
    assert api.objects[AT]["stringData"]["key"] == key.hex()


@pytest.mark.parametrize("text", ["", "abcd", "zz" * 32, "ab" * 33, "ä" * 32])
async def test_one_without_a_key_is_an_error_that_names_it(text: str) -> None:
    api = MemoryApi()
    api.put("Secret", stored(text))
    with pytest.raises(XpydError, match="Secret qwen-key holds no key"):
        await made(api).ensure(service(), 0.0)


async def test_somebody_elses_is_left_alone() -> None:
    api = MemoryApi()
    body = stored("ab" * 32)
    del body["metadata"]["ownerReferences"]
    api.put("Secret", body)
    with pytest.raises(NameTaken, match="Secret qwen-key is not of this service"):
        await made(api).ensure(service(), 0.0)
    assert [verb for verb, _, _ in api.asked] == ["get"]


async def test_a_failed_write_leaves_no_key_behind_that_nobody_has() -> None:
    api = MemoryApi()
    secret = made(api)
    api.fault = lambda verb, kind, name: ApiError(500, "InternalError", "etcd") if verb == "create" else None
    with pytest.raises(ApiError):
        await secret.ensure(service(), 0.0)
    with pytest.raises(XpydError, match="not known yet"):
        _ = secret.key


async def test_a_dry_run_makes_none() -> None:
    api = MemoryApi()
    secret = made(api, dry_run=True)
    await secret.ensure(service(), 0.0)
    assert len(secret.key) == 32
    assert api.objects == {}
