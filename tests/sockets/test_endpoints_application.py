from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from beats import beat, bye
from prometheus_client.parser import text_string_to_metric_families
from router_fleet import KEY, RouterFleet, fleet
from scripted_engine import Play

from xpyd_sidecar.contract import keys, signing
from xpyd_sidecar.contract.ids import State
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.router.api import paths

LOOPS = ("uvloop",)


async def metrics(f: RouterFleet) -> dict[tuple[Any, ...], float]:
    text = (await f.get("/metrics")).body.decode()
    return {(s.name, *sorted(s.labels.values())): s.value
            for family in text_string_to_metric_families(text) for s in family.samples}


async def test_models_in_openais_form() -> None:
    async with fleet(1, 2, model="configured") as f:
        f.beat(f.d[0], max_model_len=100, also=("fluent",))
        f.beat(f.p[0], also=("fluent",))
        f.beat(f.d[1], also=("fluent",))
        answer = (await f.get("/v1/models")).json
        assert answer["object"] == "list"
        assert [(m["id"], m["object"], m["max_model_len"], m["parent"]) for m in answer["data"]] == [
            ("configured", "model", None, None), ("tiny", "model", 100, None), ("fluent", "model", 100, "tiny")]
        assert (await f.complete(model="fluent")).status == 200
        assert (await f.get("/v1/models/tiny")).json["id"] == "tiny"
        answer = await f.get("/v1/models/none")
        assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/v1/completions", 405), ("PUT", "/v1/chat/completions", 405), ("POST", "/v1/models", 405),
    ("POST", "/health", 405),
    ("GET", "/fleet", 404), ("GET", "/dashboard", 404), ("GET", "/trace", 404),
    ("GET", "/v1/embeddings", 405), ("POST", "/version", 405), ("GET", "/", 404),
    ("POST", "/sleep", 404), ("GET", "/v1/responses/r1", 404), ("POST", "/v1/responses/r1/cancel", 404),
    ("GET", "/v1/completions/", 404), ("POST", "/V1/completions", 404), ("GET", "/%2e%2e/health", 404),
])
async def test_wrong_paths_and_methods(method: str, path: str, status: int) -> None:
    async with fleet() as f:
        answer = await f.post(path, {}, method=method)
        assert answer.status == status
        assert set(answer.json["error"]) == {"message", "type", "param", "code"}
        assert path in answer.json["error"]["message"]
        if status == 405:
            assert answer.headers["allow"] in {"GET", "POST"}


async def test_a_path_of_vllm_that_is_not_served_is_404_with_the_reason_and_no_client_asks_again() -> None:
    refused = [route for route in paths.TABLE if route.way is paths.RouteKind.REFUSED]
    assert {"/v1/realtime", "/v1/responses/{id}", "/v1/responses/{id}/cancel", "/load"} <= {one.path for one in refused}
    async with fleet() as f:
        for route in refused:
            path = route.path.replace("{id}", "resp_1").replace("{name}", "x")
            for method in ("GET", "POST", "DELETE"):
                answer = await f.post(path, {}, method=method)
                error = answer.json["error"]
                assert (answer.status, error["code"], error["type"]) == (404, "path_not_served", "NotFoundError")
                assert error["message"] == f"{path} is not served by this router: {route.reason}"
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "x"}
        answer = await f.get("/v1/realtime", headers=upgrade)
        assert (answer.status, answer.json["error"]["code"]) == (404, "path_not_served")


async def test_health_is_the_process_and_ready_says_why_not() -> None:
    async with fleet(1, 1, resolve_s=60.0) as f:
        assert (await f.get("/health")).status == 200
        answer = await f.get("/ready")
        assert (answer.status, b"not settled" in answer.body) == (503, True)
    async with fleet(1, 1) as f:
        f.beat(f.d[0], state=State.DRAINING)
        await f.wait(lambda: "d0 draining" in f.router.probes.not_ready(), "a settled router")
        f.beat(f.d[0])
        assert (await f.get("/ready?x")).status == 200
        f.context.watch.on_message(bye("d0"))
        assert (await f.get("/ready")).status == 503
        assert (await f.get("/health")).status == 200


async def test_beside_an_engine_a_router_is_ready_without_members_once_it_has_listened() -> None:
    async with fleet(0, 0, beside_engine=True, resolve_s=60.0) as f:
        assert (await f.get("/ready")).status == 503
    async with fleet(0, 0, beside_engine=True) as f:
        await f.wait(lambda: f.router.probes.not_ready() == "", "a router that has listened")
        assert not f.context.roster.is_settled(f.context.loop.time())
        f.router.turn_away(True)
        answer = await f.get("/ready")
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert not f.router.server.draining, "it goes on serving"
        f.router.turn_away(False)
        answer = await f.get("/ready")
        assert (answer.status, answer.headers.get("connection")) == (200, None)


async def test_client_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nkey-one\n\nkey-two\n")
    async with fleet(1, 1, api_key_file=str(file)) as f:
        for path, method in (("/v1/completions", "POST"), ("/v1/chat/completions", "POST"), ("/v1/models", "GET"),
                             ("/v1/models/tiny", "GET")):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic key-one"}):
                answer = await f.post(path, {"prompt": "x"}, method=method, headers=headers)
                assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert answer.json["error"]["code"] == "invalid_api_key"
        assert not f.d[0].seen
        for key in ("key-one", "key-two"):
            answer = await f.post("/v1/completions", {"prompt": "x"}, headers={"authorization": f"bearer {key}"})
            assert answer.status == 200
        assert (await f.get("/health")).status == 200
        assert (await f.get("/metrics")).status == 401
        assert (await f.get("/metrics", headers={"Authorization": "Bearer key-two"})).status == 200
        assert (await f.ask("/metrics")).status == 200


