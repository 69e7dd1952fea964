"""Ranks of an elastic fit, as many as there are in turn, against one process of Keras on the same global batches."""

import dataclasses

import keras
import numpy as np
import pytest
from elastic_reference import elastic_batches
from keras_reference import classifier_data, fit_one_process, job_for, largest_difference, regression_model
from rank_pool import RankError
from tiers import in_tiers

from elephant.backends import base, current
from elephant.checkpoint.state import FitState
from elephant.data.schema import PIECE, SCALAR, Field
from elephant.data.virtual_shards import number_of_pieces, owner_of
from elephant.monitor.events import RankEpoch, ShardsMoved
from elephant.rank.job import BatchFunctions

MOST, BATCH, SEED = 3, 4, 11
PIECES = number_of_pieces(MOST)
TOLERANCE = 1e-5


def elastic_job(model, **options):
    job = job_for(model, num_workers=(1, MOST), batch_size=BATCH, seed=SEED, **options)
    return dataclasses.replace(job, schema=dataclasses.replace(job.schema, piece=Field(PIECE, ("p",), "int32", SCALAR)))


def in_pieces(columns, crowded=False):
    """Returns the rows with a piece for each; crowded into three of them, so that ranks have steps without rows."""
    rows = len(columns["label"])
    pieces = np.random.default_rng(5).choice([0, 1, 5] if crowded else PIECES, rows)
    return {**columns, PIECE: pieces.astype("int32")}


def dealt(columns, ranks):
    """Returns the rows of each rank, as Spark might deliver them."""
    owners = np.array([owner_of(piece, ranks) for piece in columns[PIECE]])
    chosen = [np.random.default_rng(ranks).permutation(np.flatnonzero(owners == rank)) for rank in range(ranks)]
    return [{name: values[rows] for name, values in columns.items()} for rows in chosen]


def global_batches(columns, epochs, **options):
    return elastic_batches(columns, pieces=PIECES, global_rows=BATCH * MOST, seed=SEED, epochs=epochs, **options)


