"""Fewer cases than a product has: every two values of two axes meet in one of them."""

from itertools import combinations, product


def pairwise(*axes):
    """Returns rows, a value of each axis, in which every value of an axis meets every value of every other axis.

    The rows are always the same and few, not always the fewest.

    >>> pairwise("ab", "cd", "ef")
    [('a', 'c', 'e'), ('a', 'd', 'f'), ('b', 'c', 'f'), ('b', 'd', 'e')]
    """
    axes = [list(axis) for axis in axes]
    places = [range(len(axis)) for axis in axes]
    # A pair is ((axis, place), (axis, place)); as a dict, because a set has no order.
    missing = {
        pair: None
        for first, second in combinations(range(len(axes)), 2)
        for pair in product(((first, place) for place in places[first]), ((second, place) for place in places[second]))
    }
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for axis in range(len(axes)):
            if axis not in row:
                row[axis] = max(places[axis], key=lambda place, axis=axis: _gain(missing, row, axis, place))
        for pair in combinations(sorted(row.items()), 2):
            missing.pop(pair, None)
        rows.append(tuple(axes[axis][row[axis]] for axis in range(len(axes))))
    return rows


def _gain(missing, row, axis, place):
    """Returns how many pairs that have not met a value would bring to a row."""
    return sum(tuple(sorted([(axis, place), rank_handle])) in missing for rank_handle in row.items())
