"""The demand some minutes ahead: Holt's linear trend, damped, which heeds what chance does not explain.

    error = x - (level + f trend)
    level' = level + f trend + a error         a = max(a0, error² / (error² + (3 noise)²))
    trend' = b (f trend + a0 error) + (1 - b) f trend
    forecast(n) = level + trend (f + f² + … + fⁿ)  Holt 1957; damping: Gardner and McKenzie 1985

``noise`` is the standard deviation that Poisson arrivals alone give an interval. An error of that size moves the level
as slowly as half of a minute's memory says; one of three times the size is half believed at once (a Kalman gain with the
error for the variance of the state). What is believed at once is a step of the load: it moves the level, and the trend no
more than an error of its size always does, since steps do not go on. a0, b and f are given as times, so a forecast does not
depend on how often it is asked.

Forecasts are wrong, the more the less steady the load. What was forecast a cold start ago is held against what came; by
how much that fell short, as a root mean square of the last half hour, is the reserve that a forecast is raised by.

How much more the demand jumps from one interval to the next than chance explains, as a ratio of variances, is its
burstiness: queues are so much longer (``need``).
"""

from __future__ import annotations

import math

import msgspec

LEVEL_S, TREND_S, DAMPING_S = 60.0, 120.0, 150.0
MISS_S = 1200.0
"""Half-life of the memory for wrong forecasts."""
FIRST_MISS = 0.1
"""Before any forecast could be held against what came."""
FIRST_LOOKS = 5.0
"""So many intervals of mere chance are taken for seen at the start."""
JUMP = 9.0
"""A greater one counts as so much: beyond three standard deviations it is a change of the load, not a burst."""
REACH = 0.35
"""So many times the usual shortfall is kept in reserve; the queue has a reserve of its own for what is bursty."""
MOST_PENDING = 1000
BURST_S = 1200.0
"""Half-life of the memory for jumps."""
BURSTS = (1.0, 8.0)
"""What a burstiness is taken for at least and at most; a jump that no queue explains is the forecast's to follow."""
DOUBT = 3.0
"""Standard deviations that are half believed."""


class HoltTrend(msgspec.Struct, frozen=True):
    """Level and trend of one series of values, as in Holt's method with a damped trend."""

    level: float = 0.0
    trend: float = 0.0
    """Per second."""
    begun: bool = False

    def expected_value(self, over_s: float) -> float:
        """The value that is expected of the next interval, which takes ``over_s`` seconds."""
        return self.level + math.exp2(-over_s / DAMPING_S) * self.trend * over_s

    def with_value(self, value: float, noise: float, over_s: float) -> HoltTrend:
        """Level and trend after one more value, of an interval of ``over_s`` seconds; ``noise`` is what chance explains."""
        if not self.begun:
            return HoltTrend(value, 0.0, True)
        a = steady = 1 - 0.5 ** (over_s / LEVEL_S)
        b, f = 1 - 0.5 ** (over_s / TREND_S), 0.5 ** (over_s / DAMPING_S)
        expected = self.expected_value(over_s)
        error = value - expected
        if error:
            doubt = DOUBT * noise / error
            a = max(a, 1 / (1 + doubt * doubt))
        level = max(0.0, expected + a * error)
        grew = (max(0.0, expected + steady * error) - self.level) / over_s
        trend = b * grew + (1 - b) * f * self.trend
        return HoltTrend(level, trend, True)

    def forecast(self, seconds: float) -> float:
        """The value that is forecast for ``seconds`` from now, at least 0."""
        goes_on = DAMPING_S / math.log(2) * (1.0 - math.exp2(-seconds / DAMPING_S))
        return max(0.0, self.level + self.trend * goes_on)


class Series(msgspec.Struct, frozen=True):
    """A demand, its forecasts, and how far they fell short."""

    now: HoltTrend = HoltTrend()
    pending: tuple[float, ...] = ()
    """Forecasts whose time has not come, the oldest first."""
    shortfall: float = FIRST_MISS**2
    """Mean square, relative to the forecast."""
    jumps: float = 0.0
    """Decaying sum of squared errors, over the variances that chance gives them; Poisson arrivals make it ``looks``."""
    looks: float = 0.0

    def with_value(self, value: float, noise: float, over_s: float, ahead_s: float) -> Series:
        """The series after one more value; its forecasts look ``ahead_s`` seconds ahead."""
        now = self.now.with_value(value, noise, over_s)
        jumps, looks = self.jumps, self.looks
        if self.now.begun and noise > 0:
            keep = 0.5 ** (over_s / BURST_S)
            jump = (value - self.now.expected_value(over_s)) / noise
            jumps, looks = keep * jumps + min(JUMP, jump * jump), keep * looks + 1.0
        steps = min(MOST_PENDING, max(1, round(ahead_s / over_s)))
        pending, square = self.pending, self.shortfall
        if len(pending) >= steps:
            due = pending[-steps]
            miss = min(1.0, max(0.0, now.level / due - 1)) if due > 0 else 0.0
            keep = 0.5 ** (over_s / MISS_S)
            square = keep * square + (1 - keep) * miss * miss
        return Series(now, (*pending[-steps:], now.forecast(ahead_s)), square, jumps, looks)

    @property
    def burst(self) -> float:
        """Variance between intervals by what chance explains of it."""
        return min(BURSTS[1], max(BURSTS[0], (self.jumps + FIRST_LOOKS) / (self.looks + FIRST_LOOKS)))

    @property
    def reserve(self) -> float:
        """What a forecast is raised by, as a share of it."""
        return REACH * math.sqrt(self.shortfall)

    def forecast(self, seconds: float) -> float:
        """The demand ``seconds`` from now, reserve included. That it falls is believed when it has fallen."""
        return max(self.now.forecast(seconds), self.now.level) * (1 + self.reserve)
