"""A made-up model: streams with all that is awkward for going on, without an engine or a recording.

    line = made_line("chat", random.Random(1))
    MadeReplay(line)             what an engine answers to a request for it (``replay`` writes it as vLLM does)
    made_fields(line, draw)      a request with random fields

Tokens have no text (half a character), one or several characters, and text that looks like the stream's own markup.
"""

from __future__ import annotations

import random
from typing import Any, Literal

from recorded import Corpus, Line, Step
from replay import Replay

TEXTS = ["a", " the", "b", "\n", '"', "\\", "日", "😀", "ab", "xyz", " ", "data: ", "\t", "é", '","logprobs":',
         '"token_ids":[']
MAX = 40
"""Tokens asked for at most."""


class MadeReplay(Replay):
    """Answers with one line, from its start or behind the ids that were given."""

    def __init__(self, line: Line) -> None:
        super().__init__(Corpus([line], []))
        self.line = line

    def _place(self, api: str, body: dict[str, Any]) -> tuple[Line, int]:
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids") or body.get("prompt")
        return super()._place(api, body) if isinstance(given, list) else (self.line, 0)


def made_line(api: Literal["completions", "chat"], draw: random.Random) -> Line:
    """A line of random tokens."""
    steps = []
    for _ in range(MAX + 4):
        text = "" if draw.random() < 0.2 else draw.choice(TEXTS)
        number = draw.choice([draw.randrange(10), draw.randrange(1000), draw.randrange(130_000)])
        shown = text or "\ufffd"
        probs: dict[str, Any] = {"token_logprobs": [-0.5], "tokens": [shown], "top_logprobs": [{shown: -0.5}]}
        if api == "chat":
            probs = {"content": [{"token": shown, "logprob": -0.5, "bytes": list(shown.encode()), "top_logprobs": []}]}
        steps.append(Step(number, text, probs))
    prompt = [draw.randrange(130_000) for _ in range(draw.choice([1, 2, 30]))]
    what: dict[str, Any] = {"prompt": "text"} if api == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    return Line("made", api, {**what, "temperature": 0}, prompt, steps)


def made_fields(line: Line, draw: random.Random) -> dict[str, Any]:
    """A streamed request for a line."""
    fields: dict[str, Any] = {"model": "tiny", **line.body, "stream": True, "max_tokens": draw.randrange(1, MAX)}
    text = "".join(step.text for step in line.steps[:30])
    if draw.random() < 0.5:
        at = draw.randrange(max(1, len(text) - 4))
        stops = [text[at:at + draw.randrange(1, 6)], "\x00never\x00" * draw.randrange(1, 3)]
        fields["stop"] = draw.choice([stops, stops[0], stops[1], stops[:1]])
        if draw.random() < 0.4:
            fields["include_stop_str_in_output"] = True
    if draw.random() < 0.3:
        fields["min_tokens"] = draw.randrange(fields["max_tokens"] + 1)
    if draw.random() < 0.3:
        fields["stop_token_ids"] = [draw.choice(line.steps).id]
    if draw.random() < 0.5:
        fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": draw.random() < 0.5}
    if draw.random() < 0.3:
        fields |= {"logprobs": 1} if line.api == "completions" else {"logprobs": True, "top_logprobs": 0}
    if draw.random() < 0.2:
        fields["return_token_ids"] = True
    fields |= draw.choice([{}, {}, {"frequency_penalty": 0.0}, {"frequency_penalty": 0.5}])  # the last one asks for replay
    return fields