async def test_client_keys_change_without_a_restart_or_a_lost_request(tmp_path: Path) -> None:
    """As the kubelet changes a Secret: another file takes the old one's place. For a while both keys are good."""
    file = tmp_path / "keys"
    file.write_text("old\n")

    def put(text: str) -> None:
        (tmp_path / "next").write_text(text)
        (tmp_path / "next").replace(file)

    async with fleet(1, 1, api_key_file=str(file)) as f:
        async def status(key: str) -> int:
            answer = await f.post("/v1/completions", {"prompt": "x"}, headers={"authorization": f"Bearer {key}"})
            return answer.status

        async def wait(key: str, expected: int) -> None:
            end = time.monotonic() + 20
            while await status(key) != expected:
                assert time.monotonic() < end, f"{key} does not get {expected}"
                await asyncio.sleep(0.05)

        assert (await status("old"), await status("new")) == (200, 401)
        put("old\nnew\n")
        await wait("new", 200)
        assert await status("old") == 200
        put("\n")  # a slip locks nobody out
        await asyncio.sleep(1.5)
        assert (await status("old"), await status("new")) == (200, 200)
        put("new\n")
        await wait("old", 401)
        assert await status("new") == 200


async def test_the_fleet_needs_the_admin_token() -> None:
    async with fleet() as f:
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "Bearer " + keys.mint().hex()}):
            assert (await f.ask("/fleet", headers=headers)).status == 401
            assert (await f.ask("/sample", headers=headers)).status == 401
        sample = await f.ask("/sample", headers={"Authorization": "Bearer " + keys.admin_token(KEY)})
        assert (sample.status, sample.json["at"], sample.json["rest"]) == (200, "", "")
        answer = await f.ask("/fleet", headers={"Authorization": "Bearer " + keys.admin_token(KEY)})
        assert [i["instance"] for i in answer.json["instances"]] == ["d0", "p0"]


def signed(path: str, *, instance: str = "r0", key: ServiceKey = KEY, **more: Any) -> dict[str, str]:
    return {signing.HEADER: signing.sign(keys.derive(key, "admin call"), signing.SignedCall("GET", path, instance), **more)}


async def test_the_operator_asks_by_signed_calls_and_each_is_taken_once() -> None:
    async with fleet() as f:
        name = f.router.context.name
        right = signed("/fleet", instance=name)
        assert (await f.ask("/fleet", headers=right)).status == 200
        for wrong, words in (
            (right, "the call was taken already"),
            (signed("/trace", instance=name), "the signature is wrong for GET /fleet"),
            (signed("/fleet", instance="another"), "the signature is wrong"),
            (signed("/fleet", instance=name, key=keys.mint()), "the signature is wrong"),
            (signed("/fleet", instance=name, now=time.time() - 90), "are the clocks right?"),
            ({signing.HEADER: "v1"}, "has not the form"),
        ):
            answer = await f.ask("/fleet", headers=wrong)
            assert answer.status == 401
            assert words in answer.json["error"]["message"]
            assert answer.json["error"]["code"] == "invalid_signature"
        mixed = await f.ask("/fleet", headers=right | {"Authorization": f"Bearer {keys.admin_token(KEY)}"})
        assert mixed.status == 200, "an operator that sends both is let in by either"


async def test_the_admin_token_is_not_taken_where_others_could_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xpyd_sidecar.router.http.connection.of_this_host", lambda transport: False)  # as from another host
    token = {"Authorization": f"Bearer {keys.admin_token(KEY)}"}
    async with fleet(api_key_file=None) as f:
        for path in ("/fleet", "/trace", "/dashboard/data"):
            answer = await f.ask(path, headers=token)
            assert (answer.status, answer.json["error"]["code"]) == (403, "token_in_clear")
            assert "kubectl port-forward" in answer.json["error"]["message"]
            assert (await f.ask(path, headers={"Authorization": "Bearer x"})).status == 401
        assert (await f.ask("/fleet", headers=signed("/fleet", instance=f.router.context.name))).status == 200


async def test_metrics_count_requests_legs_and_instances() -> None:
    async with fleet(1, 2) as f:
        f.d[0].plays.append(Play(die_at="request"))
        f.d[1].plays.append(Play(status=400))
        for _ in range(4):
            await f.complete(stream=True)
        await f.complete(kv_transfer_params={"a": 1})
        f.context.watch.on_message(beat("d2", state=State.STARTING))
        await f.wait_quiet()
        seen = await metrics(f)
        outcomes = {(set(key[1:]) - {"completions"}).pop(): value for key, value in seen.items()
                    if key[0] == "xpyd_router_requests_total"}
        assert outcomes.keys() == {"ok", "client_error", "refused"}
        assert sum(outcomes.values()) == 5
        assert seen["xpyd_router_in_flight",] == 0
        assert seen["xpyd_router_retries_total",] == 2
        assert seen["xpyd_router_instances", "decode", "starting"] == 1
        assert seen["xpyd_router_instances", "decode", "ready"] == 2
        assert seen["xpyd_router_legs_total", "decode", "lost"] == 1
        assert seen["xpyd_router_ttft_seconds_count", "completions"] == outcomes["ok"]
        assert seen["xpyd_router_request_seconds_count", "completions"] == 4
        opened = sum(value for key, value in seen.items() if key[0] == "xpyd_router_legs_total")
        assert opened == len(f.p[0].seen) + len(f.d[0].seen) + len(f.d[1].seen)
