"""What a client does wrong gets an error in OpenAI's form, and leaves nothing behind on either engine.

The ``cluster`` fixture fails a test after which a request, a block or a transfer is left.
"""

from __future__ import annotations

import http.client
import json
import random
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cluster import Cluster
from corpus import tokens_of
from engine_pair import wait_until
from engines import MODEL_NAME, complete

from xpyd_sidecar.contract import metrics
from xpyd_sidecar.kv.keys import Outcome

pytestmark = pytest.mark.engines
LONG = list(tokens_of("too long", 2100))
GOOD: dict[str, Any] = {"model": MODEL_NAME, "prompt": [5, 6, 7], "max_tokens": 4}
TRANSFER = {"xpyd": 1, "role": "decode", "transfer": "0" * 32, "attempt": 1, "remaining_s": 60}


def ask(cluster: Cluster, body: bytes, path: str = "/v1/completions", method: str = "POST") -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", cluster.port, timeout=240)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@pytest.mark.parametrize(("fields", "status", "word"), [
    ({"model": "another"}, 404, "another"),
    ({"model": 7}, 400, "model"),
    ({"prompt": LONG}, 400, "2048"),
    ({"prompt": LONG, "stream": True}, 400, "2048"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [5, "six"]}, 400, ""),
    ({"max_tokens": -3}, 400, "max_tokens"),
    ({"max_tokens": "many"}, 400, "max_tokens"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"kv_transfer_params": TRANSFER}, 400, "kv_transfer_params"),
    ({"stream": "yes please"}, 400, "stream"),
    ({"stop": 12}, 400, "stop"),
])
def test_a_bad_field_is_answered_with_its_name(cluster: Cluster, fields: dict[str, Any], status: int, word: str) -> None:
    got, answer = ask(cluster, json.dumps(GOOD | fields).encode())
    assert got == status, answer
    assert set(answer["error"]) >= {"message", "type", "code"}
    assert word in json.dumps(answer["error"]), answer
    assert len(complete(cluster.url, [5, 6, 7], 4)["token_ids"]) == 4


def test_what_prefill_computed_for_a_request_that_decode_refuses_is_let_go_at_once(cluster: Cluster) -> None:
    """That is: since decode has said so, and not since nobody has claimed it for long (``KvOptions.claim_s``).

    Decode's server stands still until prefill has computed the prompt: what it refuses sooner, prefill may never begin. Its
    engine core goes on, which prefill hears; and one at a time, since a server that stands still for long is given up.
    """
    [prefill], [decode] = cluster.prefill, cluster.decode

    def sent(outcome: str) -> float:
        return prefill.engine.metric("xpyd_kv_transfers_total", side="send", outcome=outcome)

    bodies = [json.dumps(GOOD | {"prompt": list(tokens_of(f"refused {at}", 300)), "max_tokens": -3}).encode()
              for at in range(4)]
    before = {outcome: sent(outcome) for outcome in Outcome}
    with ThreadPoolExecutor(1) as pool:
        for body in bodies:
            decode.engine.group.signal(signal.SIGSTOP)
            try:
                answer = pool.submit(ask, cluster, body)
                wait_until(lambda: prefill.engine.metric(metrics.SENDS_OPEN) == 1, 60, "computed")
            finally:
                decode.engine.group.signal(signal.SIGCONT)
            assert answer.result(240)[0] == 400
            cluster.wait_idle()
    ended = {outcome: count for outcome in Outcome if (count := sent(outcome) - before[outcome])}
    assert ended == {Outcome.ABORTED: len(bodies)}, "and not as those that nobody claimed (DEADLINE)"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"text"', b'{"model": "tiny"', b"\xff\xfe", b"{" * 5000])
def test_a_body_that_is_no_request_is_answered_with_400(cluster: Cluster, body: bytes) -> None:
    status, answer = ask(cluster, body)
    assert status == 400, answer
    assert answer["error"]["message"]


def test_an_oversized_body_is_answered_with_413(cluster: Cluster) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", cluster.port, timeout=240)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(1 << 40))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413
    assert "error" in json.loads(answer.read())
    connection.close()


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/v1/completions", 405), ("POST", "/v1/nothing", 404), ("DELETE", "/v1/models", 405), ("GET", "/", 404),
])
def test_a_wrong_path_or_method_is_answered_in_the_same_form(cluster: Cluster, method: str, path: str, status: int) -> None:
    got, answer = ask(cluster, b"", path, method)
    assert got == status
    assert answer["error"]["message"]


def test_the_fleet_is_shown_to_nobody_without_the_token(cluster: Cluster) -> None:
    assert ask(cluster, b"", "/fleet", "GET")[0] == 404
    connection = http.client.HTTPConnection("127.0.0.1", cluster.admin_port, timeout=60)
    connection.request("GET", "/fleet")
    assert connection.getresponse().status == 401
    connection.close()


def test_an_answer_that_meets_the_context_length_ends_as_a_plain_engine_ends_it(cluster: Cluster) -> None:
    prompt = list(tokens_of("full", 2040))
    answers = [complete(url, prompt, 100) for url in (cluster.plain_url, cluster.url)]
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    assert answers[0]["finish_reason"] == answers[1]["finish_reason"] == "length"
    assert len(answers[1]["token_ids"]) == 8


def leave(cluster: Cluster, prompt: list[int], after_s: float, *, stream: bool) -> None:
    """A client that goes away ``after_s`` seconds into its request."""
    body = json.dumps(GOOD | {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", cluster.port), 10) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        end = time.monotonic() + after_s
        connection.settimeout(0.05)
        while time.monotonic() < end:
            try:
                connection.recv(65536)
            except TimeoutError:
                continue


def test_clients_that_leave_at_any_point_leave_nothing_behind(cluster: Cluster) -> None:
    source = random.Random(11)
    leavings = [(list(tokens_of(f"leave {i}", source.choice((20, 500, 1500)))), source.uniform(0, 1.5), i % 2 == 0)
                for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        for left in [pool.submit(leave, cluster, prompt, after_s, stream=stream) for prompt, after_s, stream in leavings]:
            left.result(240)
    cluster.wait_idle()
    [decode], [prefill] = cluster.decode, cluster.prefill
    cluster.wait_fleet(lambda fleet: all(one.in_flight == 0 for one in fleet.instances), 60, "empty")
    assert decode.engine.alive()
    assert prefill.engine.alive()
    assert complete(cluster.url, [5, 6, 7], 4)["token_ids"] == complete(cluster.plain_url, [5, 6, 7], 4)["token_ids"]
