"""Records what a real engine answers, for engines that replay it: ``recorded_requests`` → ``corpora/tiny-llama-1.json.xz``.

    .venv/bin/python tests/support/record_streams.py            starts a plain engine, writes the file (4 minutes)

For each line (a prompt and the fields that choose tokens) the token ids, texts and log probabilities of a greedy run, one
token a chunk. For each request its stream with and without ``return_token_ids``, its whole answer, and, where the request
can be continued, what the engine answers to the prompt's ids and some of the generated ones.
"""

from __future__ import annotations

import http.client
import json
import lzma
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from engines import MODEL_NAME, Engine
from recorded import CORPUS, REQUEST_ID, Corpus, Line, Request, Step, clean_cuts, continued, ids_of, texts_of
from recorded_requests import LINE_TOKENS, PATHS, Wanted, lines, requests

ATTEMPTS = 30
CUTS = 3
"""Continuations recorded of each request."""


class Refused(Exception):
    """The engine does not answer this request."""


class Recorder:
    """Asks one engine, one request at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def stream(self, api: str, body: dict[str, Any]) -> list[str]:
        """The events of a stream, without ``data: `` and without [DONE]."""
        text = self._ask(api, {"model": MODEL_NAME, **body, "stream": True})
        events = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
        if events[-1] != "[DONE]" or any(event.startswith('{"error"') for event in events):
            raise Refused(f"{body}: {text[-500:]}")
        return events[:-1]

    def whole(self, api: str, body: dict[str, Any]) -> Any:
        """The answer to a request that does not stream."""
        return json.loads(self._ask(api, {"model": MODEL_NAME, **body}))

    def _ask(self, api: str, body: dict[str, Any]) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._engine.port, timeout=120)
        try:
            connection.request("POST", PATHS[api], json.dumps(body), {"Content-Type": "application/json",
                                                                      "X-Request-Id": REQUEST_ID})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status != 200:
            raise Refused(f"{body}: {answer.status} {text[:500]}")
        return text

    def line(self, name: str, wanted: Wanted) -> Line:
        """A greedy run, one token a chunk: asked again until the server was quick enough for that."""
        logprobs = {"logprobs": 2} if wanted.api == "completions" else {"logprobs": True, "top_logprobs": 2}
        body = {**wanted.body, "max_tokens": LINE_TOKENS, "ignore_eos": True, "return_token_ids": True, **logprobs}
        for _ in range(ATTEMPTS):
            events = [json.loads(event) for event in self.stream(wanted.api, body)]
            chunks = [event["choices"][0] for event in events if ids_of(event)]
            if all(len(chunk["token_ids"]) == 1 for chunk in chunks):
                break
        else:
            raise SystemExit(f"{name}: never one token a chunk")
        prompt = next(ids for event in events if (ids := event.get("prompt_token_ids")
                                                  or event["choices"][0].get("prompt_token_ids")))
        steps = [Step(chunk["token_ids"][0], texts_of(chunk), chunk["logprobs"]) for chunk in chunks]
        assert len(steps) == LINE_TOKENS
        return Line(name, wanted.api, wanted.body, prompt, steps)

    def request(self, name: str, wanted: Wanted, known: dict[str, Line]) -> Request:
        """One request with everything an engine says to it."""
        line = known.get(wanted.line)
        body = wanted.made(line)
        plain = self.stream(wanted.api, body)
        ids = self.stream(wanted.api, {**body, "return_token_ids": True})
        whole = self.whole(wanted.api, {key: value for key, value in body.items() if key != "stream_options"})
        found = Request(name, wanted.api, wanted.line, wanted.way, body, plain, ids, whole, [])
        if line is not None and wanted.way == "continue":
            cuts = clean_cuts(line, found)
            for cut in sorted(random.Random(name).sample(cuts, min(CUTS, len(cuts)))):
                asked = continued(wanted.api, body, line, cut)
                found.continued.append((cut, self.stream(wanted.api, {**asked, "return_token_ids": True})))
        return found


def record(engine: Engine) -> Corpus:
    """Everything."""
    recorder = Recorder(engine)
    known = {name: recorder.line(name, wanted) for name, wanted in lines().items()}
    sys.stderr.write(f"{len(known)} lines\n")
    found = []
    for name, wanted in requests().items():
        try:
            found.append(recorder.request(name, wanted, known))
        except Refused as error:
            sys.stderr.write(f"left out: {name}: {error}\n")
    return Corpus(list(known.values()), found)


def main() -> None:
    """Start an engine, record, write the file."""
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with tempfile.TemporaryDirectory() as folder, Engine("recorder", Path(folder), connector=False, args=tools) as engine:
        engine.wait_ready()
        corpus = record(engine)
    CORPUS.parent.mkdir(exist_ok=True)
    CORPUS.write_bytes(lzma.compress(corpus.encode(), preset=9))
    sys.stderr.write(f"{CORPUS}: {CORPUS.stat().st_size} bytes, {len(corpus.requests)} requests\n")


if __name__ == "__main__":
    main()
