"""One service after the other gets its new key."""

from __future__ import annotations

from typing import Any

from kube_documents import document, pod
from kube_keys import turns, volume

from xpyd_operator.kube.client.cache import OWNER_KIND, WatchCache
from xpyd_operator.kube.keys.turns import LOOK_S


def test_the_next_one_waits_until_it_is_given_back() -> None:
    one = turns()
    assert one.take("a", 0.0, 100.0)
    assert one.take("a", 50.0, 100.0)
    assert not one.take("b", 99.0, 100.0)
    assert one.holds("a")
    one.give_back("b")
    assert one.holds("a")
    one.give_back("a")
    assert one.take("b", 99.0, 100.0)


def test_one_that_is_stuck_holds_up_nobody_for_ever() -> None:
    one = turns()
    assert one.take("a", 0.0, 100.0)
    assert not one.take("b", 99.0, 100.0)
    assert one.take("b", 100.0, 100.0)
    assert not one.take("a", 101.0, 100.0)


def mixed(cache: WatchCache, uid: str, name: str, *secrets: str) -> None:
    body = document(name)
    body["metadata"]["uid"] = uid
    cache.on_seen(OWNER_KIND, body)
    for ordinal, secret in enumerate(secrets):
        spec: dict[str, Any] = {"containers": [{"name": "main"}], "volumes": [volume(secret)]}
        made = pod(ordinal, owner=uid, labelled={"xpyd.dev/service": name}) | {"spec": spec}
        made["metadata"] |= {"name": f"{name}-e{ordinal}", "uid": f"{name}-{ordinal}"}
        cache.on_seen("Pod", made)


def test_a_service_that_was_begun_before_ends_first() -> None:
    """As its pods show: nothing was remembered."""
    cache = WatchCache()
    mixed(cache, "a", "one", "one-key-11111111", "one-key-22222222")
    mixed(cache, "b", "two", "two-key-11111111", "two-key-11111111")
    one = turns(cache)
    assert not one.take("b", 0.0, 100.0)
    assert one.take("a", 0.0, 100.0)
    one.give_back("a")
    cache.on_deleted(
        "Pod", {"metadata": {"name": "one-e0", "namespace": "team-a", "uid": "one-0", "resourceVersion": "999"}})
    assert not one.take("b", LOOK_S / 2, 100.0), "all pods are gone through once a second"
    assert one.take("b", LOOK_S, 100.0)


def test_one_that_is_stuck_between_two_keys_is_left_behind() -> None:
    cache = WatchCache()
    mixed(cache, "a", "one", "one-key-11111111", "one-key-22222222")
    one = turns(cache)
    assert one.take("a", 0.0, 100.0)
    assert one.take("b", 100.0, 100.0)
