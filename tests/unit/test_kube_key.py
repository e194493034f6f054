"""The keys of a service: derived, told by the names of Secrets, made without being read, and never somebody else's."""

from __future__ import annotations

import pytest
from kube_documents import UID, document, service
from kube_keys import encoded, key, secret_name, service_keys, store_master
from memory_api import MemoryApi

from xpyd_operator.api.decode import decode_service
from xpyd_operator.api.rule import Target
from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.keys.key import CHECK_S, SOON_S
from xpyd_operator.kube.keys.master import KeyTrouble


async def test_its_secret_is_made_once_and_never_read() -> None:
    api = MemoryApi()
    store_master(api, 1)
    mine = service_keys(api)
    for now in (0.0, 1.0, SOON_S - 1):
        await mine.refresh(service(), (), now)
        await mine.provide(service(), mine.newest, (), now, soon=True)
    name = secret_name(1)
    assert [each for each in api.asked if each[2] != "xpyd-master"] == [("create", "Secret", name)]
    made = api.objects["Secret", "team-a", name]
    assert (made["data"], made["immutable"]) == (encoded({"key": key(1).hex(), "before": ""}), True)
    assert mine.service_key(name) == key(1)
    assert mine.service_key("another") is None


async def test_it_is_put_back_with_the_same_key() -> None:
    api = MemoryApi()
    store_master(api, 1)
    mine = service_keys(api)
    await mine.refresh(service(), (), 0.0)
    await mine.provide(service(), mine.newest, (), 0.0)
    made = api.objects.pop(("Secret", "team-a", secret_name(1)))
    await mine.provide(service(), mine.newest, (), SOON_S)
    assert ("Secret", "team-a", secret_name(1)) not in api.objects
    await mine.provide(service(), mine.newest, (), CHECK_S)
    assert api.objects["Secret", "team-a", secret_name(1)]["data"] == made["data"]


async def test_one_that_is_there_is_not_written_to_whoever_made_it() -> None:
    """Its content is for the pods to judge: they mount it under the name of the key."""
    api = MemoryApi()
    store_master(api, 1)
    theirs = {"metadata": {"name": secret_name(1), "namespace": "team-a"}, "data": encoded({"key": "ab" * 32})}
    api.put("Secret", theirs)
    mine = service_keys(api)
    await mine.refresh(service(), (), 0.0)
    await mine.provide(service(), mine.newest, (), 0.0, soon=True)
    assert api.objects["Secret", "team-a", secret_name(1)]["data"] == theirs["data"]
    assert [verb for verb, _, name in api.asked if name == secret_name(1)] == ["create"]


@pytest.mark.parametrize("error", [
    ApiError(500, "InternalError", "etcd"), ApiError(409, "Conflict", "Operation cannot be fulfilled on resourcequotas"),
])
async def test_a_failed_write_is_tried_again(error: ApiError) -> None:
    api = MemoryApi()
    store_master(api, 1)
    mine = service_keys(api)
    await mine.refresh(service(), (), 0.0)
    api.fault = lambda verb, kind, name: error if verb == "create" else None
    with pytest.raises(ApiError):
        await mine.provide(service(), mine.newest, (), 0.0)
    api.fault = lambda verb, kind, name: None
    await mine.provide(service(), mine.newest, (), 0.1)
    assert ("Secret", "team-a", secret_name(1)) in api.objects


async def test_the_secret_of_a_new_generation_holds_the_key_that_pods_have() -> None:
    api = MemoryApi()
    store_master(api, 1, 2, 3)
    mine, used = service_keys(api), (secret_name(1),)
    await mine.refresh(service(), used, 0.0)
    await mine.provide(service(), mine.newest, used, 0.0)
    assert api.objects["Secret", "team-a", secret_name(3)]["data"] == encoded({"key": key(3).hex(), "before": key(1).hex()})


async def test_a_service_that_is_made_again_or_restored_has_another_key() -> None:
    """Whatever Secrets were restored beside it: they are named for keys of another uid."""
    api = MemoryApi()
    store_master(api, 1)
    mine = service_keys(api)
    await mine.refresh(service(), (), 0.0)
    await mine.provide(service(), mine.newest, (), 0.0)
    body = document()
    body["metadata"]["uid"] = "restored"
    restored = decode_service(body, strict=False, target=Target.KUBERNETES).service
    again = service_keys(api)
    await again.refresh(restored, (), 0.0)
    assert again.newest.key == key(1, "restored") != key(1, UID)
    assert again.newest.pod.secret == secret_name(1, "restored")
    await again.provide(restored, again.newest, (), 0.0)
    made = api.objects["Secret", "team-a", secret_name(1, "restored")]
    assert made["metadata"]["ownerReferences"][0]["uid"] == "restored"


async def test_pods_with_a_key_of_no_generation_are_trouble() -> None:
    api = MemoryApi()
    store_master(api, 2)
    with pytest.raises(KeyTrouble, match=f"Secret {secret_name(1)}, which is of no generation of the master") as error:
        await service_keys(api).refresh(service(), (secret_name(1), secret_name(2)), 0.0)
    assert error.value.reason == "KeyUnknown"


async def test_which_key_is_wanted() -> None:
    api = MemoryApi()
    store_master(api, 1)
    mine = service_keys(api)

    async def wanted(*used: int, stays: bool = True, may_roll: bool = False) -> int:
        names = [secret_name(each) for each in used]
        await mine.refresh(service(), names, 0.0)
        return mine.choose(names, lambda _: stays, lambda: may_roll).generation

    assert await wanted() == 1, "no pods"
    assert await wanted(1) == 1
    store_master(api, 1, 3)
    mine = service_keys(api)
    assert await wanted(1) == 1, "it is not its turn"
    assert await wanted(1, may_roll=True) == 3
    assert await wanted(1, stays=False) == 3
    assert await wanted(1, 3) == 3, "what was begun ends"
