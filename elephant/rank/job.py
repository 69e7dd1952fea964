"""Training job: what a process needs to train, and the model prepared for it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import keras
import numpy as np

from elephant.backends import current
from elephant.checkpoint.state import FitState
from elephant.config import FitConfig
from elephant.data.epoch_plan import EpochPlan, random_state, split_validation
from elephant.data.schema import RAGGED, DataSchema, RowSpec
from elephant.errors import ConfigurationError, warn_user
from elephant.modeling.model_spec import ModelSpec
from elephant.modeling.variables import (
    BFLOAT16,
    FLOAT16,
    build_variables,
    lower_precision,
    random_generators,
    rated_optimizers,
)
from elephant.monitor.events import CallbacksDone, Event
from elephant.rank.callbacks.callback_rules import check_monitors
from elephant.rank.executor import computes_on_gpu
from elephant.storage.folder import Folder, folder_at

NUMBERS, WEIGHTS = "numbers", "weights"
# The number of the framework's own generator among those of a model, which are counted from zero.
_OF_FRAMEWORK = 2**31
# Numbers of mallopt(3) in glibc.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_HELD_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class BatchFunctions:
    """The user's functions on batches, which run on the workers.

    Args:
        preprocess: From a batch, a dictionary of columns, to what the model takes; None takes columns as they are. It
            runs once and its result is kept, or for every batch where it takes a random generator. None as well where
            it has run before the fit, for several fits.
        augment: From a batch and a random generator to a batch, for every training batch of every epoch; or None.
        target_schema: What preprocess is to make of the columns, as far as it is known before it has run.
    """

    preprocess: Callable[..., Any] | None = None
    augment: Callable[..., Any] | None = None
    target_schema: DataSchema | None = None

    @property
    def given(self) -> list[Callable[..., Any]]:
        """The functions that there are."""
        return [one for one in (self.preprocess, self.augment) if one is not None]


@dataclass(frozen=True)
class TrainingJob:
    """Job of every rank: the same bytes for all.

    Args:
        model: The model to train.
        callbacks: The user's Keras callbacks. In a process that trains, those that run on the driver are replaced by
            `keras.callbacks.Callback`, which does nothing.
        config: The options of the fit.
        schema: What the rows hold, as Spark sends them.
        class_weight: Weights by class, or None.
        preprocessing: The user's functions on batches.
        state: What the fit goes on from; None begins it.
        driver_callbacks: More callbacks, which run on the driver whatever they look at.
        driver_reads: `NUMBERS` or `WEIGHTS`, which rank 0 tells callbacks on the driver at the ends of epochs, and
            waits for them; None where there are none.
        outside: Variables outside of the model that callbacks on the workers share with it; see
            `elephant.rank.callbacks.shared_state`. Their values come back behind the model's variables.
        most_steps: Steps of an epoch at most: the limit that Keras has on the driver; None where it has none.
        traced: Whether ranks tell when each of their steps began, and what its seconds went into.
        folder_of: Opens the folders of URLs that callbacks of this process write to.

    Raises:
        ConfigurationError: Batches are to be made by length, and no column holds sequences; or a callback gives weights
            back, of which tables are none.
        UnsupportedError: The options have another way of training than the model's tables can be divided in.
    """

    model: ModelSpec
    callbacks: tuple[keras.callbacks.Callback, ...]
    config: FitConfig
    schema: DataSchema
    class_weight: Mapping[int, float] | None = None
    preprocessing: BatchFunctions = field(default_factory=BatchFunctions)
    state: FitState | None = None
    driver_callbacks: tuple[keras.callbacks.Callback, ...] = ()
    driver_reads: str | None = None
    outside: tuple[Any, ...] = ()
    most_steps: int | None = field(default_factory=lambda: _limit_of_keras("max_steps_per_epoch"))
    traced: bool = False
    folder_of: Callable[[str], Folder] = folder_at

    def __post_init__(self) -> None:
        self.model.info.check_tables(self.config)
        check_monitors([*self.callbacks, *self.driver_callbacks], self.model.info.measures)
        restores = any(getattr(callback, "restore_best_weights", False) for callback in self.callbacks)
        if self.model.info.sharded and restores:
            raise ConfigurationError(
                "callbacks: expected none that gives the model's weights back, because the table of the "
                f"ShardedEmbedding {self.model.info.sharded[0]!r} is none of them. Received: one with "
                "restore_best_weights=True. Set it to False, and pass keepBest with a checkpointPath."
            )
        has_sequences = any(part.kind == RAGGED for part in self.schema.batch_fields)
        if self.config.bucket_by_length and not has_sequences and self.preprocessing.target_schema is None:
            raise ConfigurationError(
                "bucketByLength: expected a column of sequences, for an input whose first dimension is None. "
                "Received: rows that are all of one length. Leave bucketByLength out."
            )

    def __getstate__(self) -> dict[str, Any]:
        # Another process has no session of Spark, and opens what its Python knows.
        return {**vars(self), "folder_of": folder_at}

    @property
    def first_epoch(self) -> int:
        """The epoch to begin with, from zero."""
        return 0 if self.state is None else self.state.epochs

    @property
    def first(self) -> tuple[int, int]:
        """Epoch and step to begin with, from zero; workers at their own pace ask their servers for the step."""
        step = 0 if self.state is None or not self.config.is_synchronous else self.state.step
        return self.first_epoch, step

    @property
    def model_schema(self) -> DataSchema:
        """Schema of the model's input: another one than the rows' where these are preprocessed."""
        return self.schema if self.preprocessing.target_schema is None else self.preprocessing.target_schema


def _limit_of_keras(name: str) -> int | None:
    # Not in every Keras 3.
    limit: int | None = getattr(keras.config, name, lambda: None)()
    return limit or None


def limited(config: FitConfig) -> FitConfig:
    """Returns the options of a fit with no more epochs than ``keras.config.max_epochs()`` allows, and warns of it."""
    most = _limit_of_keras("max_epochs")
    if most is None or config.epochs <= most:
        return config
    warn_user(f"keras.config.max_epochs() limits the fit to {most} of {config.epochs} epochs.")
    return config.changed(epochs=most)


class ExchangeCounts(Protocol):
    """Counts of a rank's exchanges; see `elephant.collective.communicator.Communicator`."""

    @property
    def waited_s(self) -> float:
        """Seconds so far in which training stood still for them."""

    @property
    def bytes_sent(self) -> int:
        """Bytes sent so far."""


