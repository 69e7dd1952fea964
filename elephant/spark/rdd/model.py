"""SparkModel: training on an RDD of pairs, as Elephas has it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from pyspark import RDD

from elephant.backends.keras_private import metrics_in_order
from elephant.cluster.executors import awaited_slots, expected_slots, patient
from elephant.cluster.gpu_plan import ResourceRequest, plan, scheduling_settings
from elephant.cluster.row_source import RddRows, dealt, session_of
from elephant.cluster.spark_job import described
from elephant.config import FitConfig
from elephant.driver.coordinator import FitResult
from elephant.errors import ConfigurationError, brief_errors, warn_user
from elephant.monitor.progress import Progress
from elephant.options import FIT, OPTION, SERVERS, full_mode, options_of, refuse_unknown
from elephant.rank.input.tensors import blank_batch
from elephant.rank.job import BatchFunctions, TrainingJob, limited
from elephant.spark.class_weights import class_weights
from elephant.spark.evaluate import Evaluation, evaluate_rows
from elephant.spark.fit import description_of, open_checkpoints, train
from elephant.spark.model import preload_keras
from elephant.spark.params import check_fit
from elephant.spark.rdd.inference import Predictions, first_record, marked, predict, require_rdd, split_inputs
from elephant.spark.rdd.schema import plan_inputs, plan_training
from elephant.spark.saving.model_files import UserModel, write_model
from elephant.spark.transform import checked_batch_size, packed_model, require_evaluable, require_predicting
from elephant.task.predict_task import Prediction

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What SparkModel and its fit have arguments of their own for.
_GIVEN_ELSEWHERE = {
    "mode",
    "num_workers",
    "epochs",
    "batch_size",
    "validation_fraction",
    "frequency",
    "verbose",
    "port",
}
_OF_ROWS = ("class_weight", "augmentation")
OPTIONS = tuple(sorted({*_OF_ROWS, *(option.name for option in options_of(FIT, SERVERS))} - _GIVEN_ELSEWHERE))

_NUM_EVALUATED = 1024
# Arguments that users of Elephas, or of the estimator, may pass.
_EXPLAINED = {
    "parameter_server_mode": " Elephant has one protocol between workers and servers: leave it out.",
    "elephas_optimizer": " The servers apply the optimizer that the model was compiled with: leave it out.",
    "validation_fraction": " Pass validation_split to fit.",
}


def _arguments(function: Callable[..., Any]) -> list[str]:
    """Returns the names of a function's arguments, without what takes all others."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]


def plain_word(value: Any) -> Any:
    """Returns the value of a member of an enumeration, such as Elephas has for modes; other values as they are."""
    return getattr(value, "value", value)


def fit_config(options: Mapping[str, Any], port: int | None, **given: Any) -> FitConfig:
    """Returns the options of a fit, checked.

    Args:
        options: Those of `OPTIONS` that the user gave.
        port: The parameter server's; a synchronous fit has none, and does not mind.
        given: The fields of `elephant.config.FitConfig` that have arguments of their own.

    Raises:
        ConfigurationError: A value is out of its range, or two of them exclude each other.
    """
    given_class_weight(options)
    values = {name: value for name, value in options.items() if name not in _OF_ROWS}
    has_servers = given["mode"] != "synchronous" or options.get("aggregation") == "server"
    return limited(FitConfig.of({**values, **given, "port": port if has_servers else None}))


def given_class_weight(options: Mapping[str, Any]) -> dict[int, float] | str | None:
    """Returns the option ``class_weight``; None where there is none.

    Raises:
        ConfigurationError: It is neither a dictionary of weights by class nor "balanced".
    """
    weights: dict[int, float] | str | None = OPTION["class_weight"].value_of(options.get("class_weight") or None)
    return weights


def chosen_workers(
    session: SparkSession,
    config: FitConfig,
    *,
    wanted: int | None,
    num_partitions: int,
    note: Callable[[str], None],
) -> int:
    """Returns the number of workers: what is wanted, or one per partition, as far as they can run at the same time.

    Asynchronous workers that are asked for by number may be more: they take turns.

    Args:
        session: The Spark session.
        config: The options of the fit; its number of workers is not looked at.
        wanted: What the user asks for, or None.
        num_partitions: Partitions of the RDD.
        note: Told what was chosen in place of what.
    """
    asked = config.changed(num_workers=wanted or max(num_partitions, 1))
    request = ResourceRequest.of_fit(asked).named_in(session)
    profile = plan(scheduling_settings(session, request.gpu_resource), request).profile
    servers = config.asynchronous.parameter_servers if config.asynchronous.server_placement == "executors" else 0
    servers = 0 if config.is_synchronous else servers
    if wanted is None:
        slots = expected_slots(session, profile)
        if slots is None or slots - servers >= num_partitions:
            return max(num_partitions, 1)
        chosen = max(slots - servers, 1)
        note(f"{chosen} workers for {num_partitions} partitions: the cluster has {slots} task slots")
        return chosen
    if not config.takes_steps_together:
        return wanted
    slots = awaited_slots(session, wanted, patient(session, config.timeouts, wanted).slot_patience_s, note, profile)
    if slots is None or not 0 < slots < wanted:
        return wanted
    warn_user(
        f"num_workers={wanted}: expected as many task slots, because synchronous workers take every step together. "
        f"Received: {slots}. The fit has {slots} workers; give the application more executors or cores for more."
    )
    return slots


