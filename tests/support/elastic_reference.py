"""Global batches of an elastic fit by the definition of virtual shards, whatever the number of workers."""

import numpy as np

from elephant.data.epoch_plan import row_order
from elephant.data.shard import row_hashes
from elephant.data.virtual_shards import rows_before


def elastic_batches(columns, *, pieces, global_rows, seed, epochs, trained=None, shuffle=True):
    """Yields the rows of each step.

    Args:
        columns: Arrays of features and labels, perhaps of weights, and of the piece of each row.
        pieces: How many there are.
        trained: Marks the rows that are trained on; None for all.
    """
    names = [name for name in ("features", "label", "weight") if name in columns]
    hashes = row_hashes([columns[name] for name in names], len(columns["label"]))
    numbers = np.arange(len(hashes)) if trained is None else np.flatnonzero(trained)
    of_piece = [numbers[columns["piece"][numbers] == piece] for piece in range(pieces)]
    of_piece = [rows[np.argsort(hashes[rows], kind="stable")] for rows in of_piece]
    cuts = np.array([*range(0, len(numbers), global_rows), len(numbers)])
    before = rows_before(np.array([len(rows) for rows in of_piece]), cuts)
    for epoch in range(epochs):
        drawn = [row_order(seed, epoch, piece, len(rows), shuffle=shuffle) for piece, rows in enumerate(of_piece)]
        orders = [rows[order] for rows, order in zip(of_piece, drawn, strict=True)]
        for step in range(len(cuts) - 1):
            parts = [rows[before[step, piece] : before[step + 1, piece]] for piece, rows in enumerate(orders)]
            yield {name: columns[name][np.concatenate(parts)] for name in names}