@dataclass(frozen=True)
class SummedCounts:
    """Counts of several ways on which a rank exchanges."""

    ways: Sequence[ExchangeCounts]

    @property
    def waited_s(self) -> float:
        """Seconds so far in which training stood still for them."""
        return sum(way.waited_s for way in self.ways)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent so far."""
        return sum(way.bytes_sent for way in self.ways)


class StepReporter(Protocol):
    """Reporter of a rank's steps."""

    def send(self, event: Event) -> None:
        """Something has happened on this rank."""


class Reporter(StepReporter, Protocol):
    """Reporter of a rank.

    Attributes:
        state_wanted: Whether the driver has asked for a state since this was set to false.
    """

    def epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """An epoch has ended; logs are those of all ranks together."""

    def await_callbacks(self, timeout_s: float) -> CallbacksDone | None:
        """Returns the requests of callbacks on the driver, or None where they take longer."""

    @property
    def is_free(self) -> bool:
        """True if no state that was kept is still on its way."""

    state_wanted: bool

    def await_receipt(self, timeout_s: float) -> bool:
        """Waits until the driver has the last state, or for so long; returns whether it has."""

    def keep(self, state: FitState) -> None:
        """This is a state from which the fit could go on."""

    def result(self, variables: Sequence[np.ndarray], rows: RowSpec) -> None:
        """Training has ended; these are the model's variables."""


def epoch_plan(job: TrainingJob, num_rows: Sequence[int], num_marked: Sequence[int]) -> EpochPlan:
    """Returns the plan that all ranks compute alike from each other's row counts.

    Of a model in stages, the first ranks have the rows of the replicas, and the others none.
    """
    config, schema = job.config, job.schema
    if config.pipeline_stages is not None:
        num_rows, num_marked = (_by_replica(counts, config.num_replicas) for counts in (num_rows, num_marked))
    by_column = schema.validation is not None
    validation = tuple(num_marked) if by_column else split_validation(num_rows, config.validation_fraction)
    training = tuple(rows - kept for rows, kept in zip(num_rows, validation, strict=True))
    return EpochPlan(
        training_rows=training,
        validation_rows=validation,
        batch_size=config.rank_batch_size,
        steps_per_epoch=config.steps_per_epoch,
        most_steps=job.most_steps,
    )


def _by_replica(counts: Sequence[int], num_replicas: int) -> list[int]:
    """Returns counts of ranks added up over the stages of each replica, in the places of its ranks of the last one.

    >>> _by_replica([1, 2, 3, 4], 2), _by_replica([1, 2], 2)
    ([4, 6, 0, 0], [1, 2])
    """
    sums = [sum(counts[replica::num_replicas]) for replica in range(num_replicas)]
    return sums + [0] * (len(counts) - num_replicas)


