"""Counters and histograms for one thread, shown through the Prometheus library when somebody scrapes.

The library's own counters lock and look children up for every request, which costs three times as much as all of this. A
router counts on one thread, so plain numbers in dictionaries do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

Labels = tuple[str, ...]
Family = CounterMetricFamily | GaugeMetricFamily


def filled(family: Family, cells: Mapping[Labels, float]) -> Family:
    """A family with these cells."""
    for labels, value in cells.items():
        family.add_metric(labels, value)
    return family


class TallyCounts:
    """A counter; ``name`` is without ``_total``."""

    def __init__(self, name: str, words: str, labels: Labels = ()) -> None:
        self.name = name
        self._words = words
        self._labels = labels
        self._cells: dict[Labels, float] = {} if labels else {(): 0.0}

    def add(self, labels: Labels = (), by: float = 1) -> None:
        """Count. Labels in the order in which they were named."""
        self._cells[labels] = self._cells.get(labels, 0.0) + by

    def family(self) -> Metric:
        """For the library."""
        return filled(CounterMetricFamily(self.name, self._words, labels=self._labels), self._cells)


class TallyTimes:
    """A histogram of seconds; ``bounds`` are the upper ends of its buckets."""

    def __init__(self, name: str, words: str, bounds: tuple[float, ...], labels: Labels = ()) -> None:
        self.name = name
        self._words = words
        self._bounds = bounds
        self._labels = labels
        self._cells: dict[Labels, list[float]] = {}
        if not labels:
            self._cell(())

    def add_all(self, durations: Sequence[float], labels: Labels = ()) -> None:
        """Count several."""
        if durations:
            cell = self._cells.get(labels) or self._cell(labels)
            for bucket, count in Counter(map(partial(bisect_left, self._bounds), durations)).items():
                cell[bucket] += count  # a bucket's upper end belongs to it
            cell[-1] += sum(durations)

    def _cell(self, labels: Labels) -> list[float]:
        """Counts by bucket, those beyond the last bound, and the sum."""
        cell = self._cells[labels] = [0.0] * (len(self._bounds) + 2)
        return cell

    def family(self) -> Metric:
        """For the library."""
        family = HistogramMetricFamily(self.name, self._words, labels=self._labels)
        for labels, cell in self._cells.items():
            family.add_metric(labels, buckets_of(self._bounds, cell), cell[-1])
        return family


def buckets_of(bounds: tuple[float, ...], cell: Sequence[float]) -> list[tuple[str, float]]:
    """As the library takes them. ``cell``: counts by bucket, those beyond the last bound, and the sum (left out)."""
    return list(zip((*map(str, bounds), "+Inf"), accumulate(cell[:-1]), strict=True))
