"""Skew of labels between partitions, of which workers that average their weights in pairs learn worse."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

# Share of a partition's rows that would have to be of other classes for it to be like all rows together.
_MOST_SKEW = 0.25


def skewed_partitions(counts: Mapping[int, Mapping[str, float]]) -> list[int]:
    """Returns the partitions whose classes differ strongly from those of all rows, more than chance would make them.

    Args:
        counts: Rows by class, by partition; empty where labels are no classes.

    >>> skewed_partitions({0: {"0": 500, "1": 500}, 1: {"0": 510, "1": 490}})
    []
    >>> skewed_partitions({0: {"0": 500}, 1: {"1": 500}})
    [0, 1]
    """
    known = {partition: labels for partition, labels in counts.items() if labels}
    total: Counter[str] = Counter()
    for labels in known.values():
        total.update({name: int(count) for name, count in labels.items()})
    return sorted(partition for partition, labels in known.items() if _skew(labels, total) > 0)


def _skew(labels: Mapping[str, float], total: Mapping[str, float]) -> float:
    """Returns the total variation distance between a partition and all rows, beyond what is allowed to it."""
    rows, all_rows = sum(labels.values()), sum(total.values())
    distance = sum(abs(labels.get(name, 0.0) / rows - count / all_rows) for name, count in total.items()) / 2
    # Twice what it is on average where rows are drawn at random, as the mean deviation of K counts of n rows.
    by_chance = math.sqrt(2 * len(total) / (math.pi * rows))
    return distance - _MOST_SKEW - by_chance