def as_numbers(logs: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the numbers among logs as plain ones: floats, and lists of them for metrics with a value per class.

    A metric whose result is a dictionary has several, under the names that it gives them, as in Keras' history.

    >>> as_numbers({"loss": np.float32(0.5), "counts": {"seen": 3, "kept": 2}})
    {'loss': 0.5, 'seen': 3.0, 'kept': 2.0}
    """
    numbers: dict[str, Any] = {}
    for name, value in (logs or {}).items():
        if isinstance(value, dict):
            numbers |= as_numbers(value)
            continue
        if callable(getattr(value, "detach", None)):
            # PyTorch's on a GPU, which numpy does not take.
            value = value.detach().cpu()
        try:
            array = np.asarray(value, dtype=np.float64)
        except (TypeError, ValueError):
            continue
        numbers[name] = array.tolist()
    return numbers


def set_up_process(*, overlaps: bool = False) -> None:
    """Sets up the process of a rank, before it computes.

    The C library, where it is glibc, is told to keep the memory of arrays that are freed. Without that, every step
    gets the pages of large ones from the system anew.

    Args:
        overlaps: Whether the backward pass goes on while gradients are sent.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # One of the two alone would turn off the other one's adaptation.
    if mallopt is not None and mallopt(_MMAP_THRESHOLD, _HELD_BYTES):
        mallopt(_TRIM_THRESHOLD, _HELD_BYTES)
    current().prepare_process(overlaps=overlaps)


def prepared_model(
    job: TrainingJob, rows: RowSpec, *, num_ranks: int, policy: str | None = None, has_values: bool = True
) -> keras.Model:
    """Builds a job's model, and gives its optimizers the learning rate that the fit asks for.

    Keras' settings and its random seed are those of the whole process afterwards.

    Args:
        policy: What the model is to compute in, of those of `elephant.modeling.variables`; None leaves it as it is.
        has_values: Whether the weights are to have values, and the optimizer its state; see
            `elephant.modeling.model_spec.ModelSpec.build_structure`.
    """
    config = job.config
    job.model.settings.apply()
    # What layers and model functions draw without a seed of their own, they draw from this one.
    keras.utils.set_random_seed(config.seed % 2**32)
    if has_values:
        model = job.model.build()
        build_variables(model, rows)
    else:
        model = job.model.build_structure()
    _unwrap_input(model, job.model_schema)
    if config.learning_rate is not None:
        model.optimizer.learning_rate = config.learning_rate
    if config.scale_learning_rate:
        for optimizer in rated_optimizers(model):
            factor = config.batches_of(num_ranks)
            optimizer.learning_rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate)) * factor
    for optimizer in rated_optimizers(model):
        current().fuse_update(optimizer)
    if policy is not None:
        lower_precision(model, policy)
    return model


def _unwrap_input(model: keras.Model, schema: DataSchema) -> None:
    """Has steps of a model's own get an input that comes alone as it is, as Keras gives it where rows are in arrays.

    Of a generator, which most backends read, Keras takes tuples alone.
    """
    if schema.labels or schema.inputs_as_labels or isinstance(schema.x, (tuple, list)):
        return
    for name in ("train_step", "test_step"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            setattr(model, name, functools.partial(_step_of_input, getattr(model, name)))


def _step_of_input(step: Callable[..., Any], *given: Any) -> Any:
    """Calls a step with its batch, and on JAX with the state before it."""
    *state, data = given
    is_wrapped = isinstance(data, (tuple, list)) and len(data) == 1
    return step(*state, data[0] if is_wrapped else data)


def mixed_policy(config: FitConfig) -> str | None:
    """Returns the policy of mixed precision that suits this process; None where the fit does not ask for one.

    GPUs compute in float16, of all kinds that there are; processors, where they have such
    instructions at all, in bfloat16, which needs no scaling of the loss.
    """
    if not config.mixed_precision:
        return None
    return FLOAT16 if computes_on_gpu(keras.config.backend()) else BFLOAT16


def reseed(model: keras.Model, seed: int, rank: int, *, only: keras.layers.Layer | None = None) -> None:
    """Gives the random generators of a worker's model a state of its own.

    Ranks that started with the same generators would drop the same units in every step. Rank 0 keeps the model's.

    Args:
        only: A part of the model, whose generators alone get one; None means all.
    """
    own = {id(generator) for generator in random_generators(model if only is None else only)}
    if rank > 0:
        current().seed_generator(int(random_state(seed, rank, _OF_FRAMEWORK)[0]))
        for index, generator in enumerate(random_generators(model)):
            if id(generator) in own:
                generator.assign(random_state(seed, rank, index).astype(generator.dtype))
