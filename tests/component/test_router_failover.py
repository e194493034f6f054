"""SIGSTOP and kill -9 of a real decode engine in mid-stream: its streams go on at the other one, and nobody can tell.

Each request is sent twice, so that each of two decode engines has one of them. One engine is killed; what the other one was
asked in the first place is what the moved streams must be equal to, and to what an engine says that is asked directly. The
first token of plain streams comes from prefill.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from engines import MODEL_NAME, get
from make_model import ensure_adapter
from recorded import Seen, seen_of

from xpyd_sidecar.contract.ids import Role

pytestmark = [pytest.mark.engines, pytest.mark.smoke]
LINES = 25
"""Events that every stream has had before the kill."""
SLOW = {"SLOW_STEP_S": "0.05", "PYTHONPATH": os.pathsep.join(
    filter(None, (str(Path(__file__).parents[1] / "support/slow_steps"), os.environ.get("PYTHONPATH"))))}
"""What decode engines are started with: an answer takes 25 s, so the first has not ended before the last has begun."""
ANSWER_S = 240.0
ADAPTER = "fluent"
GREEDY: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0, "stream": True, "ignore_eos": True, "max_tokens": 500,
                          "stream_options": {"include_usage": True}}
PROMPT = {"prompt": "A block is what a lease is for. Hello wörld, 日本 "}
MESSAGES = {"messages": [{"role": "user", "content": "Hi, tell me € about 日本"}]}
HALF_SAID = "behind a character that was half said"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", PROMPT),
    "chat": ("/v1/chat/completions", MESSAGES),
    "stop strings": ("/v1/chat/completions", {**MESSAGES, "stop": ["\x00never comes\x00", "nor this"]}),
    "logprobs": ("/v1/completions", {**PROMPT, "logprobs": 2}),
    "penalty, by replay": ("/v1/completions", {**PROMPT, "presence_penalty": 0.6}),
    "a LoRA adapter": ("/v1/completions", {**PROMPT, "model": ADAPTER}),
    "sampled": ("/v1/completions", {**PROMPT, "temperature": 0.8}),
}


class Stream(threading.Thread):
    """One request, read as it comes."""

    def __init__(self, port: int, path: str, fields: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.events: list[str] = []
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
        self._connection.request("POST", path, json.dumps({**GREEDY, **fields}), {"Content-Type": "application/json"})

    def run(self) -> None:
        with self._connection.getresponse() as answer:
            assert answer.status == 200, answer.read()
            for line in answer:
                if line.startswith(b"data: "):
                    self.events.append(line[6:].decode().strip())
        self._connection.close()

    def seen(self) -> Seen:
        """What the client has."""
        return seen_of(self.events)


def test_a_decode_engine_that_stands_still_and_one_that_is_killed(tmp_path: Path) -> None:
    # In a batch with an adapter, vLLM on CPUs gives the other requests that of the last slot: a second one stays empty.
    adapter = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules",
               f"{ADAPTER}={ensure_adapter()}")
    with Cluster(tmp_path, prefill=1, decode=0, router={"policy": "round_robin", "first_token": "prefill"},
                 engine_args=adapter) as cluster:
        for _ in range(2):
            cluster.add(Role.DECODE, env=SLOW).start()
        cluster.wait_ready()
        cards = {card["id"]: card["parent"] for card in json.loads(get(f"{cluster.url}/v1/models"))["data"]}
        assert cards == {MODEL_NAME: None, ADAPTER: MODEL_NAME}
        _stand_still(cluster, tmp_path / "router.log")
        for instance in cluster.instances:  # what an engine does once, as to load the adapter, is done before
            for path, fields in CASES.values():
                Stream(instance.engine.port, path, {**fields, "max_tokens": 2}).run()
        streams = {name: (Stream(cluster.port, *case), Stream(cluster.port, *case)) for name, case in CASES.items()}
        every = [stream for pair in streams.values() for stream in pair]
        _begin(every)
        cluster.decode[0].engine.kill()
        for stream in every:
            stream.join(ANSWER_S)
            assert not stream.is_alive()
        for name, pair in streams.items():
            first, second = pair[0].seen(), pair[1].seen()
            if name == "sampled":  # has no second run: both are whole, and nothing more can be compared
                # But for a cut inside a character, behind which it may be that nobody can tell which text is new (0026).
                half = HALF_SAID in (tmp_path / "router.log").read_text()
                whole = [one.usage["completion_tokens"] for one in (first, second) if one.usage is not None]
                assert whole == [GREEDY["max_tokens"]] * (1 if half else 2), pair
                assert sorted(_continued(stream) for stream in pair) == [0, 0 if half else 1]
                continue
            for stream, seen in zip(pair, (first, second), strict=True):
                assert stream.events[-1] == "[DONE]", (name, stream.events[-2:])
                assert (len(seen.names), len(seen.created), seen.error, seen.after_finish) == (1, 1, None, 0), name
                assert seen.usage is not None
                assert seen.usage["completion_tokens"] == GREEDY["max_tokens"], (name, stream.events[-6:])
                assert seen.tokens[0] == [], "ids are the router's own"
            assert (first.texts, first.finish, first.usage) == (second.texts, second.finish, second.usage), name
            assert first.roles == second.roles
            _same_logprobs(first, second)
        for name in ("completions", "chat", "a LoRA adapter"):
            plain = Stream(cluster.prefill[0].engine.port, *CASES[name])
            plain.run()
            assert plain.seen().texts == streams[name][0].seen().texts, name
            for stream in streams[name]:
                assert _shapes(stream.events) == _shapes(plain.events), "as an engine writes it"
        assert streams["a LoRA adapter"][0].seen().texts != streams["completions"][0].seen().texts
        moved = (tmp_path / "router.log").read_text().count("a stream goes on elsewhere")
        assert moved == 1 + len(CASES), "each request had one stream on the engine that was killed"


def _continued(stream: Stream) -> int:
    """How often it went on elsewhere, as its last events say."""
    return max(json.loads(event).get("xpyd_continued", 0) for event in stream.events if event != "[DONE]")


def _begin(streams: list[Stream]) -> None:
    """Start them, and wait until all have some events; none is near its end then."""
    for stream in streams:
        stream.start()
    end = time.monotonic() + 120.0
    while min(len(stream.events) for stream in streams) < LINES:
        assert time.monotonic() < end, [len(stream.events) for stream in streams]
        time.sleep(0.02)
    assert max(len(stream.events) for stream in streams) < GREEDY["max_tokens"] - 2 * LINES, "steps are slow enough"


def _stand_still(cluster: Cluster, log: Path) -> None:
    """The engine alone is stopped: its agent goes on beating, and the kernel takes connections for it."""
    stopped = cluster.decode[1]
    streams = [Stream(cluster.port, "/v1/completions", PROMPT) for _ in cluster.decode]
    _begin(streams)
    stopped.engine.group.signal_all(signal.SIGSTOP)
    try:
        for stream in streams:
            stream.join(ANSWER_S)
            assert not stream.is_alive()
    finally:
        stopped.engine.group.signal_all(signal.SIGCONT)
    first, second = (stream.seen() for stream in streams)
    assert (first.error, first.texts, first.finish, first.usage) == (None, second.texts, second.finish, second.usage)
    assert log.read_text().count("a stream goes on elsewhere") == 1
    cluster.wait_ready()


def _shapes(events: list[str]) -> set[frozenset[str]]:
    """Names at the top level of each event; that it went on is said in one of them."""
    return {frozenset(json.loads(event)) - {"xpyd_continued"} for event in events if event != "[DONE]"}


def _same_logprobs(first: Seen, second: Seen) -> None:
    # Prefilled and decoded logits differ in the last bits.
    for choice, shown in first.logprobs.items():
        other = second.logprobs[choice]
        assert (shown["tokens"], shown["text_offset"]) == (other["tokens"], other["text_offset"])
        far = [abs(one - two) for one, two in zip(shown["token_logprobs"], other["token_logprobs"], strict=True)]
        assert max(far) < 1e-3
