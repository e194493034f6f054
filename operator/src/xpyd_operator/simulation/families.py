"""Families of traffic, each with a seed: loads that stay, swing, rise, jump, pause, and change their lengths.

    flat       Poisson arrivals with heavy-tailed prompts
    agents     sessions whose prompts grow turn by turn; each begins with the one before it, which is told by hashes
    diurnal    from low to high and back, as a cosine; ``period``
    sinusoid   lengths that swing against each other, from prefill-heavy to decode-heavy and back; ``period``
    onoff      bursts and pauses of exponential lengths, ``period`` for both on average
    square     low, then high, for ever; ``share`` of ``period`` is high. Period (1 to 40 minutes, evenly by logarithm) and
               phase are drawn where they are not given
    ramp       up over half of the time, then down at once
    step       up at once at half of the time, and stays
    mix        from long prompts and short answers to the reverse, at half of the time
    quiet      days and nights: for ``share`` of ``period`` hardly anything comes
    spike      three minutes to ``times`` the load, at ``phase`` of the time

A family is written ``NAME`` or ``NAME:key=value,…`` with the fields of ``Shape``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import count

import msgspec

from xpyd_operator.api.durations import seconds
from xpyd_operator.errors import XpydError
from xpyd_operator.simulation.chance import Chance
from xpyd_operator.simulation.prefix import BLOCK
from xpyd_operator.simulation.trace import MOST, Arrival, Draw, Trace

SPIKE_S = 180.0
NIGHT = 0.04
"""What comes at night of what comes by day."""
SHORTEST_S, LONGEST_S = 60.0, 2400.0
"""Periods of square waves that are drawn."""
LONGEST_PROMPT, MOST_OUTPUT = 120_000, 4.0
"""Tokens; times the mean."""
SYSTEM_BLOCKS = 2
"""Of all sessions of agents: the same beginning."""
THINK_S = 12.0
TURNS = 12
"""On average."""
Rate = Callable[[float], float]


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a family is made of; ``rate`` and ``times`` are the low level and how often that the high one is."""

    hours: float = 2.0
    rate: float = 3.0
    """Requests a second."""
    times: float = 3.0
    period: float | None = None
    """Seconds."""
    share: float = 0.5
    """Of a period."""
    phase: float | None = None
    """Where a period begins, 0 to 1 of it; of a spike: when it comes, 0 to 1 of the time."""
    prompt: int = 4000
    """Tokens on average."""
    output: int = 250
    spread: float = 1.2
    """Of prompts: standard deviation over mean."""

    def __post_init__(self) -> None:
        for name, most in (("hours", 168.0), ("rate", 10_000.0), ("times", 1000.0), ("period", 1e6), ("share", 0.99),
                           ("prompt", LONGEST_PROMPT), ("output", LONGEST_PROMPT)):
            value = getattr(self, name)
            if value is not None and not 0 < value <= most:
                raise XpydError(f"{name} must be above 0 and at most {most:g}, not {value:g}")
        if not 0 <= (self.phase or 0.0) <= 1 or not 0 <= self.spread <= 10:
            raise XpydError(f"phase must be 0 to 1 and spread 0 to 10, not {self.phase} and {self.spread}")
        if self.rate * self.times * self.hours * 3600 > MOST:
            raise XpydError(f"more than {MOST} requests; lower rate, times or hours")


DEFAULTS: dict[str, Shape] = {
    "flat": Shape(rate=6.0, times=1.0, spread=1.5),
    "agents": Shape(rate=3.5, times=1.0, prompt=13_000, output=180),
    "diurnal": Shape(rate=1.0, times=9.0, period=7200.0, hours=4.0),
    "sinusoid": Shape(rate=8.0, times=1.0, period=3600.0),
    "onoff": Shape(rate=1.0, times=8.0, period=600.0),
    "square": Shape(),
    "ramp": Shape(rate=2.0, times=5.0),
    "step": Shape(),
    "mix": Shape(rate=6.0, times=1.0, spread=1.0),
    "quiet": Shape(rate=0.3, times=1 / NIGHT, period=3600.0, share=0.58, prompt=3000, output=300),
    "spike": Shape(rate=4.0, times=4.0, phase=0.55, hours=1.5),
}


