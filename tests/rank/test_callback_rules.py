"""The table of where callbacks run: what it knows of Keras, and what follows for lists of callbacks."""

import inspect
from pathlib import Path

import keras
import pytest

from elephant.errors import ConfigurationError
from elephant.rank.callbacks.callback_rules import (
    BATCH_EVENTS,
    RULES,
    Duty,
    Place,
    check_monitors,
    has_copies_on_workers,
    may_hear_later,
    packages_of,
    places_of,
    reads_weights,
    require_late,
    rule_of,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "callbacks.md"
# Bases, and what elephant refuses.
NO_ROWS = {"Callback", "CallbackList", "ProgbarLogger", "BackupAndRestore"}
EPOCHS = ("on_train_begin", "on_epoch_begin", "on_epoch_end")


class Adds(keras.callbacks.Callback):
    """Puts a number into the logs."""

    def on_epoch_end(self, epoch, logs=None):
        logs["added"] = 1.0


class Batches(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass


class Tracker(keras.callbacks.Callback):
    """As a tracker has them."""

    __module__ = "wandb.integration.keras"

    def on_train_batch_end(self, batch, logs=None):
        pass


class NeptunesTracker(Tracker):
    """One that `neptune.integrations` has from a package of another name."""

    __module__ = "neptune_tensorflow_keras.impl"


class TrackersCheckpoint(keras.callbacks.ModelCheckpoint):
    __module__ = "wandb.integration.keras"

    def on_train_batch_end(self, batch, logs=None):
        pass


class Snoops(keras.callbacks.CSVLogger):
    """Subclass that does more: the row says where it runs, and not what it reads."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.get_weights()


def names_of_places(callbacks, **options):
    return [place.value for place in places_of(callbacks, **options)]


def test_rules_when_keras_has_a_callback_then_the_table_has_a_row_for_it():
    known = {name for name, kind in vars(keras.callbacks).items() if inspect.isclass(kind)}
    without = sorted(known - NO_ROWS - {rule.kind.__name__ for rule in RULES if isinstance(rule.kind, type)})
    assert not without, f"{without}: add a row to RULES in elephant/rank/callbacks/callback_rules.py"


def test_rules_when_listed_then_each_gives_its_reason_and_the_page_names_who_decides_logs_or_tunes():
    assert all(rule.reason for rule in RULES)
    told = PAGE.read_text()
    names = [getattr(rule.kind, "__name__", rule.kind) for rule in RULES if rule.duty is not Duty.OWN]
    # One that not every Keras has, and one that is told as the others are.
    missing = [name for name in names if f"`{name}" not in told and name != "OrbaxCheckpoint"]
    assert not missing


def test_places_when_callbacks_are_of_each_duty_then_are_those_of_the_table(tmp_path):
    path = str(tmp_path / "model.keras")
    given = {
        "all ranks": [keras.callbacks.TerminateOnNaN(), Batches(), keras.callbacks.EarlyStopping()],
        "rank 0": [keras.callbacks.ModelCheckpoint(path, save_freq=3), TrackersCheckpoint(path, save_freq=3)],
        "the driver": [
            keras.callbacks.ModelCheckpoint(path),
            TrackersCheckpoint(path),
            Tracker(),
            NeptunesTracker(),
            keras.callbacks.LambdaCallback(on_epoch_end=print),
        ],
    }
    for place, callbacks in given.items():
        assert names_of_places(callbacks) == [place] * len(callbacks)


def test_places_when_one_before_may_add_to_the_logs_then_those_that_decide_by_numbers_follow_it():
    stopping, ends = keras.callbacks.EarlyStopping(), keras.callbacks.TerminateOnNaN()
    assert names_of_places([stopping, Adds(), stopping, ends]) == ["all ranks", "the driver", "the driver", "all ranks"]
    # A tracker's adds nothing, and one that runs on the workers needs nobody to follow it.
    assert names_of_places([Tracker(), Batches(), stopping]) == ["the driver", "all ranks", "all ranks"]


def test_places_when_callbacks_share_variables_with_the_model_then_run_where_it_is_but_for_a_tool_s():
    assert names_of_places([Adds(), Adds(), Tracker()], sharing={0, 2}) == ["all ranks", "the driver", "the driver"]
    # Nobody follows one that runs on the workers.
    assert names_of_places([Adds(), keras.callbacks.EarlyStopping()], sharing={0}) == ["all ranks"] * 2


def test_places_when_the_driver_hears_later_then_only_those_that_need_no_weights_run_there(tmp_path):
    here = [keras.callbacks.CSVLogger("log.csv"), keras.callbacks.LambdaCallback(on_epoch_end=print), Tracker()]
    there = [Adds(), keras.callbacks.ModelCheckpoint(str(tmp_path / "m.keras")), keras.callbacks.TensorBoard()]
    assert names_of_places(here, later=True) == ["the driver"] * 3
    assert names_of_places(there, later=True) == ["all ranks", "rank 0", "rank 0"]
    with pytest.raises(ValueError, match="driverCallbacks: TensorBoard looks at weights or decides about training"):
        require_late([*here, keras.callbacks.TensorBoard()])


def test_weights_when_a_row_says_that_a_class_reads_none_then_a_subclass_may():
    reads = [keras.callbacks.EarlyStopping(restore_best_weights=True), keras.callbacks.TensorBoard(histogram_freq=1)]
    reads += [Snoops("log.csv"), Adds()]
    does_not = [keras.callbacks.EarlyStopping(), keras.callbacks.TensorBoard(), keras.callbacks.CSVLogger("log.csv")]
    assert all(reads_weights(callback, *EPOCHS) for callback in reads)
    assert not any(reads_weights(callback, *EPOCHS) for callback in [*does_not, Batches()])
    assert not may_hear_later(Snoops("log.csv")) and may_hear_later(Batches())


def test_copies_when_a_fit_is_asynchronous_then_workers_have_those_that_look_at_batches(tmp_path):
    assert has_copies_on_workers(Batches()) and has_copies_on_workers(Tracker())
    assert not has_copies_on_workers(keras.callbacks.ModelCheckpoint(str(tmp_path / "m.keras"), save_freq=3))
    assert not has_copies_on_workers(Adds())


def test_packages_when_a_board_is_among_the_callbacks_then_are_what_it_needs():
    boards = [keras.callbacks.TensorBoard(), keras.callbacks.TensorBoard(), Adds()]
    assert packages_of(boards) == ("tensorboard",) and packages_of([Adds()]) == ()


def test_rule_when_a_class_is_the_user_s_then_is_that_of_its_methods():
    assert rule_of(Adds()).duty is Duty.OWN and rule_of(Snoops("log.csv")).duty is Duty.WRITES
    assert set(BATCH_EVENTS) == {name for name in dir(keras.callbacks.Callback) if name.startswith("on_")} - {
        "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end",
        "on_predict_begin", "on_predict_end", "on_predict_batch_begin", "on_predict_batch_end",
    }  # fmt: skip
    assert Place.DRIVER.value == "the driver"


def test_monitors_when_no_epoch_will_have_them_then_are_refused_and_others_not():
    stopping, measures = keras.callbacks.EarlyStopping, ("loss", "accuracy")
    known = ["loss", "val_loss", "val_accuracy", "out_accuracy", "val_out_accuracy_1", "weighted_loss", "learning_rate"]
    check_monitors([*map(stopping, known), keras.callbacks.CSVLogger("log.csv")], measures)
    for callback in (stopping("val_los"), keras.callbacks.ReduceLROnPlateau("val_los")):
        with pytest.raises(ConfigurationError, match=r"Received: monitor='val_los'\. Did you mean 'val_loss'"):
            check_monitors([callback], measures)
    # What another one adds is known after an epoch alone, and what code of the user's measures.
    for other in (Adds(), keras.callbacks.LambdaCallback(on_epoch_end=print), keras.callbacks.Callback()):
        check_monitors([stopping("val_los"), other], measures)
    check_monitors([stopping("val_los")], None)
