"""The master: made once, read by its name, put back as it was, and never made again by itself."""

from __future__ import annotations

import asyncio

import pytest
from kube_keys import MASTERS, NAME, SYSTEM, encoded, master, store_master
from memory_api import MemoryApi

from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.keys.master import AGAIN_S, LOOK_S, SOON_S, KeyTrouble

AT = ("Secret", SYSTEM, NAME)


async def test_it_is_made_once_and_read_once_a_minute() -> None:
    api = MemoryApi()
    one = master(api)
    found = await one.generations(0.0)
    assert list(found) == [1]
    assert api.objects[AT]["data"] == encoded({"1": found[1].hex()})
    for now in (1.0, LOOK_S - 1):
        assert await one.generations(now) == found
    assert api.asked == [("get", "Secret", NAME), ("create", "Secret", NAME)]
    assert await one.generations(LOOK_S) == found
    assert api.asked[2:] == [("get", "Secret", NAME)]


async def test_services_that_ask_at_once_read_it_once() -> None:
    api = MemoryApi()
    store_master(api, 1)
    one = master(api)
    await asyncio.gather(*(one.generations(0.0) for _ in range(50)))
    assert api.asked == [("get", "Secret", NAME)]


async def test_another_generation_is_seen_with_the_next_look() -> None:
    api = MemoryApi()
    store_master(api, 1)
    one = master(api)
    assert await one.generations(0.0) == {1: MASTERS[1]}
    store_master(api, 1, 2)
    assert await one.generations(LOOK_S) == {1: MASTERS[1], 2: MASTERS[2]}


async def test_of_two_operators_that_make_it_the_second_takes_the_firsts() -> None:
    api = MemoryApi()
    first, second = master(api), master(api)

    def between(verb: str, kind: str, name: str) -> ApiError | None:
        if verb == "create" and AT not in api.objects:
            store_master(api, 3)  # the other one was faster
        return None

    api.fault = between
    assert await first.generations(0.0) == await second.generations(0.0) == {3: MASTERS[3]}


async def test_one_that_is_lost_is_named_and_not_made_again() -> None:
    api = MemoryApi()
    one = master(api, in_use=True)
    with pytest.raises(KeyTrouble, match="xpyd-system/xpyd-master is not there, and pods have keys") as error:
        await one.generations(0.0)
    assert error.value.reason == "MasterLost"
    assert AT not in api.objects
    store_master(api, 2)
    assert await one.generations(AGAIN_S) == {2: MASTERS[2]}
    assert one.problem is None


async def test_who_knows_it_puts_it_back_as_it_was() -> None:
    api = MemoryApi()
    store_master(api, 1, 3)
    one = master(api, in_use=True)
    await one.generations(0.0)
    del api.objects[AT]
    assert await one.generations(LOOK_S) == {1: MASTERS[1], 3: MASTERS[3]}
    assert api.objects[AT]["data"] == encoded({str(number): MASTERS[number].hex() for number in (1, 3)})


@pytest.mark.parametrize("more", [{"two": "ab" * 32}, {"0": "ab" * 32}, {"2": "ab"}, {"2": ""}, {"-1": "ab" * 32}])
async def test_what_is_no_master_is_said_and_what_was_known_goes_on(more: dict[str, str]) -> None:
    api = MemoryApi()
    store_master(api, 1, **more)
    fresh = master(api)
    with pytest.raises(KeyTrouble, match=r"is no generation of a master") as error:
        await fresh.generations(0.0)
    assert error.value.reason == "MasterUnusable"
    store_master(api, 1)
    one = master(api)
    await one.generations(0.0)
    store_master(api, 1, **more)
    assert await one.generations(LOOK_S) == {1: MASTERS[1]}
    assert one.problem is not None
    assert "no generation" in str(one.problem)


async def test_an_empty_one_is_no_master() -> None:
    api = MemoryApi()
    store_master(api)
    with pytest.raises(KeyTrouble, match="holds no generation"):
        await master(api).generations(0.0)


async def test_an_api_server_that_does_not_answer_takes_no_key_away() -> None:
    api = MemoryApi()
    api.fault = lambda verb, kind, name: ApiError(0, "Timeout", "no answer")
    one = master(api)
    with pytest.raises(ApiError):
        await one.generations(0.0)
    with pytest.raises(ApiError, match="no answer"):
        await one.generations(SOON_S / 2)
    assert len(api.asked) == 1, "not asked again so soon"
    api.fault = lambda verb, kind, name: None
    store_master(api, 1)
    assert await one.generations(SOON_S) == {1: MASTERS[1]}
    api.fault = lambda verb, kind, name: ApiError(500, "InternalError", "etcd")
    assert await one.generations(AGAIN_S + LOOK_S) == {1: MASTERS[1]}


async def test_a_dry_run_makes_none() -> None:
    api = MemoryApi()
    assert list(await master(api, dry_run=True).generations(0.0)) == [1]
    assert api.objects == {}