def is_family(text: str) -> bool:
    """Whether it names one."""
    return text.partition(":")[0] in DEFAULTS


def shape_of(text: str) -> tuple[str, Shape]:
    """The family and the shape that ``NAME:key=value,…`` stands for.

    Raises:
        XpydError: no such family or field, or a value that is none; says what there is.
    """
    name, _, rest = text.partition(":")
    if name not in DEFAULTS:
        raise XpydError(f"no family {name}; there are {', '.join(DEFAULTS)}")
    given: dict[str, float] = {}
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        if key not in Shape.__struct_fields__:
            raise XpydError(f"{text}: no field {key}; there are {', '.join(Shape.__struct_fields__)}")
        try:
            given[key] = seconds(value) if key == "period" else int(value) if key in {"prompt", "output"} else float(value)
        except ValueError:
            right = "a duration, as 18m" if key == "period" else "a number"
            raise XpydError(f"{text}: {key} is {value!r}; write {right}") from None
    try:
        return name, msgspec.structs.replace(DEFAULTS[name], **given)
    except XpydError as error:
        raise XpydError(f"{text}: {error}") from None


def make_trace(text: str, seed: int) -> Trace:
    """The trace that a family makes of ``seed``.

    Raises:
        XpydError: as ``shape_of``.
    """
    name, shape = shape_of(text)
    draw = Chance(seed)
    if name == "agents":
        return _agents(shape, draw)
    if name == "sinusoid":
        return sinusoid(draw.random, length_s=shape.hours * 3600, period_s=shape.period or 3600.0, rate=shape.rate)
    length = shape.hours * 3600
    prompt: Rate = lambda _: shape.prompt  # noqa: E731 - a constant function
    output: Rate = lambda _: shape.output  # noqa: E731
    if name == "mix":
        prompt = lambda at: 1.5 * shape.prompt if at < length / 2 else 0.3 * shape.prompt  # noqa: E731
        output = lambda at: 0.6 * shape.output if at < length / 2 else 4.8 * shape.output  # noqa: E731
    level = rate_over_time(text, draw)
    return list(_thinned(draw, shape, level, prompt, output))


def period_of(shape: Shape, draw: Chance) -> float:
    """Seconds: as given, or evenly by logarithm between one and forty minutes."""
    return shape.period or SHORTEST_S * (LONGEST_S / SHORTEST_S) ** draw.random()


def rate_over_time(text: str, draw: Chance) -> Rate:
    """Requests a second of a family over seconds, to be asked in the order of time.

    ``draw``: as it is when a trace begins, for the periods and phases that this trace has; ``agents`` and ``sinusoid`` have
    a rate that stays.

    Raises:
        XpydError: as ``shape_of``.
    """
    name, shape = shape_of(text)
    length, low, high = shape.hours * 3600, shape.rate, shape.rate * shape.times
    if name in {"flat", "mix", "agents", "sinusoid"}:
        return lambda _: high
    if name == "ramp":
        return lambda at: low + (high - low) * at / (length / 2) if at < length / 2 else low
    if name == "step":
        return lambda at: low if at < length / 2 else high
    if name == "spike":
        begin = (shape.phase or 0.0) * length
        return lambda at: high if begin <= at < begin + SPIKE_S else low
    period = period_of(shape, draw)
    if name == "onoff":
        return _bursts((low, high), (period * (1 - shape.share), period * shape.share), length, draw)
    shift = period * (draw.random() if shape.phase is None and name == "square" else shape.phase or 0.0)
    if name == "diurnal":
        return lambda at: low + (high - low) * (1 - math.cos(2 * math.pi * (at + shift) / period)) / 2
    if name == "quiet":
        return lambda at: low if (at + shift) % period >= (1 - shape.share) * period else high
    return lambda at: high if (at + shift) % period >= (1 - shape.share) * period else low


