"""What an instance can do, learned from what it did.

Prefill: tokens per second that an instance computes while it works. Sums of both decay, so that full instances count more
than those that are mostly idle, and a change of traffic is followed within some ten minutes. Of the tokens of prompts a
share h is in prefix caches and takes no time, so an instance reads 1 / (1 - h) times what it computes. What it computes is
the engine's; h is the traffic's, and hangs on the room in all caches together, so it is followed within minutes. Fewer
instances have less room: k of n are expected to have the share h k / n, and less where more is asked for than now. That is
so where conversations fill the caches. Where fewer would do (a beginning that all prompts share), it is seen when one has
gone, and then the next one goes.

Decode: a step takes a + b n with n requests in the batch (weights are read once, KV once per request). Decaying sums
give the line of least squares, with the guess that a is half of what is seen as evidence of a fixed weight (ridge
regression): the less the batches differ, the more the guess counts, and no figure makes the line jump. A step gives m
tokens of each request, 1 without speculation: TPOT is (a + b n) / m. The line is the engine's, m is the traffic's: so the
line outlasts a change of what drafts are worth, and m is followed as fast as lengths are.

Link: bytes a second of one instance, of prefill's or of decode's, whichever are fewer, as seen while KV waited for it. It
waits for the link where requests wait at decode, their hand-over takes long, and there is room for KV; else it waits for
room. What a token weighs is what came in over what prefill read, so tokens that decode has cached count for nothing.
"""

from __future__ import annotations

import math

import msgspec

from xpyd_operator.plan.planner.figures import Figures

HALF_LIFE_S = 600.0
NO_ROOM_S = 1.0
"""A hand-over that takes so long waits for room at decode."""
PRIOR = 0.02
"""What the guess is worth that half of a step is for the batch: as much as batches of this squared relative spread."""
SLOW = 0.1
"""By which a link is forgotten more slowly than the rest."""
ROOMY = 0.8
"""With a smaller share of KV in use there is room for more."""
MOST_CACHED = 0.98
"""With more than that what is computed is no measurement."""
FEWEST = 1e-6
"""A batch that is smaller is no measurement."""


