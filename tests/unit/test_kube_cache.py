"""The cache ends with the newest, however watch events and answers to our own writes interleave."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_operator.kube.client.cache import KINDS, TOMBSTONES, WatchCache
from xpyd_operator.render.labels import SERVICE


def pod(version: int, uid: str = "u1", name: str = "qwen-e0", *, label: str = "qwen", **more: Any) -> dict[str, Any]:
    labels = {SERVICE: label} if label else {}
    metadata = {"namespace": "a", "name": name, "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata, **more}


def version(cache: WatchCache, name: str = "qwen-e0") -> int | None:
    entry = cache.get("Pod", "a", name)
    return entry.version if entry is not None else None


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[tuple[str, int, str]], list[int]]:
    """The true history of one name (what happened, version, uid), and which of our answers comes after which event."""
    history: list[tuple[str, int, str]] = []
    at, life, alive = 1, 0, False
    for step in draw(st.lists(st.sampled_from(["write", "strip", "delete"]), min_size=1, max_size=12)):
        at += draw(st.integers(1, 3))
        if not alive:
            life, alive = life + 1, True
            history.append(("write", at, f"u{life}"))
            continue
        history.append((step, at, f"u{life}"))
        alive = step != "delete"
    delays = draw(st.lists(st.integers(-1, 14), min_size=len(history), max_size=len(history)))
    return history, delays


@given(histories())
def test_any_interleaving_of_events_and_answers_ends_with_the_newest(
    case: tuple[list[tuple[str, int, str]], list[int]],
) -> None:
    history, delays = case
    cache = WatchCache()
    for now in range(len(history) + 15):
        for index, (what, at, uid) in enumerate(history):
            if what == "write" and delays[index] >= 0 and now == index + delays[index] - 3:  # early or late, or never
                cache.on_written("Pod", pod(at, uid))
        if now < len(history):
            what, at, uid = history[now]
            if what == "delete":
                cache.on_deleted("Pod", pod(at, uid))
            else:
                cache.on_seen("Pod", pod(at, uid, label="" if what == "strip" else "qwen"))
    what, at, _ = history[-1]
    assert version(cache) == (at if what == "write" else None)
    assert len(cache) == (1 if what == "write" else 0)
    assert len(cache.of_service("Pod", "a", "qwen")) == len(cache)


def test_a_deleted_object_does_not_come_back_through_an_older_answer() -> None:
    cache = WatchCache()
    cache.on_seen("Pod", pod(5))
    cache.on_deleted("Pod", pod(9))
    assert not cache.on_written("Pod", pod(7))
    assert version(cache) is None
    assert cache.on_seen("Pod", pod(12, "u2"))
    assert not cache.on_deleted("Pod", pod(9))
    assert version(cache) == 12


def test_what_gets_our_label_back_comes_again() -> None:
    cache = WatchCache()
    cache.on_seen("Pod", pod(5))
    cache.on_deleted("Pod", pod(6, label=""))
    assert version(cache) is None
    assert cache.on_written("Pod", pod(7))
    assert not cache.on_deleted("Pod", pod(6, label=""))
    assert version(cache) == 7


def test_a_pod_of_nobody_is_not_kept() -> None:
    cache = WatchCache()
    assert not cache.on_seen("Pod", pod(5, label=""))
    assert len(cache) == 0
    cache.on_seen("Pod", pod(6))
    assert cache.on_seen("Pod", pod(7, label=""))
    assert len(cache) == 0


def test_a_list_buries_what_is_not_in_it_and_not_newer() -> None:
    cache = WatchCache()
    cache.on_seen("Pod", pod(5, "u1", "qwen-e0"))
    cache.on_seen("Pod", pod(6, "u2", "qwen-e1"))
    cache.on_written("Pod", pod(30, "u3", "qwen-e2"))
    changed = cache.on_listed("Pod", None, [pod(6, "u2", "qwen-e1")], 20)
    assert changed == {("a", "qwen")}
    assert (version(cache), version(cache, "qwen-e1"), version(cache, "qwen-e2")) == (None, 6, 30)
    assert not cache.on_seen("Pod", pod(19, "u1", "qwen-e0"))
    assert cache.on_listed("Pod", None, [pod(6, "u2", "qwen-e1")], 21) == set()


def test_a_list_of_one_namespace_leaves_others_alone() -> None:
    cache = WatchCache()
    cache.on_seen("Pod", pod(5))
    assert cache.on_listed("Pod", "b", [], 20) == set()
    assert version(cache) == 5


def test_what_nobody_reads_of_an_object_is_not_kept_and_the_body_of_others_is_not_changed() -> None:
    cache, body = WatchCache(), pod(5, spec={"a": 1})
    body["metadata"]["managedFields"] = [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}]
    cache.on_seen("Pod", body)
    entry = cache.get("Pod", "a", "qwen-e0")
    assert entry is not None
    assert entry.body == pod(5, spec={"a": 1})
    assert "managedFields" in body["metadata"]


def test_a_service_is_found_by_its_own_name() -> None:
    cache = WatchCache()
    cache.on_seen(KINDS[0], pod(5, "s", "qwen", label=""))
    assert cache.services() == [("a", "qwen")]


def test_derived_values_are_worked_out_once_for_a_version() -> None:
    cache = WatchCache()
    calls: list[str] = []

    def how(body: dict[str, Any]) -> str:
        calls.append(body["metadata"]["resourceVersion"])
        return calls[-1]

    cache.on_seen("Pod", pod(5))
    for _ in range(3):
        entry = cache.get("Pod", "a", "qwen-e0")
        assert entry is not None
        assert entry.derive(how) == "5"
    cache.on_seen("Pod", pod(6))
    entry = cache.get("Pod", "a", "qwen-e0")
    assert entry is not None
    assert entry.derive(how) == "6"
    assert calls == ["5", "6"]


@pytest.mark.parametrize("text", ["", "nonsense"])
def test_an_unreadable_version_is_older_than_everything(text: str) -> None:
    cache = WatchCache()
    cache.on_seen("Pod", pod(5))
    body = pod(1)
    body["metadata"]["resourceVersion"] = text
    assert not cache.on_seen("Pod", body)


def test_tombstones_are_bounded() -> None:
    cache = WatchCache()
    for number in range(TOMBSTONES + 10):
        cache.on_deleted("Pod", pod(number + 1, f"u{number}"))
    assert len(cache._dead) == TOMBSTONES


def test_a_kind_that_is_not_served_is_forgotten_and_its_very_objects_may_be_back() -> None:
    cache = WatchCache()
    cache.on_seen("Pod", pod(5))
    cache.on_seen("Service", pod(5))
    assert cache.on_unserved("Pod") == {("a", "qwen")}
    assert version(cache) is None
    assert cache.get("Service", "a", "qwen-e0") is not None, "another kind"
    assert cache.on_unserved("Pod") == set()
    assert cache.on_seen("Pod", pod(5)), "of the same uid and version"
    assert version(cache) == 5
