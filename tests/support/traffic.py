"""Traffic through a router with the official `openai` client, every answer compared with the plain engine's.

    references = await plain_answers(engine.url, cases)
    report = await send(router_url, cases, references, at_once=16)
    async with Steady(router_url, cases, references) as steady: …   # until the block ends
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import openai
from corpus import Case, Reference, Tokens, Verdict, judge
from engines import HTTP_TIMEOUT_S, MODEL_NAME, READY_DEADLINE_S

References = dict[Case, Reference]


@dataclass
class Report:
    """What came of the requests."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    near_ties: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    tokens: int = 0
    """Tokens compared."""

    @property
    def total(self) -> int:
        """Requests sent and ended."""
        return sum(self.verdicts.values()) + len(self.failed)

    def add(self, case: Case, reference: Reference, tokens: Tokens) -> None:
        """Judge one answer."""
        verdict = judge(reference, tokens)
        self.verdicts[verdict] += 1
        self.tokens += len(tokens)
        if verdict is Verdict.WRONG:
            self.wrong.append(f"{case.name}: {reference.tokens} expected, {tokens} got")
        elif verdict is Verdict.NEAR_TIE:
            self.near_ties.append(case.name)

    def check(self, *, failures_allowed: int = 0) -> None:
        """Nothing wrong, near ties under 0.1 % of the tokens, nothing lost beyond what the test allows."""
        assert not self.wrong, self.wrong[:3]
        assert len(self.failed) <= failures_allowed, self.failed[:5]
        print(f"{self.total} requests, {self.tokens} tokens; near ties: {self.near_ties}; failed: {self.failed}")
        assert len(self.near_ties) * 1000 <= self.tokens, self.near_ties


def client(url: str, timeout_s: float = HTTP_TIMEOUT_S) -> openai.AsyncOpenAI:
    """The official client without retries of its own: what fails must show."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=timeout_s)


def _arguments(case: Case) -> dict[str, Any]:
    fields = case.body(MODEL_NAME)
    extra = {name: fields.pop(name) for name in ("ignore_eos", "return_token_ids")}
    return {**fields, "extra_body": extra}


async def ask(api: openai.AsyncOpenAI, case: Case, *, stream: bool) -> Tokens:
    """One answer's token ids. Raises what the client raises, and AssertionError for a stream without a finish reason."""
    if not stream:
        answer = await api.completions.create(**_arguments(case))
        return tuple(answer.choices[0].token_ids)  # type: ignore[attr-defined]
    tokens: list[int] = []
    finish = None
    async for event in await api.completions.create(**_arguments(case), stream=True):
        for choice in event.choices:
            tokens += choice.token_ids or ()  # type: ignore[attr-defined]
            finish = choice.finish_reason or finish
    assert finish == "length", f"{case.name}: the stream ended with finish_reason {finish} after {len(tokens)} tokens"
    return tuple(tokens)


async def plain_answers(url: str, cases: Sequence[Case], at_once: int = 8,
                        timeout_s: float = READY_DEADLINE_S) -> References:
    """What one plain engine answers, with the gap between its two best tokens at each position.

    The first log probabilities have an engine compile a function, for which it may take as long as for its start.
    """
    limit = asyncio.Semaphore(at_once)

    async def one(api: openai.AsyncOpenAI, case: Case) -> tuple[Case, Reference]:
        arguments = _arguments(case)
        arguments["extra_body"] |= {"return_tokens_as_token_ids": True}
        async with limit:
            choice = (await api.completions.create(**arguments, logprobs=2)).choices[0]
        gaps = []
        for best in choice.logprobs.top_logprobs:  # type: ignore[union-attr]
            first, second = sorted(best.values(), reverse=True)[:2]
            gaps.append(first - second)
        return case, Reference(tuple(choice.token_ids), tuple(gaps))  # type: ignore[attr-defined]

    async with client(url, timeout_s) as api:
        return dict(await asyncio.gather(*(one(api, case) for case in dict.fromkeys(cases))))


async def send(url: str, cases: Sequence[Case], references: References, *, at_once: int) -> Report:
    """Send every case once, every second one streaming."""
    report, limit = Report(), asyncio.Semaphore(at_once)

    async def one(api: openai.AsyncOpenAI, number: int, case: Case) -> None:
        async with limit:
            await _judged(api, case, references, report, stream=number % 2 == 0)

    async with client(url) as api:
        await asyncio.gather(*(one(api, number, case) for number, case in enumerate(cases)))
    return report


async def _judged(api: openai.AsyncOpenAI, case: Case, references: References, report: Report, *, stream: bool) -> None:
    try:
        tokens = await ask(api, case, stream=stream)
    except (openai.OpenAIError, OSError, AssertionError) as error:
        report.failed.append(f"{case.name} (stream={stream}): {type(error).__name__}: {error}")
    else:
        report.add(case, references[case], tokens)


class Steady:
    """A load that goes on: ``at_once`` requests together, and again ``pause_s`` after they ended.

    In rounds, because a vLLM worker polls at full speed for a second after each of its steps: a few evenly spread requests
    would take both cores of a small machine from the engines that start.
    """

    def __init__(self, url: str, cases: Sequence[Case], references: References, *, at_once: int = 4,
                 pause_s: float = 2.5, timeout_s: float = HTTP_TIMEOUT_S) -> None:
        self.report = Report()
        self._timeout_s = timeout_s
        self._url = url
        self._cases = itertools.cycle(cases)
        self._references = references
        self._at_once = at_once
        self._pause_s = pause_s
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        assert self._task is not None
        self._stop.set()
        await asyncio.wait_for(self._task, 1.5 * self._timeout_s)

    async def wait_total(self, least: int, deadline_s: float = 240.0) -> None:
        """Until so many requests have ended."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while self.report.total < least:
            assert loop.time() < end, f"{self.report.total} of {least} requests ended within {deadline_s} s"
            await asyncio.sleep(0.05)

    async def _work(self) -> None:
        async with client(self._url, self._timeout_s) as api:
            while not self._stop.is_set():
                await asyncio.gather(*(
                    _judged(api, next(self._cases), self._references, self.report, stream=number % 2 == 0)
                    for number in range(self._at_once)))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), self._pause_s)
