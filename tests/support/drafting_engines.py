"""Real engines of one small model that draft in their own ways; every pair of them hands over.

    with Drafting(folder) as made:
        made.run(made.e, made.f, prompts, 32)     → decode's tokens, and what it drafted
        made.run(made.e, made.e, prompts, 32)     the same of one engine alone, without a hand-over

    with Drafting(folder, {"none": ()}, model=MTP) as made:
        made.ready("none")                        → a list; each is started when it is first asked for

A pair is a case of the rule: e → f the same draft on both, e → n decode by tokens alone, n → f decode drafts alone.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from draft_models import TARGET, by_tokens, ensure, speculating
from engines import Engine

from xpyd_sidecar.agent import engine as agent_engine
from xpyd_sidecar.contract import keys, legs, metrics
from xpyd_sidecar.contract.ids import Attempt, InstanceName, Role, TransferId
from xpyd_sidecar.contract.launch import KvOptions

ARGS = ("--max-num-batched-tokens", "512", "--num-gpu-blocks-override", "64")
PATIENCE_S = 60.0


class Drafted(NamedTuple):
    """Of some requests."""

    choices: list[dict[str, Any]]
    """Each one's answer, as the API gives it."""
    accepted: float
    """Drafts that were accepted, by token that was given out."""
    drafted: int
    loaded: int
    """Bytes of KV."""

    @property
    def tokens(self) -> list[list[int]]:
        """Each one's answer."""
        return [list(choice["token_ids"]) for choice in self.choices]


class Drafting:
    """The engines."""

    def __init__(self, folder: Path, how: Mapping[str, Sequence[str]] | None = None, *, model: Path | None = None,
                 env: Mapping[str, str] | None = None) -> None:
        """``how``: arguments by name; None: two with an EAGLE model (e, f), one with n-grams (n), all started at once."""
        key, options = folder / "key", KvOptions(transport="tcp", peer_timeout_s=PATIENCE_S, load_timeout_s=PATIENCE_S,
                                                 claim_s=PATIENCE_S)
        keys.write(key, keys.mint())
        given = how if how is not None else {"e": speculating(), "f": speculating(), "n": by_tokens()}
        self._at_once = how is None
        self.by_name = {name: Engine(name.replace(" ", "-"), folder, key_file=key, model=model or ensure(TARGET),
                                     options=options, args=(*ARGS, *more), on_load_failure="fail", env=env)
                        for name, more in given.items()}
        self.engines = list(self.by_name.values())

    @property
    def e(self) -> Engine:
        """One that drafts with the EAGLE model."""
        return self.by_name["e"]

    @property
    def f(self) -> Engine:
        """Another one."""
        return self.by_name["f"]

    @property
    def n(self) -> Engine:
        """One that drafts with n-grams."""
        return self.by_name["n"]

    def ready(self, *names: str) -> list[Engine]:
        """Those of these names, started and ready."""
        asked = [self.by_name[name] for name in names]
        for engine in asked:
            if not engine.alive():
                engine.start()
        return [engine.wait_ready() for engine in asked]

    def __enter__(self) -> Self:
        if self._at_once:
            self.ready(*self.by_name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for engine in self.engines:
            engine.kill()

    def run(self, p: Engine, d: Engine, prompts: Sequence[list[int]], n: int, at_once: int = 1, **more: Any) -> Drafted:
        """Hand prompts over from ``p`` to ``d``; where both are one engine, it answers alone. ``more``: fields for it."""
        before = self._counted(d)
        with ThreadPoolExecutor(2 * at_once) as pool:
            choices = list(pool.map(lambda prompt: self._one(p, d, prompt, n, more), prompts)) if at_once > 1 else [
                self._one(p, d, prompt, n, more) for prompt in prompts]
        d.group.wait_until(lambda: self._counted(d)[2] - before[2] >= n * len(prompts), 120.0, "through with its last step")
        drafted, accepted, generated, loaded = (now - then for now, then in zip(self._counted(d), before, strict=True))
        assert generated == n * len(prompts)
        return Drafted(choices, accepted / generated, drafted, loaded)

    def _counted(self, engine: Engine) -> tuple[int, ...]:
        """By the names that the agent reads."""
        names = (agent_engine.DRAFTED, agent_engine.ACCEPTED, agent_engine.GENERATED, f"{metrics.LOADED_BYTES}_total")
        return tuple(int(engine.metric(name)) for name in names)

    def _one(self, p: Engine, d: Engine, prompt: list[int], n: int, more: Mapping[str, Any]) -> dict[str, Any]:
        if p is d:
            return d.complete(prompt, n, timeout_s=PATIENCE_S, **more)
        known = d.record()
        assert known is not None
        transfer = TransferId(uuid.uuid4().hex)
        peer = legs.Peer(InstanceName(d.name), known.incarnation, known.control)
        ours = legs.Leg(legs.VERSION, Role.DECODE, transfer, Attempt(1), PATIENCE_S / 2)
        theirs = legs.Leg(legs.VERSION, Role.PREFILL, transfer, Attempt(1), PATIENCE_S / 2, peer)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(d.complete, prompt, n, timeout_s=PATIENCE_S, kv_transfer_params=legs.encode(ours), **more)
            p.complete(prompt, 1, timeout_s=PATIENCE_S, kv_transfer_params=legs.encode(theirs))
            return answer.result(PATIENCE_S)
