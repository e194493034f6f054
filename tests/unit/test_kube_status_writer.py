"""A status is written where it says something new, and only there."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from memory_api import merged

from xpyd_operator.api.status import Condition, RolesStatus, RoleStatus, ServiceStatus
from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.client.cache import Entry, WatchCache
from xpyd_operator.kube.reports.status_writer import GAP_S, StatusWriter, difference, has_turned, read, stamp_status

Body = dict[str, Any]
LOOPS = ("virtual",)
EARLY, LATE = "2026-01-01T00:00:00Z", "2026-01-01T01:00:00Z"


def ready(holds: bool, message: str = "") -> Condition:
    return Condition(type="Ready", status="True" if holds else "False", reason="Why", message=message)


scalars = st.integers(0, 3) | st.booleans() | st.text("ab", max_size=2)
values = st.recursive(scalars | st.lists(st.integers(0, 2), max_size=2),
                      lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3), max_leaves=8)
bodies = st.dictionaries(st.sampled_from("abcd"), values, max_size=4)


@given(bodies, bodies)
def test_the_patch_makes_one_of_the_other_and_is_empty_between_equals(live: Body, wanted: Body) -> None:
    patch = difference(live, wanted)
    assert merged(live, patch) == wanted
    assert not difference(wanted, wanted)


def test_a_condition_keeps_its_time_until_it_turns() -> None:
    first = stamp_status(ServiceStatus(conditions=(ready(False, "1 of 2"),)), ServiceStatus(), 3, EARLY)
    assert first.conditions[0].last_transition_time == EARLY
    same = stamp_status(ServiceStatus(conditions=(ready(False, "2 of 2"),)), first, 3, LATE)
    assert (same.conditions[0].last_transition_time, same.conditions[0].message) == (EARLY, "2 of 2")
    assert not has_turned(same, first)
    other = stamp_status(ServiceStatus(conditions=(ready(True),)), same, 4, LATE)
    assert (other.conditions[0].last_transition_time, other.conditions[0].observed_generation) == (LATE, 4)
    assert has_turned(other, same)


def test_what_the_server_fills_in_is_no_difference() -> None:
    said = ServiceStatus(wanted="1P1D", roles=RolesStatus(decode=RoleStatus(wanted=1)))
    filled = msgspec.to_builtins(said) | {"conditions": [], "newer": {"field": 1}}
    filled["roles"] = {"decode": {"wanted": 1, "ready": 0, "draining": 0}, "prefill": {}}
    assert read({"status": filled}, ServiceStatus) == said


def test_a_status_that_cannot_be_read_counts_as_none() -> None:
    assert read({"status": {"conditions": "broken"}}, ServiceStatus) == ServiceStatus()


class Server:
    """Keeps one object; answers as the API server does."""

    def __init__(self, error: ApiError | None = None) -> None:
        self.cache = WatchCache()
        self.error = error
        self.patches: list[Body] = []
        self.times: list[float] = []
        self.asked = asyncio.Event()
        """It has a patch, and has not taken it yet."""
        self.version = 1
        self.body: Body = {"metadata": {"namespace": "a", "name": "qwen", "uid": "u", "generation": 7}}
        self._seen()

    def _seen(self) -> Body:
        self.version += 1
        self.body = self.body | {"metadata": self.body["metadata"] | {"resourceVersion": str(self.version)}}
        self.cache.on_seen("DisaggService", self.body)
        return self.body

    async def patch_status(self, kind: str, namespace: str, name: str, status: Body, uid: str = "") -> Body:
        assert (kind, namespace, name, uid) == ("DisaggService", "a", "qwen", "u")
        self.patches.append(status)
        self.times.append(asyncio.get_running_loop().time())
        self.asked.set()
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.body = self.body | {"status": merged(self.body.get("status"), status)}
        return self._seen()

    @property
    def entry(self) -> Entry:
        found = self.cache.get("DisaggService", "a", "qwen")
        assert found is not None
        return found


def writer(server: Server) -> StatusWriter:
    return StatusWriter(server, server.cache)  # type: ignore[arg-type]


async def settle(made: StatusWriter) -> None:
    await made.close(2 * GAP_S + 1)


async def test_the_same_again_is_not_written() -> None:
    server = Server()
    for _ in range(3):
        made = writer(server)
        made.put(server.entry, ServiceStatus(wanted="1P1D", conditions=(ready(False, "starting"),)), 7, LATE)
        await settle(made)
    assert len(server.patches) == 1
    assert server.body["status"]["observedGeneration"] == 7
    assert server.body["status"]["conditions"][0]["lastTransitionTime"] == LATE


async def test_the_last_word_wins_and_writes_keep_their_distance() -> None:
    server = Server()
    made = writer(server)
    for number in range(200):
        made.put(server.entry, ServiceStatus(wanted=f"{number}P1D"), 7, LATE)
        await asyncio.sleep(0.005)
    await asyncio.sleep(GAP_S + 0.1)
    assert server.body["status"]["wanted"] == "199P1D"
    assert all(later - earlier >= GAP_S * 0.9 for earlier, later in zip(server.times, server.times[1:], strict=False))
    await settle(made)


async def test_a_condition_that_turns_is_written_at_once() -> None:
    server = Server()
    made = writer(server)
    made.put(server.entry, ServiceStatus(wanted="1P1D", conditions=(ready(False),)), 7, LATE)
    await asyncio.sleep(0.05)
    made.put(server.entry, ServiceStatus(wanted="1P1D", conditions=(ready(True),)), 7, LATE)
    await asyncio.sleep(0.05)
    assert server.body["status"]["conditions"][0]["status"] == "True"
    await settle(made)


async def test_what_was_said_before_and_holds_again_is_written_though_the_other_word_is_still_on_its_way() -> None:
    """Else the other one would stay until the next look: nothing wakes the operator for what it has written itself."""
    server = Server()
    made = writer(server)
    for holds, now in ((True, EARLY), (False, EARLY), (True, LATE)):
        server.asked.clear()
        made.put(server.entry, ServiceStatus(wanted="1P1D", conditions=(ready(holds),)), 7, now)
        if not holds:
            await server.asked.wait()
            assert server.body["status"]["conditions"][0]["status"] == "True", "it has not come yet"
        else:
            await asyncio.sleep(GAP_S + 0.1)
    assert [each["conditions"][0]["status"] for each in server.patches] == ["True", "False", "True"]
    [condition] = server.body["status"]["conditions"]
    assert (condition["status"], condition["lastTransitionTime"]) == ("True", LATE), "it turned twice"
    await settle(made)


async def test_a_field_that_is_not_said_any_more_goes() -> None:
    server = Server()
    made = writer(server)
    made.put(server.entry, ServiceStatus(wanted="1P1D", plan="create qwen-e0"), 7, LATE)
    await settle(made)
    made.put(server.entry, ServiceStatus(wanted="1P1D"), 7, LATE)
    await settle(made)
    assert "plan" not in server.body["status"]


async def test_an_object_that_has_gone_is_no_error() -> None:
    for status in (404, 409):
        server = Server(ApiError(status, "NotFound", "not there"))
        made = writer(server)
        made.put(server.entry, ServiceStatus(wanted="1P1D"), 7, LATE)
        await settle(made)
        assert len(server.patches) == 1


async def test_nothing_is_written_for_what_is_being_deleted() -> None:
    server = Server()
    made = writer(server)
    entry = server.entry
    server.body["metadata"]["deletionTimestamp"] = LATE
    server._seen()
    made.put(entry, ServiceStatus(wanted="1P1D"), 7, LATE)
    await settle(made)
    assert server.patches == []