class Capacity(msgspec.Struct, frozen=True):
    """What instances can do, learned as sums of figures that decay with time."""

    tokens: float = 0.0
    computed: float = 0.0
    """Of ``tokens``: what was in no prefix cache."""
    cached: float = 0.0
    read: float = 0.0
    """Tokens that prefix caches had, of those that prefill read within ``span_s``, lately."""
    span_s: float = 0.0
    instances: int = 0
    """Prefill instances whose caches these are."""
    busy_s: float = 0.0
    prompts: float = 0.0
    squares: float = 0.0
    outputs: float = 0.0
    steps: float = 0.0
    """Steps of a request that gave them."""
    ended: float = 0.0
    weight: float = 0.0
    n: float = 0.0
    nn: float = 0.0
    t: float = 0.0
    nt: float = 0.0
    full: float = 0.0
    """Requests per decode instance with which there was no room for more, lately; 0: that was not seen."""
    kv: float = 0.0
    """Share of KV that one running request takes, lately."""
    received: float = 0.0
    """Bytes of KV that came into decode, of ``tokens``."""
    link: float = 0.0
    """Bytes a second of one instance with which its link was used up, lately; 0: that was not seen."""
    link_waits: bool = False
    """KV waited for the link in the last interval."""

    def with_interval(self, figures: Figures, done: float) -> Capacity:
        """What is known after one more interval, in which prefill instances read ``done`` tokens."""
        keep = 0.5 ** (figures.over_s / HALF_LIFE_S)
        quick = keep**4  # lengths change faster than engines do
        decode = figures.decode
        batch = decode.batch
        step_s = figures.tpot_mean * figures.tokens_per_step
        use = figures.output_tokens if batch > 0 and figures.tpot_mean > 0 else 0.0
        taken = decode.kv_usage / batch if batch >= 1 else 0.0
        full = self.full / quick  # forgotten by and by: what filled an instance may have been longer
        worked = done if figures.prefill.busy > 0 else 0.0
        late = figures.handover_s > NO_ROOM_S
        comes = late and figures.link_bytes > 0 and decode.kv_usage < ROOMY
        link_waits = comes and figures.parked > 0
        if late and not comes and batch >= 1:
            full = max(batch, 0.5 * self.full)
        carried = figures.link_bytes / figures.over_s / max(1, min(figures.prefill.ready, decode.ready))
        if link_waits:
            link = max(carried, 0.5 * self.link)
        elif self.link:  # a link is what it is: it is forgotten slowly, and what it carries it can carry
            link = max(self.link / keep**SLOW, carried)
        else:
            link = 0.0
        return Capacity(
            tokens=keep * self.tokens + worked,
            computed=keep * self.computed + worked * (1 - figures.cached_share),
            cached=quick * self.cached + worked * figures.cached_share,
            read=quick * self.read + worked,
            span_s=quick * self.span_s + figures.over_s,
            instances=figures.prefill.ready,
            busy_s=keep * self.busy_s + figures.prefill.busy * figures.over_s,
            prompts=quick * self.prompts + figures.prompt_tokens,
            squares=quick * self.squares + figures.prompt_squares,
            outputs=quick * self.outputs + figures.output_tokens,
            steps=quick * self.steps + figures.output_tokens / figures.tokens_per_step,
            ended=quick * self.ended + figures.ended,
            weight=keep * self.weight + use,
            n=keep * self.n + use * batch,
            nn=keep * self.nn + use * batch * batch,
            t=keep * self.t + use * step_s,
            nt=keep * self.nt + use * batch * step_s,
            full=full,
            received=keep * self.received + figures.link_bytes,
            link=link,
            link_waits=link_waits,
            kv=quick * self.kv + (1 - quick) * taken if self.kv and taken else taken or self.kv,
        )

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second that a present instance reads while it works, cached ones included; 0: not known."""
        return self.rate_of(self.instances, 0.0)

    def rate_of(self, count: int, demand: float) -> float:
        """The same of each of ``count`` instances that are asked for ``demand`` tokens a second; 0: not known.

        Of fewer than the present ones less is cached, as there is less room for what is asked.
        """
        if self.busy_s <= 0:
            return 0.0
        room = 1.0
        if count < self.instances and self.read > 0:
            room = count / self.instances * self.read / max(self.read * FEWEST, demand * self.span_s)
        return self.computed / self.busy_s / (1 - self.cached_share * min(1.0, room))

    @property
    def cached_share(self) -> float:
        """Of the tokens of prompts, those that prefix caches of prefill have lately, 0 to ``MOST_CACHED``."""
        return min(MOST_CACHED, self.cached / self.read) if self.read > 0 else 0.0

    @property
    def token_bytes(self) -> float:
        """What a prompt token brings over the link; 0: not known."""
        return self.received / self.tokens if self.tokens > 0 else 0.0

    @property
    def prompt(self) -> float:
        """Mean prompt length; 0: not known."""
        return self.prompts / self.ended if self.ended else 0.0

    @property
    def output(self) -> float:
        """Mean answer length."""
        return self.outputs / self.ended if self.ended else 0.0

    @property
    def per_step(self) -> float:
        """Tokens of one request that a decode step gives, lately."""
        return self.outputs / self.steps if self.steps > 0 else 1.0

    @property
    def spread(self) -> float:
        """Squared coefficient of variation of prompt lengths."""
        mean = self.prompt
        return max(0.0, self.squares / self.ended / mean / mean - 1) if mean else 1.0

    @property
    def line(self) -> tuple[float, float]:
        """A and b of a decode step, seconds; zeros: not known."""
        n, t = (self.n / self.weight, self.t / self.weight) if self.weight > 0 else (0.0, 0.0)
        if n < FEWEST:
            return 0.0, 0.0
        varied = self.nn / self.weight - n * n
        guess = PRIOR * n * n
        slope = (self.nt / self.weight - n * t + guess * 0.5 * t / n) / (max(0.0, varied) + guess)
        slope = min(t / n, max(0.1 * t / n, slope))
        return t - slope * n, slope

    def batch(self, tpot_s: float | None, kv_share: float = 0.9) -> float:
        """Requests of one decode instance with which a token takes ``tpot_s`` and KV has room; 0: not known."""
        base, slope = self.line
        if slope <= 0:
            return 0.0
        seen = self.n / self.weight
        most = (tpot_s * self.per_step - base) / slope if tpot_s is not None else math.inf
        if self.kv > 0:
            most = min(most, kv_share / self.kv)
        if self.full > 0:
            most = min(most, self.full)
        # Beyond twice what was ever typical the line is a guess.
        return max(1.0, min(most, 4.0 * seen + 8.0))

    def token(self, batch: float) -> float:
        """Seconds that a request waits for a token, on average, with so many of them in the batch."""
        base, slope = self.line
        return (base + slope * batch) / self.per_step
