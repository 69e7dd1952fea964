"""State within an epoch for another number of ranks than those that have left it.

Within an epoch every rank has something of its own. What its metrics have added up is a part of the whole, and parts of
ranks that are gone go to rank 0. What its layers have learned without a gradient, such as the moving averages of batch
normalization, is an average over its own rows: every rank goes on with the mean over all, weighted by the rows that
each had, as at an epoch's end. That is as close to one process as ranks are at all in this, and not exact. Generators
stay with their ranks; one that there was not before is seeded as any new one is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from elephant.checkpoint.state import FitState

_ADDED, _AVERAGED, _ROWS = "metric", "moving", "rows"


def for_ranks(state: FitState, world_size: int) -> FitState:
    """Returns a state as so many ranks go on from it; the same one where there were as many, or at an epoch's end.

    >>> arrays = {f"rows/{rank}/0": np.array([rows, 0]) for rank, rows in enumerate((30, 10))}
    >>> arrays |= {"metric/0/0": np.array(3.0), "metric/1/0": np.array(2.0)}
    >>> arrays |= {"moving/0/model/mean": np.array(4.0), "moving/1/model/mean": np.array(8.0)}
    >>> state = for_ranks(FitState(epochs=1, step=5, arrays=arrays), 1)
    >>> [float(state.arrays[name]) for name in ("metric/0/0", "moving/0/model/mean")]
    [5.0, 5.0]
    """
    before = len(_of_kind(state.arrays, _ROWS))
    if not state.step or before in (0, world_size):
        return state
    parts = {kind: _of_kind(state.arrays, kind) for kind in (_ADDED, _AVERAGED, _ROWS)}
    weights = np.array([float(parts[_ROWS][rank]["0"][0]) for rank in range(before)])
    weights = weights / weights.sum() if weights.sum() else np.full(before, 1 / before)
    kept = {name: array for name, array in state.arrays.items() if name.split("/")[0] not in parts}
    for kind in (_ADDED, _ROWS):
        sums = {name: _sum_of([part[name] for part in parts[kind].values()]) for name in parts[kind].get(0, {})}
        for rank in range(world_size):
            kept |= {f"{kind}/{rank}/{name}": total if rank == 0 else total * 0 for name, total in sums.items()}
    for name, first in parts[_AVERAGED].get(0, {}).items():
        values = [parts[_AVERAGED][rank][name] for rank in range(before)]
        mean = np.asarray(np.tensordot(weights, np.stack(values), axes=1)).astype(first.dtype)
        kept |= {f"{_AVERAGED}/{rank}/{name}": mean for rank in range(world_size)}
    return replace(state, arrays=kept)


def rows_of_all(state: FitState) -> np.ndarray | None:
    """Returns the digest of the rows of all ranks, int64 of shape (2,); None where the state has none."""
    digests = [part["0"] for part in _of_kind(state.arrays, _ROWS).values()]
    return _sum_of(digests) if digests else None


def _sum_of(arrays: list[np.ndarray]) -> np.ndarray:
    # Sums of hashes begin anew beyond the largest integer, wherever they are added.
    with np.errstate(over="ignore"):
        return np.asarray(np.sum(np.stack(arrays), axis=0, dtype=arrays[0].dtype))


def _of_kind(arrays: Mapping[str, np.ndarray], kind: str) -> dict[int, dict[str, np.ndarray]]:
    """Returns the arrays that are kind/rank/name, by rank and name."""
    found: dict[int, dict[str, np.ndarray]] = {}
    for path, array in arrays.items():
        first, _, rest = path.partition("/")
        rank, _, name = rest.partition("/")
        if first == kind and rank.isdecimal():
            found.setdefault(int(rank), {})[name] = np.asarray(array)
    return found
