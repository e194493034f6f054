"""Looks at one engine: health, engine records, load, model. Every look ends within its time-outs. Where members of an
instance have servers of their own, all of them are looked at: the engine is as well as the worst of them.

Belongs here: HTTP to the engine and reading its files. What follows from a look is ``beat``'s.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import aiohttp
import msgspec

from xpyd_sidecar.agent import intake, ranks
from xpyd_sidecar.agent.beat import ProbeResult, merge_notes
from xpyd_sidecar.agent.held_prefix_files import HeldPrefixFiles
from xpyd_sidecar.contract import adapters, core_steps, metrics, pair_notes, record
from xpyd_sidecar.contract.adapters import AdapterState
from xpyd_sidecar.contract.core_steps import CoreSteps, PromptWork
from xpyd_sidecar.contract.group import MOST_MEMBERS, MemberRanks
from xpyd_sidecar.contract.held_prefixes import HeldPrefixes
from xpyd_sidecar.contract.ids import HostPort, Incarnation
from xpyd_sidecar.contract.launch import AgentConfig
from xpyd_sidecar.contract.membership import MAX_ALSO, Drafts, Load
from xpyd_sidecar.contract.pair_notes import PairNotes
from xpyd_sidecar.contract.record import EngineRecord
from xpyd_sidecar.process import resources
from xpyd_sidecar.process.whole_answer import AnswerTooLong, read_whole

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 3.0
SCRAPE_TIMEOUT_S = 3.0
ANSWER_LIMIT = 8 << 20
"""Bytes of an answer that are read; vLLM's /metrics is about 0.1 MB."""

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
GENERATED = "vllm:generation_tokens_total"
_SERIES = (RUNNING, WAITING, KV_USAGE, metrics.SENDS_OPEN, metrics.RECEIVES_OPEN, DRAFTED, ACCEPTED, GENERATED)
_SAMPLE = re.compile(rb"^(" + b"|".join(map(re.escape, (name.encode() for name in _SERIES))) + rb")(?:\{.*\})? (\S+)",
                     re.MULTILINE)


AnswerT = TypeVar("AnswerT")


