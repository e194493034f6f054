"""About how many tokens a request takes of the engines: those of its prompt, and those that it may generate. Pure.

    completions, chats, dialects    the prompt's tokens     max_tokens · n, for each of several prompts
    generation in other forms       its body's tokens       likewise
    embeddings, scores, templates   its body's tokens       none
    forms (audio)                   a token for each ``FORM_BYTES``; windows of 30 s and their texts, at 128 kbit/s
    without a body                  one

It is an estimate to share by (``balance.queue``), and what turns out to be wrong is given back at the end
(``taken_tokens``): so nothing is read here that would have to be built, and what cannot be read counts as usual.
"""

from __future__ import annotations

from collections.abc import Mapping
from re import compile as regex

import msgspec
from msgspec import Raw

from xpyd_sidecar.router.api.fields import integer_of, is_null
from xpyd_sidecar.router.api.paths import GENERATING

USUAL = 256.0
"""Tokens of an answer, while nothing is known."""
COMPLETION = 16
"""Of a completion that does not say: vLLM's own default."""
MOST = 1 << 20
"""No answer is taken to be longer."""
MOST_ANSWERS = 1 << 10
"""Nor does a request have more of them."""
FORM_BYTES = 256
FORM = 4096
"""Of a form whose length its client does not say."""
LOOKED_AT = 1 << 20
"""Bytes of a list of prompts in which they are counted."""
_SAMPLING = 64 << 10
"""Bytes of sampling parameters that are read."""
_LONGEST = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_LIST = regex(rb"\s*\[\s*([\"\[])")
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode


class ExpectedTokens(msgspec.Struct, frozen=True):
    """What a request is expected to take."""

    prompt: int = 1
    answer: int = 0

    @property
    def total(self) -> int:
        """At least 1."""
        return max(1, self.prompt + self.answer)


class AnswerLengths:
    """How many tokens answers have, for requests that do not say."""

    KEEP = 0.99
    """Of what is known, at each new answer."""

    def __init__(self) -> None:
        self.usual = USUAL

    def learn(self, tokens: int) -> None:
        """An answer had so many."""
        self.usual = max(1.0, self.KEEP * self.usual + (1 - self.KEEP) * min(tokens, MOST))


def may_generate(api: str, path: str, fields: Mapping[str, Raw], usual: float) -> int:
    """Tokens that the answer to a request with these fields may have. ``api``, ``path``: of the router's table. ``usual``:
    tokens of an answer where nothing is said.
    """
    if not api and path not in GENERATING:
        return 0
    sampling: Mapping[str, Raw] = {}
    raw = fields.get("sampling_params")
    if raw is not None and len(raw) <= _SAMPLING and not is_null(raw):
        try:
            sampling = _decode_fields(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            sampling = {}  # the engine says what is wrong with it
    longest = next((found for name in _LONGEST if (found := _number(fields, sampling, name)) is not None), None)
    if longest is None:
        longest = COMPLETION if api == "completions" else int(usual)
    answers = max(1, *(_number(fields, sampling, name) or 1 for name in ("n", "best_of")))
    prompts = _prompts(fields.get("prompt") or fields.get("messages") or Raw(b""))
    return min(longest, MOST) * min(answers * prompts, MOST_ANSWERS)


def taken_tokens(expected: ExpectedTokens, prompt: int, generated: int, *, whole: bool, sent: bool) -> int:
    """Tokens that a request took, as far as its answer says: ``prompt`` and ``generated``, below 0 where it does not.
    ``whole``: it was answered to its end; ``sent``: an engine was asked.
    """
    if not sent:
        return 0
    if generated < 0 and whole:
        return expected.total if prompt < 0 else prompt + expected.answer
    return (prompt if prompt > 0 else expected.prompt) + max(0, generated)


def of_form(length: int | None) -> ExpectedTokens:
    """Of a form with so many bytes; None: nobody knows how many."""
    return ExpectedTokens(FORM if length is None else max(1, length // FORM_BYTES))


def _number(fields: Mapping[str, Raw], sampling: Mapping[str, Raw], name: str) -> int | None:
    """The value of a field, or of the sampling parameter of that name, where it is above 0."""
    raw = fields.get(name) or sampling.get(name)
    if raw is None or is_null(raw):
        return None
    number = integer_of(raw)
    return number if number is not None and number > 0 else None


def _prompts(raw: Raw) -> int:
    """About how many prompts a value holds: at least one. Commas within texts may count; the end tells."""
    begin = _LIST.match(raw)
    if begin is None:
        return 1
    some = bytes(memoryview(raw)[:LOOKED_AT])
    return some.count(b'",' if begin[1] == b'"' else b"],") + 1
