"""Prompts whose answers must be equal however they are served, and the rule by which two answers count as equal.

Engines add the same numbers in different orders when their batches differ, so sums differ by about 1e-5. Where the plain
engine itself saw two tokens closer than ``TIE`` (difference of log probabilities), either may win: a mismatch there is a
near tie, anything else is wrong. After a near tie the texts part ways for good, so only the first mismatch is judged.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

TIE = 1e-3
VOCABULARY = range(3, 500)
BLOCK = 128
"""Tokens per KV block of vLLM on a CPU."""
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One request: token ids in, greedy, exactly ``max_tokens`` out."""

    name: str
    prompt: Tokens
    max_tokens: int = 24

    def body(self, model: str, **more: object) -> dict[str, object]:
        """The JSON body for /v1/completions; the answer carries its token ids."""
        return {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        } | more


@dataclass(frozen=True)
class Reference:
    """What the plain engine answered, and how sure it was: the gap between its two best tokens at each position."""

    tokens: Tokens
    gaps: tuple[float, ...]


class Verdict(Enum):
    EQUAL = "equal"
    NEAR_TIE = "near tie"
    WRONG = "wrong"


def judge(reference: Reference, tokens: Tokens) -> Verdict:
    """Compare an answer with the plain engine's."""
    for expected, got, gap in zip(reference.tokens, tokens, reference.gaps, strict=False):
        if expected != got:
            return Verdict.WRONG if gap > TIE else Verdict.NEAR_TIE
    return Verdict.EQUAL if len(tokens) == len(reference.tokens) else Verdict.WRONG


def tokens_of(seed: str, length: int) -> Tokens:
    """Random token ids, the same for the same seed."""
    source = random.Random(seed)
    return tuple(source.choice(VOCABULARY) for _ in range(length))


def lengths() -> tuple[Case, ...]:
    """One token, block edges and one to either side, chunk edges (512 tokens a step), the longest prompts."""
    edges = [edge + off for edge in (BLOCK, 2 * BLOCK, 4 * BLOCK, 8 * BLOCK) for off in (-1, 0, 1)]
    others = (1, 2, 3, 17, 64, 200, 383, 640, 900, 1300, 1500, 1800, 1900)
    return tuple(Case(f"{n} tokens", tokens_of(f"length {n}", n)) for n in sorted({*edges, *others}))


def prefixes() -> tuple[Case, ...]:
    """The same 640 tokens at the start, tails of different lengths; the last one is a prompt already seen."""
    start = tokens_of("prefix", 5 * BLOCK)
    tails = (1, 5, 127, 128, 129, 300, 700, 1100, 5)
    return tuple(Case(f"640 shared + {n} ({i})", start + tokens_of(f"tail {n}", n)) for i, n in enumerate(tails))


def mixed(count: int, seed: int = 7) -> tuple[Case, ...]:
    """Requests as clients send them: short and long, in no order, some sharing a start."""
    source = random.Random(seed)
    shared = [tokens_of(f"shared {i}", 256) for i in range(4)]
    cases = []
    for i in range(count):
        start = source.choice(shared) if i % 4 == 0 else ()
        prompt = start + tokens_of(f"mixed {seed} {i}", source.choice((1, 7, 40, 128, 130, 300, 600)))
        cases.append(Case(f"mixed {i}", prompt, source.choice((8, 16, 32))))
    return tuple(cases)