@pytest.mark.parametrize("ranks", in_tiers({"1": 1, "2": 2, "3": 3}, fast=["2"], slow="another number of ranks"))
def test_weights_when_trained_by_any_number_of_ranks_then_equal_one_process(rank_pool, ranks):
    columns = in_pieces(classifier_data(53))
    columns["weight"] = np.random.default_rng(3).uniform(0.1, 2, 53).astype("float32")
    model = regression_model(keras.optimizers.Adam(0.01))
    recordings = rank_pool.fit(elastic_job(model, epochs=2, weighted=True), dealt(columns, ranks))
    batches = list(global_batches(columns, 2))
    assert len(batches) == 2 * 5
    expected, _ = fit_one_process(model, batches, epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE


@pytest.mark.slow("a fit; in test_synchronous.py a rank has no rows, and the tests above deal them to any ranks")
def test_weights_when_ranks_have_steps_without_rows_then_equal_one_process(rank_pool):
    columns = in_pieces(classifier_data(31), crowded=True)
    model = regression_model(keras.optimizers.SGD(0.05, momentum=0.9), metrics=["mae"])
    parts = dealt(columns, 3)
    assert [len(part["label"]) > 0 for part in parts] == [True, True, True]
    parts[0], parts[1] = (
        {name: np.concatenate([parts[0][name], parts[1][name]]) for name in columns},
        {name: values[:0] for name, values in columns.items()},
    )
    recordings = rank_pool.fit(elastic_job(model, epochs=2, shuffle=False), parts)
    expected, history = fit_one_process(model, list(global_batches(columns, 2, shuffle=False)), epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE
    for epoch, logs in enumerate(recordings[0].epochs):
        assert logs["mae"] == pytest.approx(history["mae"][epoch], rel=1e-5)


SCHEDULES = {
    "2, 3 within an epoch, 1 within the next": [(2, (0, 2)), (3, (1, 3)), (1, None)],
    "3, 1 within an epoch, 2 at its end": [(3, (0, 1)), (1, (1, 0)), (2, None)],
    "1, 3 within the last epoch": [(1, (2, 4)), (3, None)],
}


@pytest.mark.parametrize(
    "schedule", in_tiers(SCHEDULES, fast=["2, 3 within an epoch, 1 within the next"], slow="two more schedules")
)
def test_weights_when_the_number_of_ranks_changes_at_any_step_then_equal_one_process(rank_pool, schedule):
    columns, epochs = in_pieces(classifier_data(53)), 3
    model = regression_model(keras.optimizers.SGD(0.05, momentum=0.9), metrics=["mae"])
    options = {"checkpoint_path": "kept", "checkpoint_seconds": 1e-9}
    job, state, numbers = elastic_job(model, epochs=epochs, **options), None, {}
    for ranks, until in schedule:
        recording = rank_pool.fit(dataclasses.replace(job, state=state), dealt(columns, ranks))[0]
        begun = 0 if state is None else state.epochs
        ended = epochs if until is None else until[0]
        numbers |= {begun + place: logs for place, logs in enumerate(recording.epochs) if begun + place < ended}
        state = next((one for one in recording.states if (one.epochs, one.step) == until), None)
        assert (state is None) == (until is None)
    expected, history = fit_one_process(model, list(global_batches(columns, epochs)), epochs=epochs)
    assert largest_difference(recording.variables[: len(expected)], expected) <= TOLERANCE
    for name in ("loss", "mae"):
        assert [numbers[epoch][name] for epoch in range(epochs)] == pytest.approx(history[name], rel=1e-4)


@pytest.mark.slow("three fits")
def test_validation_when_a_fraction_is_kept_then_its_numbers_are_those_of_the_same_rows_on_any_ranks(rank_pool):
    columns = in_pieces(classifier_data(60))
    model = regression_model("sgd")
    kept = [
        rank_pool.fit(elastic_job(model, epochs=1, validation_fraction=0.2), dealt(columns, ranks))[0].epochs[0]
        for ranks in (1, 2, 3)
    ]
    assert kept[0]["val_loss"] == pytest.approx(kept[1]["val_loss"], rel=1e-5)
    assert kept[0]["val_loss"] == pytest.approx(kept[2]["val_loss"], rel=1e-5)


def test_validation_when_a_column_marks_rows_then_equals_one_process(rank_pool):
    columns = in_pieces(classifier_data(53))
    columns["validation"] = np.arange(53) % 5 == 0
    model = regression_model(keras.optimizers.SGD(0.05))
    recordings = rank_pool.fit(elastic_job(model, epochs=2, indicated=True), dealt(columns, 2))
    marked = columns["validation"]
    expected, _ = fit_one_process(model, list(global_batches(columns, 2, trained=~marked)), epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE
    trained = keras.models.clone_model(model)
    trained.compile(loss="mse")
    trained.set_weights(expected)
    loss = trained.evaluate(columns["features"][marked], columns["label"][marked], verbose=0)
    assert recordings[0].epochs[-1]["val_loss"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.usefixtures("by_value")
def test_state_when_rows_of_all_ranks_are_others_then_is_refused(rank_pool):
    columns = in_pieces(classifier_data(53))
    model = regression_model("sgd")
    options = {"checkpoint_path": "kept", "checkpoint_seconds": 1e-9}
    job = elastic_job(model, epochs=1, **options)
    states = rank_pool.fit(job, dealt(columns, 2))[0].states
    within = next(state for state in states if state.step)
    assert isinstance(within, FitState) and within.facts["num_workers"] == MOST
    others = {name: np.concatenate([values[:-1], values[:1]]) for name, values in columns.items()}
    with pytest.raises(RankError, match="expected the rows that all ranks had in the first 1 steps of the epoch"):
        rank_pool.fit(dataclasses.replace(job, state=within), dealt(others, 3))


@pytest.mark.slow("a fit; test_preprocessing.py holds what the function is given")
@pytest.mark.usefixtures("by_value")
def test_weights_when_rows_are_preprocessed_once_then_equal_one_process_on_what_they_become(rank_pool):
    columns = in_pieces(classifier_data(40))
    model = regression_model(keras.optimizers.SGD(0.05))
    job = elastic_job(model, epochs=2)
    target, raw = dataclasses.replace(job.schema, piece=None), dataclasses.replace(job.schema, x={"features": 0})
    functions = BatchFunctions(preprocess=lambda batch: 2 * batch["features"], target_schema=target)
    job = dataclasses.replace(job, schema=raw, preprocessing=functions)
    recordings = rank_pool.fit(job, dealt(columns, 2))
    doubled = {**columns, "features": 2 * columns["features"]}
    expected, _ = fit_one_process(model, list(global_batches(doubled, 2)), epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE


def test_job_when_rows_are_not_in_pieces_then_is_refused(rank_pool):
    job = elastic_job(regression_model("sgd"), epochs=1)
    whole = dataclasses.replace(job, schema=dataclasses.replace(job.schema, piece=None))
    with pytest.raises(RankError, match=r"expected one number where no Spark deals the rows\. Received: \(1, 3\)"):
        rank_pool.fit(whole, dealt(in_pieces(classifier_data(12)), 2))


class Moved(keras.callbacks.Callback):
    """Has virtual shards move after some epochs; on the rank that decides.

    Args:
        moves: By epoch, from one, the owner of each.
    """

    def __init__(self, moves):
        super().__init__()
        self.moves = moves

    def on_train_begin(self, logs=None):
        from elephant.data.piece_balance import PieceBalance

        self.decide, self.epochs = PieceBalance.epoch_ended, 0

        def epoch_ended(balance, busy_s, steps_s, most_rows, epochs_left):
            assert self.decide(balance, busy_s, steps_s, most_rows, epochs_left) is None
            self.epochs += 1
            return self.moves.get(self.epochs)

        PieceBalance.epoch_ended = epoch_ended

    def on_train_end(self, logs=None):
        from elephant.data.piece_balance import PieceBalance

        PieceBalance.epoch_ended = self.decide


def moved_events(recording):
    return [event for event in recording.sent if isinstance(event, ShardsMoved)]


def owners_with(others):
    """Returns the owners of all virtual shards as they are dealt to three ranks, but for some."""
    return tuple(int(others.get(piece, owner_of(piece, 3))) for piece in range(PIECES))


@pytest.mark.usefixtures("by_value")
def test_weights_when_virtual_shards_move_between_epochs_then_equal_one_process(rank_pool):
    columns, epochs = in_pieces(classifier_data(53)), 4
    columns["weight"] = np.random.default_rng(3).uniform(0.1, 2, 53).astype("float32")
    columns["validation"] = np.arange(53) % 5 == 0
    model = regression_model(keras.optimizers.Adam(0.01, use_ema=True), metrics=["mae"])
    of_rank = {rank: [piece for piece in np.unique(columns[PIECE]) if owner_of(piece, 3) == rank] for rank in range(3)}
    first = owners_with({of_rank[1][0]: 0, of_rank[1][1]: 0, of_rank[1][2]: 2, of_rank[2][0]: 1})
    stays = max(np.flatnonzero(np.array(first) == 1), key=np.bincount(columns[PIECE], minlength=PIECES).__getitem__)
    moves = {1: first, 3: tuple(0 if owner == 1 and piece != stays else owner for piece, owner in enumerate(first))}
    job = elastic_job(model, epochs=epochs, weighted=True, indicated=True, callbacks=[Moved(moves)])
    recordings = rank_pool.fit(job, dealt(columns, 3))
    marked = columns["validation"]
    expected, history = fit_one_process(model, list(global_batches(columns, epochs, trained=~marked)), epochs=epochs)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE
    for recording in recordings:
        assert [event.epoch for event in recording.sent if isinstance(event, RankEpoch)] == list(range(epochs))
    for name in ("loss", "mae"):
        assert [logs[name] for logs in recordings[0].epochs] == pytest.approx(history[name], rel=1e-4)
    told = moved_events(recordings[0])
    assert [event.epoch for event in told] == [0, 2]
    assert [move[:3] for move in told[0].moves] == [[1, 0, 2], [1, 2, 1], [2, 1, 1]]
    rows = np.bincount(np.array(moves[3])[columns["piece"][~marked]], minlength=3)
    assert told[1].rows == rows.tolist() and min(rows) > 0
    trained_rows = [[event.rows for event in one.sent if isinstance(event, RankEpoch)][-1] for one in recordings]
    assert trained_rows == rows.tolist()


@pytest.mark.slow(
    "two fits; the tests above move rows, and change the number of ranks; tests/spark/test_elastic.py does both"
)
@pytest.mark.usefixtures("by_value")
def test_weights_when_ranks_are_lost_after_a_move_then_others_go_on_with_rows_as_dealt_and_equal_one_process(rank_pool):
    columns, epochs = in_pieces(classifier_data(53)), 3
    model = regression_model(keras.optimizers.SGD(0.05, momentum=0.9), metrics=["mae"])
    moves = {1: tuple(2 if owner == 0 and piece % 2 else owner for piece, owner in enumerate(owners_with({})))}
    options = {"checkpoint_path": "kept", "checkpoint_seconds": 1e-9, "callbacks": [Moved(moves)]}
    job = elastic_job(model, epochs=epochs, **options)
    recordings = rank_pool.fit(job, dealt(columns, 3))
    expected, history = fit_one_process(model, list(global_batches(columns, epochs)), epochs=epochs)
    assert len(moved_events(recordings[0])) == 1
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE
    state = next(one for one in recordings[0].states if (one.epochs, one.step) == (1, 3))
    job = dataclasses.replace(elastic_job(model, epochs=epochs, checkpoint_path="kept"), state=state)
    again = rank_pool.fit(job, dealt(columns, 2))[0]
    assert largest_difference(again.variables[: len(expected)], expected) <= TOLERANCE
    assert [logs["mae"] for logs in again.epochs] == pytest.approx(history["mae"][1:], rel=1e-4)


class PairForm:
    """Form of batches of numbers and their labels."""

    def signature(self):
        return [("float32", (None, 2)), ("int64", (None,))]

    def assembled(self, arrays):
        return tuple(arrays)


@pytest.mark.parametrize("is_plain", [True, False], ids=["without TensorFlow", "of this backend"])
def test_batches_when_of_different_lengths_then_are_cut_from_what_was_read_at_once(is_plain):
    lengths = [np.array([2, 3, 1]), np.array([4])]
    runs = [
        (np.arange(2 * part.sum(), dtype="float32").reshape(-1, 2), np.arange(part.sum()), part) for part in lengths
    ]
    read = [lambda index: runs[int(index)], 2, PairForm()]
    batches = base.Backend.batches if is_plain else type(current()).batches
    found = list(batches(current(), *read, in_runs=True, of_lengths=True))
    expected = [
        part
        for rows, labels, sizes in runs
        for part in zip(*(np.split(array, np.cumsum(sizes)[:-1]) for array in (rows, labels)), strict=True)
    ]
    assert len(found) == len(expected) == 4
    for batch, (rows, labels) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(batch[0]), rows)
        np.testing.assert_array_equal(np.asarray(batch[1]), labels)


def test_learning_rate_when_scaled_then_counts_the_most_workers(rank_pool):
    columns = in_pieces(classifier_data(30))
    model = regression_model(keras.optimizers.SGD(0.02))
    recordings = rank_pool.fit(elastic_job(model, epochs=2, scale_learning_rate=True), dealt(columns, 2))
    model.optimizer.learning_rate = 0.02 * MOST
    expected, _ = fit_one_process(model, list(global_batches(columns, 2)), epochs=2)
    assert largest_difference(recordings[0].variables[: len(expected)], expected) <= TOLERANCE
