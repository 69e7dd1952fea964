"""Global batches of an elastic fit by the definition of virtual shards, whatever the number of workers."""

from dataclasses import replace

import numpy as np
from keras_reference import job_for

from elephant.data.epoch_plan import row_order
from elephant.data.schema import PIECE, SCALAR, Field
from elephant.data.shard import row_hashes
from elephant.data.virtual_shards import number_of_pieces, owner_of, rows_before

# Ranks of a fit, and the epochs and steps after which it goes on with others.
_CHANGES = ((2, (0, 2)), (3, (1, 1)), (1, None))


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


def fit_of_changing_ranks(rank_pool, model, data, *, batch_size, epochs=2, **options):
    """Fits on two, three and one rank, with changes within epochs; returns the last recording, and the global batches.

    Args:
        data: Arrays of features and labels.
        batch_size: Rows of a step for each of three ranks.
    """
    pieces, count = number_of_pieces(3), len(data["label"])
    columns = {**data, PIECE: np.random.default_rng(5).choice(pieces, count).astype("int32")}
    elastic = {"num_workers": (1, 3), "checkpoint_path": "unused", "checkpoint_seconds": 1e-9, "seed": 11}
    job = job_for(model, batch_size=batch_size, epochs=epochs, **elastic, **options)
    job = replace(job, schema=replace(job.schema, piece=Field(PIECE, ("p",), "int32", SCALAR)))
    state = None
    for ranks, until in _CHANGES:
        owners = np.array([owner_of(piece, ranks) for piece in columns[PIECE]])
        parts = [{name: array[owners == rank] for name, array in columns.items()} for rank in range(ranks)]
        recording = rank_pool.fit(replace(job, state=state), parts)[0]
        state = next((one for one in recording.states if (one.epochs, one.step) == until), None)
        assert (state is None) == (until is None)
    return recording, list(elastic_batches(columns, pieces=pieces, global_rows=batch_size * 3, seed=11, epochs=epochs))