def _bursts(levels: tuple[float, float], means: tuple[float, float], length: float, draw: Chance) -> Rate:
    ends: list[float] = []
    at, on = 0.0, False
    while at < length:
        at += draw.exponential(means[on])
        ends.append(at)
        on = not on
    state = [0]

    def level(when: float) -> float:
        while ends[state[0]] <= when:
            state[0] += 1
        return levels[state[0] % 2]

    return level


def _thinned(
    draw: Chance, shape: Shape, level: Rate, prompt: Rate, output: Rate
) -> Iterator[Arrival]:
    """Poisson arrivals, log-normal prompts, exponential answers (Lewis and Shedler 1979)."""
    deviation = math.sqrt(math.log1p(shape.spread * shape.spread))
    length, most = shape.hours * 3600, shape.rate * shape.times
    at = 0.0
    while (at := at + draw.exponential(1 / most)) < length:
        if draw.random() * most > level(at):
            continue
        tokens = prompt(at) * math.exp(deviation * draw.normal() - deviation * deviation / 2)
        answer = output(at) * min(MOST_OUTPUT, max(0.05, draw.exponential(1.0)))
        yield Arrival(at, max(8, min(LONGEST_PROMPT, int(tokens))), max(2, int(answer)))


def _agents(shape: Shape, draw: Chance) -> Trace:
    """Sessions with Poisson beginnings; each turn's prompt is the one before it with its answer and what a tool said."""
    length, found = shape.hours * 3600, []
    fresh = count(SYSTEM_BLOCKS)
    system = tuple(range(SYSTEM_BLOCKS))
    # So that prompts are ``prompt`` long on average: turn k of about 2 TURNS / 2 has grown k times.
    grows = max(BLOCK / 4, shape.prompt / (TURNS + 2))
    at = -TURNS * THINK_S
    while (at := at + draw.exponential(TURNS / shape.rate)) < length:
        when, tokens, hashes = at, SYSTEM_BLOCKS * BLOCK + int(2 * grows * draw.random()) + 8, system
        while when < length:
            tokens = min(LONGEST_PROMPT, tokens)
            blocks = -(-tokens // BLOCK)
            # The last block was not full: with more in it it is another one.
            kept = hashes[: max(SYSTEM_BLOCKS, len(hashes) - 1)]
            hashes = (*kept, *(next(fresh) for _ in range(blocks - len(kept))))
            answer = max(2, int(shape.output * min(MOST_OUTPUT, max(0.05, draw.exponential(1.0)))))
            if when >= 0:
                found.append(Arrival(when, tokens, answer, hashes))
            if tokens >= LONGEST_PROMPT or draw.random() < 1 / TURNS:
                break
            tokens += answer + int(grows * draw.exponential(1.0))
            when += THINK_S * draw.exponential(1.0) + 0.02 * answer
    return sorted(found)


def sinusoid(
    draw: Draw, *, length_s: float = 7200.0, period_s: float = 3600.0, rate: float = 8.0,
    prompt: tuple[int, int] = (6000, 1500), output: tuple[int, int] = (400, 1600),
) -> Trace:
    """Poisson arrivals whose lengths swing from the first value of each pair to the second and back.

    ``prompt`` and ``output`` swing against each other, so the fleet must go from prefill-heavy to decode-heavy. A single
    request's lengths are exponential around the mean of its time, a tenth of it at least and three times it at most.
    """
    found: Trace = []
    at = 0.0
    while True:
        at += -math.log(1 - draw()) / rate
        if at >= length_s:
            return found
        share = (1 - math.cos(2 * math.pi * at / period_s)) / 2
        lengths = [low ** (1 - share) * high**share for low, high in (prompt, output)]
        drawn = [max(1, int(mean * min(3.0, max(0.1, -math.log(1 - draw()))))) for mean in lengths]
        found.append(Arrival(at, drawn[0], drawn[1]))
