"""A prefill and a decode engine of a model with several KV cache groups, and what one engine alone says.

    for pair in started(ModelPair(folder, "tiny-gemma-3")):     a fixture's body
        pair.compare(prompt)                                     → Compared: equal, how far apart log probabilities are

Prefill is the engine to compare with, too: what it is asked without a transfer it computes with the last token of the
prompt in a step of its own (``last_token_alone``), which is where a hand-over cuts it. So sums are made in the same parts,
and answers must be equal in every bit, also in bfloat16. One request at a time for that; where several run at once sums
differ in their last bits.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from engine_pair import Pair, new, wait_until
from engines import Engine
from model_variants import ensure

from xpyd_sidecar.contract import legs, metrics
from xpyd_sidecar.contract.ids import Attempt, Role, TransferId, join_host_port
from xpyd_sidecar.contract.launch import KvOptions
from xpyd_sidecar.router.api import audited

PLUGIN = Path(__file__).parent / "last_token_alone"
PATIENCE_S: Final = 180.0
"""Of the first request of an engine, for which kernels are made."""
BLOCK = 128


class Facts(NamedTuple):
    """Of a model: the tokens that a window sees, 0 without windows, and what its engines are started with."""

    window: int
    args: tuple[str, ...]
    most_apart: float = 0.0
    """Of log probabilities. Sums over experts are not always made in one order, not even by one engine."""


NO_PREFIXES = "--no-enable-prefix-caching"
"""With them Mamba2 fails in vLLM for CPUs itself."""
FACTS: Final = {
    "tiny-gemma-3": Facts(200, ("--max-num-batched-tokens", "512")),
    "tiny-gpt-oss": Facts(128, ("--max-num-batched-tokens", "512"), 1e-4),
    "tiny-granite": Facts(0, ("--max-num-batched-tokens", "512", NO_PREFIXES)),
    "tiny-qwen-next": Facts(0, ("--max-num-batched-tokens", "1024", NO_PREFIXES, "--dtype", "bfloat16")),
}


class Answer(NamedTuple):
    """Tokens, and their log probabilities."""

    tokens: list[int]
    logprobs: list[float]


class Compared(NamedTuple):
    """Of two answers: the first token that differs, or None, and how far log probabilities before it are apart."""

    at: int | None
    apart: float


class ModelPair(Pair):
    """Both engines; ``wire``, ``p`` and ``d`` as ``Pair`` has them."""

    def __init__(self, folder: Path, model: str, *, policy: Literal["recompute", "fail"] = "recompute",
                 d_args: Sequence[str] = (), wired: bool = False, **options: Any) -> None:
        """``wired``: prefill's KV goes through ``wire``, with checksums where decode wants them."""
        super().__init__(folder, policy=policy)
        self.answer_s = PATIENCE_S
        self.model = model
        facts = FACTS[model]
        path = os.pathsep.join(filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH"))))
        common: dict[str, Any] = {"peer_timeout_s": 10.0, "load_timeout_s": 20.0, **options}
        through = {"transport": "tcp", "checksum": "disabled", "data_port": self.data_port,
                   "advertise_data": join_host_port("127.0.0.1", self.wire.port)} if wired else {}
        made: dict[str, Any] = {"model": ensure(model), "env": {"PYTHONPATH": path}}
        self.p = Engine("p", folder, args=facts.args, options=KvOptions(**common | through), **made)
        self._decode = partial(Engine, folder=folder, args=(*facts.args, *d_args), **made)
        self._options = common
        self.d = self._decode("d", on_load_failure=policy, options=KvOptions(**common))

    def other(self, name: str, *, policy: Literal["recompute", "fail"] = "recompute", **options: Any) -> ModelPair:
        """The same prefill with one more decode engine; start it, and end it."""
        other = copy.copy(self)
        other.d = self._decode(name, on_load_failure=policy, options=KvOptions(**self._options | options))
        return other

    def handed(self, prompt: list[int], n: int = 12, *, decode_first: bool = False) -> Answer:
        """Decode's answer, with KV from prefill."""
        transfer = new()
        leg = legs.encode(legs.Leg(legs.VERSION, Role.DECODE, TransferId(transfer), Attempt(1), PATIENCE_S))
        if not decode_first:
            self.p_leg(prompt, transfer).result(PATIENCE_S)
        decode = self.pool.submit(answer, self.d, prompt, n, kv_transfer_params=leg)
        if decode_first:
            wait_until(lambda: decode.done() or self.d.metric(metrics.RECEIVES_OPEN) > 0, PATIENCE_S, "parked")
            self.p_leg(prompt, transfer).result(PATIENCE_S)
        return decode.result(PATIENCE_S)

    def first(self, prompt: list[int], *, handed: bool) -> audited.TokenProbabilities:
        """What decode says of the first token, with KV from prefill or by itself."""
        transfer, more = new(), dict[str, Any](cache_salt=new())  # so that it finds nothing in its cache
        if handed:
            leg = legs.Leg(legs.VERSION, Role.DECODE, TransferId(transfer), Attempt(1), PATIENCE_S)
            more = {legs.FIELD: legs.encode(leg)}
            self.p_leg(prompt, transfer).result(PATIENCE_S)
        choice = self.d.complete(prompt, 1, timeout_s=PATIENCE_S, **more, **audited.SHOWN["completions"])
        found = audited.odds_of(json.dumps({"choices": [choice]}).encode())
        assert found is not None
        return found

    def alone(self, prompt: list[int], n: int = 12) -> Answer:
        """What one engine says."""
        return answer(self.p, prompt, n)

    def compare(self, prompt: list[int], **how: Any) -> Compared:
        """A hand-over with one engine."""
        return self.compared(self.handed(prompt, **how), prompt)

    def same(self, found: Compared) -> bool:
        """Whether two answers are one engine's."""
        return found.at is None and found.apart <= FACTS[self.model].most_apart

    def compared(self, got: Answer, prompt: list[int]) -> Compared:
        """An answer with one engine's."""
        return compared(got, self.alone(prompt, len(got.tokens)))


def answer(engine: Engine, prompt: list[int], n: int, **more: Any) -> Answer:
    """A greedy answer."""
    choice = engine.complete(prompt, n, timeout_s=PATIENCE_S, logprobs=1, **more)
    return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])


def compared(one: Answer, other: Answer) -> Compared:
    """See ``Compared``."""
    at = next((at for at, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b), None)
    pairs = list(zip(one.logprobs, other.logprobs, strict=True))[:at]
    return Compared(at, max((abs(a - b) for a, b in pairs), default=0.0))


def prompt_of(length: int, seed: int = 10000) -> list[int]:
    """Token ids that no other prompt begins with."""
    draw = random.Random(length + seed)
    return [draw.randrange(2, 500) for _ in range(length)]