class BadAnswer(Exception):
    """The engine answered with something that cannot be used; the message says what."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None
    """Of an adapter: its model."""


class _Models(msgspec.Struct):
    data: list[_Model]


def parse_load(text: bytes) -> Load:
    """The few series of a Prometheus text that make up the load; those of several engines are added (usage: averaged).

    Raises:
        BadAnswer: vLLM's own series are missing, or a value is no number.
    """
    values: dict[str, list[float]] = {name: [] for name in _SERIES}
    for name, value in _SAMPLE.findall(text):
        try:
            number = float(value)
        except ValueError:
            raise BadAnswer(f"/metrics: {name.decode()} is {value.decode(errors='replace')!r}, not a number") from None
        if math.isfinite(number):
            values[name.decode()].append(number)
    if missing := [name for name in (RUNNING, WAITING) if not values[name]]:
        raise BadAnswer(f"/metrics has no {' and no '.join(missing)}: is it a vLLM engine?")
    usage = values[KV_USAGE]
    return Load(
        running=round(sum(values[RUNNING])),
        waiting=round(sum(values[WAITING])),
        kv_usage=sum(usage) / len(usage) if usage else 0.0,
        transfers=round(sum(values[metrics.SENDS_OPEN]) + sum(values[metrics.RECEIVES_OPEN])),
        drafts=Drafts(*(round(sum(values[name])) for name in (DRAFTED, ACCEPTED, GENERATED))) if values[DRAFTED] else None,
        intake=intake.parse(text),
    )


def load_of(texts: Sequence[bytes]) -> Load:
    """The load of an engine of several servers, each of which must have said its own. Raises as ``parse_load`` does."""
    loads = [parse_load(text) for text in texts]
    return loads[0] if len(loads) == 1 else parse_load(b"\n".join(texts))


class ServedModels(NamedTuple):
    """What an engine answers to."""

    model: str
    max_model_len: int
    """Tokens of context; 0: unknown."""
    also: tuple[str, ...] = ()
    """Its other names, sorted: LoRA adapters that it began with, further served names."""
    adapters: AdapterState | None = None
    """What its API server tells of adapters; None: nothing."""
    begun_with: frozenset[str] = frozenset()
    """Those of ``also`` that are adapters."""

    def with_adapters(self, state: AdapterState | None) -> ServedModels:
        """The same where the API server tells its adapters: those that it tells are there, no others."""
        if state is None:
            return self
        names = sorted({*self.also} - self.begun_with | {*state.loaded})
        return self._replace(also=tuple(names[:MAX_ALSO]), adapters=state)


def choose_model(answer: bytes, wanted: str) -> ServedModels:
    """What ``/v1/models`` says. ``wanted`` empty: the first it lists.

    Raises:
        BadAnswer: no such list, ``wanted`` is not in it, or it has more names than a beat may.
    """
    try:
        models = msgspec.json.decode(answer, type=_Models).data
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadAnswer(f"/v1/models: {error}") from None
    for model in models:
        if wanted in {"", model.id}:
            also = tuple(sorted({other.id for other in models} - {model.id}))
            if len(also) > MAX_ALSO:
                raise BadAnswer(f"/v1/models: {len(also)} names besides {model.id!r}, more than {MAX_ALSO}")
            lora = frozenset(other.id for other in models if other.parent is not None)
            return ServedModels(model.id, model.max_model_len or 0, also, begun_with=lora)
    raise BadAnswer(f"/v1/models: the engine serves {[model.id for model in models]}, not {wanted!r}")


class Probe:
    """Looks at one engine, over a session of its own."""

    def __init__(self, config: AgentConfig, run_dir: Path) -> None:
        self._config = config
        self._run_dir = run_dir
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=4 * MOST_MEMBERS))
        self._known: tuple[Incarnation, ServedModels] | None = None
        self._notes: dict[int, PairNotes] = {}
        """What was read last, by rank."""
        self._held = HeldPrefixFiles(run_dir)
        self._has: AdapterState | None = None
        self._unread = ""

    async def close(self) -> None:
        """Close the connections to the engine."""
        await self._session.close()

    async def probe(self, *, scrape: bool, others: Sequence[MemberRanks] = ()) -> ProbeResult:
        """One look; ``scrape``: the load too; ``others``: ranks of other members. Never raises for what an engine does or
        does not do.
        """
        try:
            found = await self._look(scrape=scrape, others=others)
        except resources.Lack as lack:
            return ProbeResult("unmade", str(lack))
        if not found.records:
            return found
        incarnation = found.records[0].incarnation
        core, prompts = self._steps(incarnation)
        recent = () if found.adapters is None else found.adapters.recent
        load = None if found.load is None else msgspec.structs.replace(found.load, prompts=prompts, adapters=recent)
        found = msgspec.structs.replace(found, pairs=self._pairs(incarnation), core=core, load=load)
        if not others:
            return found
        doors = (self._config.advertised_address,) * len(ranks.own(self._config))
        return msgspec.structs.replace(found, doors=doors + tuple(one.door for one in others for _ in one.control))

    async def _look(self, *, scrape: bool, others: Sequence[MemberRanks]) -> ProbeResult:
        doors = (self._config.engine, *(one.door for one in others))
        before, problem = self._records(others)
        for health, why in sorted(await _all([self._health(door) for door in doors])):
            if health != "up":
                return ProbeResult(health, why, before)
        records, problem = self._records(others)
        if problem or records != before:
            return ProbeResult("up", problem or "the engine record changed during the look", records)
        load, served = None, ServedModels(self._config.model, 0)
        try:
            if records:
                served = (await self._served(records[0])).with_adapters(self._adapters())
            if scrape:
                texts = await _all([self._read("/metrics", SCRAPE_TIMEOUT_S, door) for door in doors])
                load = load_of(texts)
        except TimeoutError:
            return ProbeResult("slow", "GET /metrics or /v1/models took too long", records, answered=True)
        except (aiohttp.ClientError, OSError) as error:
            resources.refuse_lack(error)
            return ProbeResult("slow", f"GET /metrics or /v1/models: {_why(error)}", records, answered=True)
        except BadAnswer as error:
            problem = str(error)
        return ProbeResult("up", problem, records, load, served.model, served.max_model_len, served.also, served.adapters)

    async def _health(self, door: HostPort) -> tuple[Literal["down", "slow", "up"], str]:
        """Of one server, and why it is not up; of several the worst comes first when sorted."""
        what = "GET /health" if door == self._config.engine else f"GET /health of {door}"
        try:
            status, _ = await self._get("/health", HEALTH_TIMEOUT_S, door)
        except TimeoutError:
            return "slow", f"{what} took longer than {HEALTH_TIMEOUT_S:g} s"
        except (aiohttp.ClientError, OSError, BadAnswer) as error:
            if resources.is_own_lack(error):  # nobody was asked
                return "slow", f"{what}: {_why(error)}"
            resources.refuse_lack(error)
            return "down", f"{what}: {_why(error)}"
        return ("down", f"{what}: status {status}") if status >= 400 else ("up", "")

    def _pairs(self, incarnation: Incarnation) -> PairNotes:
        """What ranks beside this agent have found of their peers, as far as it can be read; else as it was read last."""
        for rank in ranks.own(self._config):
            try:
                self._notes[rank] = pair_notes.read(self._run_dir, rank) or PairNotes(incarnation)
            except (OSError, ValueError) as error:
                if str(error) != self._unread:
                    logger.warning("what the engine has found of its peers cannot be read: %s", error)
                self._unread = str(error)
        return merge_notes([self._notes[rank] for rank in sorted(self._notes)], incarnation)

    def _adapters(self) -> AdapterState | None:
        """What the API server beside this agent tells, as far as it can be read; else what it told last."""
        try:
            self._has = adapters.read_state(self._run_dir)
        except (OSError, ValueError) as error:
            if str(error) != self._unread:
                logger.warning("what the engine tells of adapters cannot be read: %s", error)
            self._unread = str(error)
        return self._has

    def _steps(self, incarnation: Incarnation) -> tuple[CoreSteps | None, PromptWork | None]:
        """How far its cores have got, and what they have of prompts; None where not all of them say so, or what they say
        cannot be read.
        """
        if len(own := ranks.own(self._config)) < self._config.data_parallel:
            return None, None  # nobody tells those of other members
        try:
            read = [core_steps.read(self._run_dir, rank) for rank in own]
        except (OSError, ValueError) as error:
            logger.debug("the steps of the engine's core cannot be read: %s", error)
            return None, None
        found = [one for one in read if one is not None]
        return (core_steps.sum_steps(found, incarnation, len(own)),
                core_steps.sum_prompts(found, incarnation, len(own)))

    def prefixes(self, incarnation: Incarnation) -> HeldPrefixes | None:
        """What is in the caches of its ranks; None where not all of them say so, or what they say cannot be read."""
        if len(own := ranks.own(self._config)) < self._config.data_parallel:
            return None  # nobody tells those of other members
        try:
            return self._held.read(own, incarnation)
        except (OSError, ValueError) as error:
            logger.debug("the prefixes in the engine's cache cannot be read: %s", error)
            return None

    def _records(self, others: Sequence[MemberRanks]) -> tuple[tuple[EngineRecord, ...], str]:
        try:
            mine = {rank: record.read(self._run_dir, rank) for rank in ranks.own(self._config)}
        except (ValueError, OSError) as error:
            resources.refuse_lack(error)
            return (), f"engine record: {error}"
        known = mine | {one.dp_rank: one for said in others for one in ranks.records_of(said)}
        found = [known.get(rank) for rank in range(self._config.data_parallel)]
        whole = tuple(one for one in found if one is not None)
        if 0 < len(whole) < len(found):
            missing = [rank for rank, one in enumerate(found) if one is None]
            where = f"in {self._run_dir}" if any(rank in mine for rank in missing) else "from the other members"
            return (), f"no engine record of DP ranks {missing} {where} yet"
        if whole and (newer := [one.v for one in whole if one.v != record.VERSION]):
            return (), f"engine record of version {newer[0]}, this agent reads {record.VERSION}"
        return whole, ""

    async def _served(self, first: EngineRecord) -> ServedModels:
        if self._known is None or self._known[0] != first.incarnation:
            try:
                served = choose_model(await self._read("/v1/models", SCRAPE_TIMEOUT_S), self._config.model)
            except _Locked:
                if not self._config.model:
                    raise BadAnswer("/v1/models asks for an API key: set `$.agent.model`") from None
                served = ServedModels(self._config.model, 0)
            self._known = (first.incarnation, served._replace(max_model_len=first.max_model_len or served.max_model_len))
        return self._known[1]

    async def _read(self, path: str, timeout_s: float, door: HostPort | None = None) -> bytes:
        status, body = await self._get(path, timeout_s, door or self._config.engine)
        if status in {401, 403}:
            raise _Locked(f"{path}: status {status}")
        if status >= 400:
            raise BadAnswer(f"{path}: status {status}")
        return body

    async def _get(self, path: str, timeout_s: float, door: HostPort) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.get(f"http://{door}{path}", timeout=timeout, allow_redirects=False) as answer:
            try:
                return answer.status, await read_whole(answer.content, ANSWER_LIMIT)
            except AnswerTooLong as error:
                raise BadAnswer(f"{path}: {error}") from None


async def _all(works: Sequence[Coroutine[Any, Any, AnswerT]]) -> list[AnswerT]:
    """The answers of all; raises what the first of them raised, once all are over."""
    done = await asyncio.gather(*works, return_exceptions=True)
    for one in done:
        if isinstance(one, BaseException):
            raise one
    return [one for one in done if not isinstance(one, BaseException)]


class _Locked(BadAnswer):
    """It asks for an API key."""


def _why(error: BaseException) -> str:
    return str(error) or type(error).__name__


