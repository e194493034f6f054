"""A toy language model that draws its answers, and engines that answer with them as vLLM writes it.

    engine = ScriptedEngine("d0", replay=ToyReplay(seed=7))

A third of its characters take several tokens, one for each byte. The next token depends on the one before it, and by the
fields of the request: temperature, presence_penalty (counts output alone), repetition_penalty (prompt and output alike),
logit_bias, min_tokens (no end before) and stop_token_ids. Pure: what is drawn is a function of the seed, of the request's
``user``, and of how often that user has asked.
"""

from __future__ import annotations

import functools
import json
import math
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from recorded import Corpus, Line, Step
from replay import APIS, Replay

USUAL = 0.5
"""The temperature at which a third of the characters take several tokens."""
END = 0
"""The token that ends an answer, where the request stops at it."""
SINGLES = "abcdefgh"
LONGER = "é日本😀"
PROMPT = "once upon a time there"
_BYTES = 1000
"""A byte's token is its value on top of this."""
_FIRST = {char.encode()[:1] for char in LONGER}


def encode(text: str) -> list[int]:
    """The tokens of a text: one for a character of one byte, else one for each of its bytes."""
    return [token for char in text for token in ([ord(char)] if char.isascii() else [_BYTES + b for b in char.encode()])]


def decode(tokens: Iterable[int]) -> str:
    """The text of tokens, as a tokenizer of bytes gives it: what is no character yet is a replacement character."""
    raw = b"".join(bytes([t - _BYTES]) if t >= _BYTES else chr(t).encode() for t in tokens if t != END)
    return raw.decode("utf-8", "replace")


class DecodeStream:
    """Text token by token, as ``tokenizers.decoders.DecodeStream`` gives it: also the prompt's, where that is not whole."""

    def __init__(self, prompt: list[int]) -> None:
        self._ids = list(prompt)
        self._prefix = ""
        self._at = 0

    def step(self, token: int) -> str:
        if not self._prefix and self._ids:
            whole = decode(self._ids)
            if not whole.endswith("\ufffd"):
                self._prefix, self._at = whole, len(self._ids)
        self._ids.append(token)
        text = decode(self._ids)
        if len(text) <= len(self._prefix) or text.endswith("\ufffd"):
            return ""
        assert text.startswith(self._prefix), "not monotonic"
        new, at = text[len(self._prefix):], len(self._ids) - self._at
        self._ids = self._ids[self._at:]
        self._prefix, self._at = decode(self._ids), at
        return new


@functools.cache
def _tree() -> dict[bytes, set[bytes]]:
    """What may follow the bytes of a character that has begun."""
    found: dict[bytes, set[bytes]] = {}
    for char in LONGER:
        raw = char.encode()
        for at in range(1, len(raw)):
            found.setdefault(raw[:at], set()).add(raw[at:at + 1])
    return found


@functools.cache
def _logits(before: int) -> dict[int, float]:
    """Of what may come behind a whole character whose last token is ``before``."""
    draw = random.Random(f"toy {before}")
    singles = {ord(char): draw.gauss(1.5 if ord(char) == before else 0, 1) for char in SINGLES}
    firsts = {_BYTES + first[0]: draw.gauss(0, 1) for first in sorted(_FIRST)}
    shift = USUAL * math.log(_weight(singles) / _weight(firsts) / 2)  # so that a third of characters take several tokens
    chosen = {**singles, **{token: logit + shift for token, logit in firsts.items()}}
    return {**chosen, END: USUAL * math.log(0.2 * _weight(chosen))}


def _weight(logits: dict[int, float]) -> float:
    return sum(math.exp(logit / USUAL) for logit in logits.values())


def chances(prompt: list[int], output: list[int], body: dict[str, Any]) -> dict[int, float]:
    """The distribution of the next token."""
    seen = [*prompt, *output]
    begun = b""
    for token in reversed(seen):
        if token < _BYTES:
            break
        begun = bytes([token - _BYTES]) + begun
        if token - _BYTES >= 0xC0:
            break
    after = _tree().get(begun)
    logits = (dict(_logits(seen[-1])) if after is None
              else {_BYTES + one[0]: 0.3 * at for at, one in enumerate(sorted(after))})
    here, there = Counter(output), set(seen)
    for token in logits:
        logits[token] += float((body.get("logit_bias") or {}).get(str(token), 0))
        if token in there and (penalty := body.get("repetition_penalty") or 1.0) != 1.0:
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        if here[token]:
            logits[token] -= body.get("presence_penalty") or 0.0
    if len(output) < (body.get("min_tokens") or 0):
        logits.pop(END, None)
    temperature = 1.0 if body.get("temperature") is None else body["temperature"]
    weights = {token: math.exp(logit / temperature) for token, logit in logits.items()}
    whole = sum(weights.values())
    return {token: weight / whole for token, weight in weights.items()}


def drawn(prompt: list[int], body: dict[str, Any], draw: random.Random) -> list[int]:
    """The tokens of an answer."""
    output: list[int] = []
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
    while len(output) < limit and END not in output:
        odds = chances(prompt, output, body)
        output += draw.choices(list(odds), list(odds.values()))
    return output


class ToyReplay(Replay):
    """Answers with what the model draws."""

    def __init__(self, seed: int) -> None:
        super().__init__(Corpus([], []))
        self._seed = seed
        self._asked: Counter[str] = Counter()

    def stream(self, path: str, body: dict[str, Any], request_id: str) -> list[bytes]:
        api = APIS[path]
        ids = (body.get("kv_transfer_params") or {}).get("prompt_token_ids") if "messages" in body else body["prompt"]
        prompt = ids if isinstance(ids, list) else encode(PROMPT if ids is None else ids)
        user = str(body.get("user"))
        self._asked[user] += 1
        draw = random.Random(f"{self._seed} {user} {self._asked[user]}")
        line = line_of("chat" if api == "chat" else "completions", prompt, drawn(prompt, body, draw))
        return [json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
                for event in self.composed(line, 0, body, request_id)]


def line_of(api: Literal["completions", "chat"], prompt: list[int], tokens: list[int]) -> Line:
    """An answer as a line that events are made of."""
    stream = DecodeStream(prompt)
    steps = []
    for token in tokens:
        text = "" if token == END else stream.step(token)
        shown = decode([token])
        probs: dict[str, Any] = {"token_logprobs": [-0.5], "tokens": [shown], "top_logprobs": [{shown: -0.5}]}
        if api == "chat":
            probs = {"content": [{"token": shown, "logprob": -0.5, "bytes": list(shown.encode()), "top_logprobs": []}]}
        steps.append(Step(token, text, probs))
    return Line("drawn", api, {}, prompt, steps)