class SparkModel:
    """Trains a Keras model on RDDs, on several Spark executors.

    The names are those of Elephas' ``SparkModel``; what happens is what `elephant.KerasEstimator` does, so
    the modes mean more than they do there. Synchronously, N workers take every step together, and train as
    one process would on batches of ``N * batch_size`` records; there is no average of models that were trained apart,
    unless ``frequency`` asks for one. Asynchronously, workers push gradients (or, with another frequency, how far
    their weights have moved) to a parameter server in a process of its own, whose optimizer applies them.

    Args:
        model: A compiled `keras.Model`; a function without arguments that returns one; or the path of a ``.keras``
            or ``.h5`` file. Its present weights and optimizer state are where training starts.
        mode: ``"synchronous"`` (``"sync"``), ``"asynchronous"`` (``"async"``), or ``"hogwild"``: asynchronous without
            locks at the server; or ``"gossip"``: workers that average their weights in pairs, without a server.
        frequency: ``"batch"`` exchanges gradients at every step. ``"epoch"``, or an integer k, lets workers train
            alone, and exchanges weights once an epoch, or every k steps.
        num_workers: Workers. None takes one per partition of the RDD, as far as the cluster has task slots.
            Synchronous workers need a slot each at the same time: where there are fewer, a warning says how many
            workers the fit has. Asynchronous ones take turns.
        batch_size: Records per worker and step, unless ``fit`` says otherwise.
        custom_objects: Custom layers, losses, metrics and functions by name.
        port: The parameter server's port; None takes a free one. Synchronous fits have no server.
        options: Those of `elephant.KerasEstimator` that concern the fit, in snake case, such as ``learning_rate``,
            ``class_weight`` and ``checkpoint_path``. `elephant.spark.rdd.model.OPTIONS` has their names, and an unknown
            one is an error that lists them.

    Attributes:
        training_histories: What each call of ``fit`` has seen: one number per epoch by metric.
        training_statistics: What was counted in the last fit: `KerasModel.training_statistics`.
        plan: Where each rank of the last fit ran: `KerasModel.plan`.

    Raises:
        ConfigurationError: The model is not compiled, or a value is out of range.
        TypeError: An argument is not known.

    Examples:
        >>> spark_model = SparkModel(model, mode="synchronous", num_workers=2)  # doctest: +SKIP
        >>> spark_model.fit(sc.parallelize(pairs), epochs=10, validation_split=0.1)  # doctest: +SKIP
        >>> spark_model.predict(x_test), spark_model.model.get_weights()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: keras.Model | Callable[[], keras.Model] | str | os.PathLike[str],
        mode: str = "synchronous",
        frequency: str | int = "batch",
        num_workers: int | None = None,
        batch_size: int = 32,
        custom_objects: Mapping[str, Any] | None = None,
        port: int | None = None,
        **options: Any,
    ) -> None:
        known = [*_arguments(SparkModel), *OPTIONS]
        refuse_unknown(type(self).__name__, options, known, explained=_EXPLAINED)
        preload_keras()
        self.custom_objects = dict(custom_objects or {})
        self.mode, self.frequency = full_mode(mode), plain_word(frequency)
        self.num_workers, self.batch_size, self.port = num_workers, batch_size, port
        self._options = options
        self.training_histories: list[dict[str, list[float]]] = []
        self.training_statistics: dict[str, Any] = {}
        self.plan: list[dict[str, Any]] = []
        self._live = UserModel(model, self.custom_objects)
        self._check_workers()
        self._config(epochs=1, batch_size=batch_size, num_workers=1)

    @property
    def model(self) -> keras.Model:
        """The user's own model, with the weights and the optimizer's state of the last fit, compiled as it was."""
        return self._live.model

    @model.setter
    def model(self, value: keras.Model) -> None:
        self._live = UserModel(value, self.custom_objects)

    @property
    def master_network(self) -> keras.Model:
        """Elephas' name of `model`."""
        return self.model

    @master_network.setter
    def master_network(self, value: keras.Model) -> None:
        self.model = value

    def get_config(self) -> dict[str, Any]:
        """Returns the options of training, without values that JSON does not hold."""
        plain: dict[str, Any] = {
            name: value for name, value in self._options.items() if isinstance(value, (str, int, float, type(None)))
        }
        weights = given_class_weight(self._options)
        if weights is not None:
            plain["class_weight"] = weights
        return {
            "mode": self.mode,
            "frequency": self.frequency,
            "num_workers": self.num_workers,
            "batch_size": self.batch_size,
            "port": self.port,
            **plain,
        }

    @brief_errors
    def fit(
        self,
        rdd: RDD[Any],
        epochs: int = 1,
        batch_size: int | None = None,
        verbose: int | str = 1,
        validation_split: float = 0.0,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        validation_data: Any = None,
        shuffle: bool | None = None,
        class_weight: Mapping[int, float] | str | None = None,
        steps_per_epoch: int | None = None,
        **unknown: Any,
    ) -> keras.callbacks.History:
        """Trains the model; a second call goes on from where the first one ended.

        Args:
            rdd: Tuples (x, y) or (x, y, weight). x and y are numbers, arrays, Spark vectors, or dictionaries, tuples
                and lists of these, as the model's inputs and outputs are; a weight is a number, or one by output.
                x alone for a model that is trained without labels.
            epochs: Passes over the records.
            batch_size: Records per worker and step; None takes the constructor's.
            verbose: 0 silent, 1 or ``"auto"`` plan, progress and a table of epochs, 2 without the progress.
            validation_split: Share of the records kept for validation, drawn at random by ``seed``, in [0, 1).
            callbacks: Keras callbacks, which run where those of `elephant.KerasEstimator` do.
            validation_data: Records for validation, as an RDD or as a tuple of arrays (x, y), instead of a split.
            shuffle: Whether each worker draws its records in a new order every epoch; by default it does.
            class_weight: Weights by class, or ``"balanced"`` as `elephant.KerasEstimator` has it.
            steps_per_epoch: Steps of an epoch; None means all records.
            unknown: Nothing: any other argument is an error.

        Returns:
            Keras' history: ``history`` is one number per epoch by metric, over all workers.

        Raises:
            DataError: Records that cannot be trained on.
            ClusterError: The cluster cannot run the fit.
            TrainingError: A worker or a server failed; see `elephant.errors`.
            TypeError: ``rdd`` is no RDD, or an argument is not known.
        """
        refuse_unknown(f"{type(self).__name__}.fit", unknown, _arguments(SparkModel.fit)[1:], explained=_EXPLAINED)
        given = {"shuffle": shuffle, "class_weight": class_weight, "steps_per_epoch": steps_per_epoch}
        options = {**self._options, **{name: value for name, value in given.items() if value is not None}}
        require_rdd("fit", rdd)
        config = self._config(
            options,
            epochs=epochs,
            batch_size=self.batch_size if batch_size is None else batch_size,
            num_workers=1,
            validation_fraction=validation_split,
            verbose=verbose,
        )
        result = self._train(rdd, validation_data, options, config, tuple(callbacks or ()))
        self.training_histories.append(result.history)
        self.training_statistics, self.plan = result.statistics, result.plan
        history = keras.callbacks.History()
        history.history = result.history
        history.epoch = list(range(max(map(len, result.history.values()), default=0)))
        return history

    def _train(
        self,
        rdd: RDD[Any],
        validation_data: Any,
        options: Mapping[str, Any],
        config: FitConfig,
        callbacks: tuple[keras.callbacks.Callback, ...],
    ) -> FitResult:
        open_checkpoints(session_of(rdd), config)
        first, notes = first_record(rdd, "fit"), list[str]()
        spec = self._live.source()
        check_fit(config, spec.info, callbacks)
        num_workers = chosen_workers(
            session_of(rdd), config, wanted=self.num_workers, num_partitions=rdd.getNumPartitions(), note=notes.append
        )
        config = config.changed(num_workers=num_workers)
        plan = plan_training(first, spec.info, marked=validation_data is not None)
        if validation_data is not None:
            rdd, first = dealt(marked(rdd, validation_data, config), num_workers), (first, False)
        with described(session_of(rdd), description_of(config)):
            job = TrainingJob(
                spec,
                callbacks,
                config,
                plan.schema,
                class_weight=class_weights(
                    given_class_weight(options), spec, plan.schema, lambda _: RddRows(rdd, plan, first)
                ),
                preprocessing=BatchFunctions(augment=options.get("augmentation")),
            )
            with Progress(
                num_workers=config.num_ranks,
                epochs=config.epochs,
                verbose=config.verbose,
                waits_for_all=config.waits_for_all,
            ) as progress:
                for text in notes:
                    progress.note(text)
                result = train(RddRows(rdd, plan, first), job, progress)
        self._live.take(result, config)
        return result

    @brief_errors
    def predict(self, data: Any, batch_size: int = _NUM_EVALUATED, verbose: int = 0) -> Any:
        """Returns one prediction per row: an array, or several in the structure of the model's outputs.

        Args:
            data: Arrays, as Keras takes them, are predicted here on the driver. An RDD, each of whose records is
                one row of the model's input, is predicted on the executors.
            batch_size: Rows that go through the model at a time.
            verbose: As Keras has it, for arrays.

        Returns:
            A list of predictions for arrays. For an RDD an RDD of them, in the same order and
            partitions, which can be used as a list as well: `elephant.spark.rdd.inference.Predictions`.
        """
        if not isinstance(data, RDD):
            outputs = self.model.predict(
                split_inputs(data, self._live.input_widths()), batch_size=batch_size, verbose=verbose
            )
            if isinstance(outputs, np.ndarray):
                return list(outputs)
            num_rows = len(keras.tree.flatten(outputs)[0])
            return [keras.tree.map_structure(lambda part, row=row: part[row], outputs) for row in range(num_rows)]
        first = data.take(1)
        if not first:
            return Predictions(data.map(list))
        spec = self._live.source()
        require_predicting(spec.info)
        plan = plan_inputs(first[0], spec.info)
        size = checked_batch_size(batch_size, "batch_size")
        task = Prediction(model=packed_model(spec), schema=plan.schema, outputs=spec.info.y, batch_size=size)
        return predict(data, task, plan)

    @brief_errors
    def evaluate(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        batch_size: int = _NUM_EVALUATED,
        verbose: int = 0,
        return_dict: bool = False,
    ) -> Any:
        """Returns the loss, followed by the metrics if there are any, over all rows exactly.

        Args:
            x: Arrays, with ``y``, which are evaluated here on the driver; or an RDD of records as those of ``fit``,
                which is evaluated on the executors.
            y: Labels; None with an RDD.
            sample_weight: As Keras takes it; None with an RDD.
            batch_size: Rows that go through the model at a time.
            verbose: As Keras has it, for arrays.
            return_dict: Whether to return a dictionary by name.

        Returns:
            A number, or a list of numbers in the order in which the metrics were compiled.
        """
        if not isinstance(x, RDD):
            return self.model.evaluate(
                split_inputs(x, self._live.input_widths()),
                y,
                sample_weight=sample_weight,
                batch_size=batch_size,
                verbose=verbose,
                return_dict=return_dict,
            )
        if y is not None or sample_weight is not None:
            raise ConfigurationError(
                "evaluate: expected an RDD of (x, y) alone. Received: y or sample_weight besides it."
            )
        first, spec = first_record(x, "evaluate"), self._live.source()
        require_evaluable(spec.info)
        plan = plan_training(first, spec.info)
        size = checked_batch_size(batch_size, "batch_size")
        evaluation = Evaluation(model=packed_model(spec), schema=plan.schema, batch_size=size)
        results = evaluate_rows(RddRows(x, plan, first), evaluation)
        if return_dict:
            return results
        # Metrics are made, and with them their order, when the first batch comes.
        self.model.test_on_batch(*blank_batch(plan.schema, plan.row_shapes))
        self.model.reset_metrics()
        return metrics_in_order(self.model, results)

    @brief_errors
    def save(self, path: str | os.PathLike[str], overwrite: bool = True) -> None:
        """Writes the model, its optimizer's state, and how it is trained to one file, which Keras opens too.

        Args:
            path: Ends in ``.keras`` or ``.h5``: a path of this machine, or a URL of a file system that Hadoop or
                fsspec knows.
            overwrite: Whether to replace a file that is there.

        Raises:
            ConfigurationError: Keras cannot save the model in this form, or the path ends otherwise.
            FileExistsError: The file is there, and is not to be replaced.
        """
        config = {"class_name": type(self).__name__, "config": self.get_config()}
        write_model(path, self.model, config, overwrite=overwrite)

    def _config(self, options: Mapping[str, Any] | None = None, **given: Any) -> FitConfig:
        options = self._options if options is None else options
        return fit_config(options, self.port, mode=self.mode, frequency=self.frequency, **given)

    def _check_workers(self) -> None:
        wanted = self.num_workers
        if wanted is not None and (not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1):
            raise ConfigurationError(f"num_workers: expected an integer of at least 1, or None. Received: {wanted!r}.")
