"""`KerasEstimator`: a Spark DataFrame goes in, one Keras model trained across executors comes out."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, cast, overload

import keras
from pyspark import inheritable_thread_target
from pyspark.ml import Estimator
from pyspark.ml.param import Param
from pyspark.sql import DataFrame

from elephant.cluster.session import is_true, setting
from elephant.cluster.spark_job import described
from elephant.cluster.spark_private import fold_asked_for, reset_uid, unowned_parent
from elephant.config import FitConfig, Timeouts
from elephant.driver.coordinator_location import coordinates_on_executors
from elephant.driver.verification import Verification, config_to_verify, verified
from elephant.errors import ClusterError, ConfigurationError, DataError, brief_errors
from elephant.kinds import BALANCED
from elephant.modeling.model_spec import built_model
from elephant.monitor.handle import FitHandle, followers
from elephant.monitor.listeners import EventFile, FitListener, Listeners, mlflow_listeners
from elephant.monitor.progress import Progress
from elephant.monitor.summary import FitSummary, card
from elephant.monitor.trace import TraceFile
from elephant.options import OPTIONS, refuse_unknown
from elephant.rank.job import TrainingJob
from elephant.spark.class_weights import class_weights
from elephant.spark.file_formats import Files
from elephant.spark.fit import description_of, remove_checkpoints, train
from elephant.spark.hadoop_files import is_written_by_jobs, qualified, write_file
from elephant.spark.model import KerasModel, model_facts, model_to_train, preload_keras
from elephant.spark.params import (
    TrainingParams,
    backup_of,
    batch_functions,
    chosen_values,
    fit_config,
    noting_keywords,
    optional,
    plain_params,
    require_own,
    set_given,
)
from elephant.spark.prepared import FitsOfGrid, PreparedFrame, rows_of_dataset
from elephant.spark.saving.persistence import CODE, SavedParts, SavedStage
from elephant.spark.saving.streaming import TrainingStream, start_stream
from elephant.spark.training_data import (
    TrainingData,
    active_session,
    dataset_of,
    is_frame,
)
from elephant.spark.tuning.trial_runs import GridRuns
from elephant.storage.filesystem import NO_ROOM
from elephant.task.rendezvous import installed_versions
from elephant.training.pipeline import require_stages

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import SparkSession
    from typing_extensions import Unpack

    from elephant.spark.param_types import Arguments, Options

_PARAMS = {option.param for option in OPTIONS}
_KNOWN = sorted([*_PARAMS, "model", "customObjects"])
_TRACE = "spark.elephant.trace"
Dataset: TypeAlias = "DataFrame | PreparedFrame | pd.DataFrame | str | os.PathLike[str] | Files"
ParamMap: TypeAlias = "dict[Param[Any], Any]"


class KerasEstimator(Estimator, TrainingParams, SavedStage):
    """Trains a Keras model on a DataFrame, on several Spark executors.

    Which column goes where, and what it becomes, docs/models.md tells for every kind of model.

    Synchronously: every step, each of ``numWorkers`` workers computes the gradient of
    ``batchSize`` of its own rows; the gradients are averaged over all workers, weighted by
    rows, and applied by all. So N workers train as one process would on batches of
    ``numWorkers * batchSize`` rows. No row is dropped and none used twice in an epoch.

    Asynchronously: each worker trains at its own pace against a parameter server beside the
    driver, which keeps the weights. Nobody waits for anybody; a worker that is lost is started
    again by Spark, and goes on where it was.

    Args:
        model: A compiled `keras.Model`, or a function without arguments that returns one; the path of a saved one,
            ``.keras`` or ``.h5``, local or wherever Spark's Hadoop client reads; or a fitted `KerasModel`. Its
            present weights, and its optimizer's state, are where training starts.
        featuresCol: A column of numbers, arrays of them, ml or mllib vectors, dates, timestamps, or strings for
            a model that takes these; or a list of numeric columns, which make one vector. Flat rows take the
            model's input shape. For a model with several inputs: a dictionary of these by the name of the input, or a
            list in the order of the inputs. One that holds lists is in their order in any case.
        labelCol: A column of numbers, booleans, arrays of numbers or ml vectors; or a list of numeric columns, which
            make one vector. For a model with several outputs: a dictionary of these by the name of the output, or a
            list of one for each output, in their order. An output without loss and metric needs none. None trains
            without: an autoencoder on its own inputs, a model with a ``train_step`` of its own on what that makes of
            them.
        numWorkers: Workers. In synchronous mode each needs a task slot at the same time. A pair such as ``(2, 8)``
            makes the fit elastic: it begins with as many workers as there are slots, from 2 on and up to 8, goes on
            with fewer after a loss, and grows again at the end of an epoch. A step trains on ``8 * batchSize`` rows
            whoever is there. See ``docs/clusters.md``.
        epochs: Passes over the training rows.
        batchSize: Rows per worker and step.
        validationFraction: Share of the rows kept for validation, drawn by ``seed``, in [0, 1).
        mode: ``"synchronous"`` (``"sync"``), ``"asynchronous"`` (``"async"``), or ``"hogwild"``: asynchronous without
            locks at the server, which has gained no speed in measurements and loses up to a few updates per thousand;
            or ``"gossip"``: workers at their own pace that average their weights in pairs, without a server.
        callbacks: Keras callbacks, or a single one; they see the metrics of all workers. Those that look at epochs, and
            at the begin and end of training, alone run on the driver, on the object that you passed. Those that look
            at batches, and those of Keras that decide about training, such as ``EarlyStopping``, run on the workers.
            In asynchronous modes all have their epochs on the driver. See ``docs/callbacks.md``.
        checkpointPath: A folder for checkpoints of the fit, on any file system that Spark or fsspec reaches.

    Other Parameters: data
        customObjects: Custom layers, losses and metrics by name, for a model that is given by a path. Those that
            a `keras.Model` holds are found.
        weightCol: A column of sample weights, or a dictionary of them by the name of the output; None weighs
            all rows alike. A row has one number, or an array in the shape of its loss, such as one number per token.
        classWeight: Weights by class, which weigh the loss of rows in training, for a model with one output and
            no weightCol. Classes without one weigh 1. ``"balanced"`` counts the labels of all rows that are not marked
            for validation, in a Spark job before the fit, and weighs each class by rows / (classes * its rows).
        validationIndicatorCol: A column of booleans, or of 0 and 1; true keeps a row for validation.
        preprocessing: A function from a batch, a dictionary of columns as arrays, to what the model takes. It runs on
            the workers, and in ``transform``. Its result is kept, unless a second argument gets a
            `numpy.random.Generator`: then it runs again for every batch. featuresCol names the columns that it gets,
            of any type. See ``docs/preprocessing.md``.
        augmentation: A function from a batch and a `numpy.random.Generator` to a batch. It runs on every training
            batch of every epoch, with a generator seeded by the fit's seed, the worker and the epoch.
        shuffle: Whether each worker draws its rows in a new order every epoch.
        seed: Source of everything random in the fit, except what the model's layers drew already.
        cache: Where a worker keeps its rows: ``"disk"`` memory-maps them, ``"memory"`` holds them.
        stepsPerEpoch: Steps of an epoch, which goes on in the rows where the last one ended; None means all rows.
        bucketByLength: Whether batches are made of sequences of like length, so that little is padded.

    Other Parameters: training
        learningRate: Replaces the optimizer's; None keeps it.
        scaleLearningRate: Multiplies the learning rate by ``numWorkers``; see also `elephant.LearningRateWarmup`.
        frequency: ``"batch"`` averages the gradients of all workers at every step. An integer k, or
            ``"epoch"``, lets workers train alone and averages their weights every k steps, or once an
            epoch: fewer exchanges for slow networks, and no longer what one process does. Asynchronous
            workers push gradients, or the differences that k steps or an epoch have made.
        aggregation: Where synchronous workers' gradients are averaged: ``"allreduce"`` among the workers, or
            ``"server"`` at parameter servers. There workers are ordinary Spark tasks: one that is lost is started again
            while the others wait, and dynamic allocation works. See docs/parallelism.md.
        compression: How gradients are encoded where they cross hosts: ``"bfloat16"``, ``"float16"``,
            ``"int8"``, ``"topk"`` and more; None sends them as they are. See `elephant.compression`.
            Asynchronous workers and servers encode what they exchange as ``"bfloat16"``, ``"float16"``,
            ``"int8"`` or ``"int8:feedback"``.
        mixedPrecision: Whether workers compute in 16 bits where the model's layers leave that open.
        syncBatchNorm: Has batch normalization use the mean and variance of all workers' rows in a
            step, and not of each worker's own. It costs two exchanges per layer and step.
        allowBatchCoupledLoss: Lets a loss couple the rows of a batch (pairs of rows, a mean over a mask of its own),
            which is refused otherwise: each worker computes it on its own rows.
        shardOptimizer: Whether each worker keeps the optimizer's state of a part of the weights alone (ZeRO, stage 1).
            It updates that part, and gets the others from the other workers: half as many bytes more in each step,
            and the same results. See ``docs/parallelism.md``.
        distribution: On JAX, `keras.distribution.ModelParallel`, or a `LayoutMap`, by which Keras divides the layers
            among the workers' devices: the mesh has one device for each, of which only the number counts here. None
            gives each worker the whole model. See ``docs/parallelism.md``.
        pipelineStages: Parts of the model, one after the other, each on workers of its own: a number, or the names of
            the layers with which the second and later ones begin. numWorkers is a multiple of it, and a step trains on
            batchSize rows for each copy of the model. None gives each worker the whole model. See
            ``docs/parallelism.md``.
        microBatches: Parts of a batch that follow one another through the stages.

    Other Parameters: progress
        verbose: 0 silent, 1 or ``"auto"`` plan, a live line of progress and a table of epochs, 2 without the live
            line, which files do not get in any case.
        driverCallbacks: More callbacks, or a single one, which run on the driver whatever they look at; and
            instances of `elephant.FitListener`.
        eventsPath: A folder, on any file system that Spark or fsspec reaches, where each fit leaves a file of what
            happened in it, as lines of JSON; with the Spark setting ``spark.elephant.trace`` also a trace of its ranks
            and their steps, to be opened in Perfetto (ui.perfetto.dev). None writes none. See ``docs/progress.md``.

    Other Parameters: failures
        checkpointEpochs: Epochs between two checkpoints.
        checkpointSeconds: Seconds between two checkpoints, wherever in an epoch they fall; None makes them at ends of
            epochs alone.
        keepBest: A metric, such as ``"val_loss"``: the checkpoint of the best epoch by it is kept beside the last two.
        resume: Whether to go on from the last checkpoint in checkpointPath, where there is one.
        maxRestarts: How often a fit goes on after it has lost a worker, from its last state. With a pair of
            numWorkers, 0 means: as long as it comes further between two losses.
        timeouts: How long waits may last: `elephant.config.Timeouts`, or seconds by its names.

    Other Parameters: security
        encryption: Whether all connections of the fit are encrypted, by TLS 1.3 with a key pair of its own. None
            encrypts them where Spark is told to encrypt; False does not, whatever Spark is told.
        ports: The first and the last port that the driver and workers may listen on, such as ``(40000, 40100)``, for
            firewalls. None takes those of the Spark setting ``spark.elephant.ports``, or any.

    Other Parameters: GPUs
        useGpu: True demands a GPU for every worker, False hides them, ``"auto"`` takes those that Spark assigns or
            the hosts have. See ``docs/gpus.md``.
        gpusPerWorker: GPUs of each worker. Each is one rank; the worker's rows and batches are divided over them.
        gpuTransport: How GPUs reduce gradients: ``"host"`` through their hosts, or, on PyTorch and JAX, ``"nccl"``
            among themselves; ``"auto"`` takes NCCL on PyTorch where all workers share one host. See ``docs/gpus.md``.

    Other Parameters: predictions
        predictionCol: The column that the fitted model adds.
        probabilityCol: The column of probabilities that a fitted classifier adds.
        rawPredictionCol: The column of scores that a fitted classifier adds, one for each class: logits where the
            loss takes logits, and else probabilities. An empty name leaves a column out, as in all of Spark ML.
        inferenceBatchSize: Rows that ``transform`` and ``evaluate`` of the fitted model put through it at a time.
            None takes 1024; up to 8192 where rows are small, and fewer where a layer gives 256 MB for 1024.
        inferenceUseGpu: Whether the tasks of ``transform``, ``evaluate`` and ``predict`` of the fitted model ask Spark
            for a GPU each by themselves. Otherwise they use one where the application's tasks have it.

    Other Parameters: parameter servers
        algorithm: In asynchronous modes, what workers push and how it is applied: ``"downpour"``,
            ``"adag"``, ``"dynsgd"``, ``"aeasgd"``, ``"eamsgd"`` or ``"sum"``. ``"aeasgd:0.3"`` also says how far, of
            the way between them, a worker's weights and the server's move towards each other; without a number that is
            ``0.9 / numWorkers``. The same holds for ``"eamsgd"``. In gossip mode, ``"adpsgd"``, the default there, or
            ``"sgp"``.
        maxStaleness: Steps that an asynchronous worker may be ahead of the slowest one that is connected and has
            not finished; None does not limit it.
        backgroundExchange: Has asynchronous workers compute a step while the last one's exchange goes
            on: faster on slow networks, and one step staler.
        parameterServers: Processes that the weights are divided over: more than one for models, or
            numbers of workers, that outgrow one.
        serverPlacement: ``"driver"`` runs them on the driver's host; ``"executors"`` as tasks of a Spark
            stage, which need a slot each.
        port: The first one's port; 0 takes free ones.
        snapshotSeconds: Time between two snapshots, from which a server that was lost comes back; 0 makes none by time.

    Raises:
        ConfigurationError: The model is not compiled or cannot be rebuilt, or a value is out of range.
        UnsupportedError: A mode, or a form of model, that this version does not have.
        TypeError: A value has the wrong type, or a param does not exist.

    Examples:
        >>> estimator = KerasEstimator(model=model, numWorkers=2, epochs=10)  # doctest: +SKIP
        >>> fitted = estimator.fit(train_df)  # doctest: +SKIP
        >>> fitted.transform(test_df).select("prediction")  # doctest: +SKIP
    """

    model: Param[KerasModel] = Param(
        unowned_parent(),
        "model",
        "a compiled keras.Model, a function without arguments that returns one, the path of one, or a fitted model",
        typeConverter=model_to_train,
    )

    @brief_errors
    @noting_keywords
    def __init__(
        self,
        model: keras.Model | Callable[[], keras.Model] | str | os.PathLike[str] | KerasModel,
        *,
        featuresCol: str | Sequence[str | Sequence[str]] | Mapping[str, str | Sequence[str]] = "features",
        labelCol: str | Sequence[str | Sequence[str]] | Mapping[str, str | Sequence[str]] | None = "label",
        numWorkers: int | tuple[int, int] = 1,
        epochs: int = 1,
        batchSize: int = 32,
        validationFraction: float = 0.0,
        mode: Literal["synchronous", "sync", "asynchronous", "async", "hogwild", "gossip"] = "synchronous",
        callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback = (),
        checkpointPath: str | os.PathLike[str] | None = None,
        customObjects: Mapping[str, Any] | None = None,
        weightCol: str | Mapping[str, str] | None = None,
        classWeight: Mapping[int, float] | Literal["balanced"] | None = None,
        validationIndicatorCol: str | None = None,
        preprocessing: Callable[..., Any] | None = None,
        augmentation: Callable[..., Any] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        cache: Literal["disk", "memory"] = "disk",
        stepsPerEpoch: int | None = None,
        bucketByLength: bool = False,
        learningRate: float | None = None,
        scaleLearningRate: bool = False,
        frequency: Literal["batch", "epoch"] | int = "batch",
        aggregation: Literal["allreduce", "server"] = "allreduce",
        compression: Literal["bfloat16", "float16", "int8", "topk", "powersgd"] | str | None = None,
        mixedPrecision: bool = False,
        syncBatchNorm: bool = False,
        allowBatchCoupledLoss: bool = False,
        shardOptimizer: bool = False,
        distribution: keras.distribution.ModelParallel | keras.distribution.LayoutMap | None = None,
        pipelineStages: int | Sequence[str] | None = None,
        microBatches: int = 8,
        verbose: int | Literal["auto"] = 1,
        driverCallbacks: Sequence[keras.callbacks.Callback | FitListener] | keras.callbacks.Callback | FitListener = (),
        eventsPath: str | os.PathLike[str] | None = None,
        checkpointEpochs: int = 1,
        checkpointSeconds: float | None = None,
        keepBest: str | None = None,
        resume: bool = False,
        maxRestarts: int = 0,
        timeouts: Timeouts | Mapping[str, float] | None = None,
        encryption: bool | None = None,
        ports: tuple[int, int] | str | None = None,
        useGpu: bool | Literal["auto"] = "auto",
        gpusPerWorker: int = 1,
        gpuTransport: Literal["auto", "host", "nccl"] = "auto",
        predictionCol: str = "prediction",
        probabilityCol: str = "probability",
        rawPredictionCol: str = "rawPrediction",
        inferenceBatchSize: int | None = None,
        inferenceUseGpu: bool = False,
        algorithm: Literal["downpour", "adag", "dynsgd", "aeasgd", "eamsgd", "sum", "adpsgd", "sgp"] | str = "downpour",
        maxStaleness: int | None = None,
        backgroundExchange: bool = False,
        parameterServers: int = 1,
        serverPlacement: Literal["driver", "executors"] = "driver",
        port: int = 0,
        snapshotSeconds: float = 30.0,
        **unknown: NoReturn,
    ) -> None:
        given: dict[str, Any] = vars(self).pop("_input_kwargs")
        refuse_unknown("KerasEstimator", unknown, _KNOWN, noun="param")
        preload_keras(ranks_per_task=gpusPerWorker)
        super().__init__()
        self.setParams(**{**given, "model": model})

    @brief_errors
    def setParams(self, **params: Unpack[Arguments]) -> KerasEstimator:
        """Sets several params by name, and returns the estimator; those that are not named stay as they are.

        Args:
            params: As the constructor takes them; None takes a param's value away.

        Raises:
            ConfigurationError: A value is out of its range, or two of them exclude each other.
            UnsupportedError: A mode, or a form of model, that this version does not have.
            TypeError: A value has the wrong type, or a param does not exist.

        Examples:
            >>> estimator.setParams(epochs=3, batchSize=64)  # doctest: +SKIP
        """
        given = dict[str, Any](params)
        refuse_unknown("setParams", given, _KNOWN, noun="param")
        custom_objects = given.pop("customObjects", None)
        if "model" in given:
            self.setModel(given.pop("model"), custom_objects)
        elif custom_objects is not None:
            raise ConfigurationError(
                "customObjects: expected beside a model, which is given by a path. Received: customObjects alone. Pass "
                "both: setParams(model=path, customObjects=...)."
            )
        set_given(self, given)
        fit_config(self)
        return self

    def getModel(self) -> KerasModel:
        """Returns the model that training begins with; its ``model`` is the `keras.Model`."""
        return self.getOrDefault(self.model)

    @brief_errors
    def setModel(self, value: Any, customObjects: Mapping[str, Any] | None = None) -> KerasEstimator:
        """Replaces the model; the arguments are those of the constructor."""
        return self._set(model=model_to_train(value, customObjects))

    @overload
    def fit(self, dataset: Dataset, params: ParamMap | None = None, **options: Unpack[Options]) -> KerasModel: ...

    @overload
    def fit(self, dataset: Dataset, params: Sequence[ParamMap], **options: Unpack[Options]) -> list[KerasModel]: ...

    @brief_errors
    def fit(
        self, dataset: Dataset, params: ParamMap | Sequence[ParamMap] | None = None, **options: Unpack[Options]
    ) -> KerasModel | list[KerasModel]:
        """Trains the model on all rows, and returns it fitted; the estimator stays as it is.

        Args:
            dataset: A Spark DataFrame; one that is `elephant.prepared`; a pandas DataFrame, whose rows go to the
                executors first; the path of Parquet, Delta or TFRecord files, which the executors read themselves; or
                `elephant.Files`.
            params: Params that hold for this fit, by param as Spark ML has them; or a list of these, one for each fit:
                they share the rows, which are read once.
            options: The same by name, such as ``epochs=3``; None takes a param's value away.

        Raises:
            ConfigurationError: An option is out of its range, two of them exclude each other, or a param is one of
                another stage.
            SchemaError: A column is missing or unusable.
            DataError: There are no rows, or values that cannot be trained on.
            ClusterError: The cluster cannot run the fit.
            WorkerFailure: A worker failed; it has the worker's own traceback.
            TypeError: The dataset is none of the above, or an option is unknown.

        Examples:
            >>> fitted = estimator.fit(train_df, epochs=3)  # doctest: +SKIP
        """
        refuse_unknown("fit", options, sorted(_PARAMS), noun="param")
        require_own(self, params, "Take it from the estimator that is fitted, or name it: fit(dataset, epochs=3).")
        estimator = set_given(self.copy(), options) if options else self
        # To Spark, a dataset is whatever `_fit` takes.
        rows, fit = cast(Any, dataset_of(dataset)), super(KerasEstimator, estimator).fit
        if params is not None and not isinstance(params, dict):
            # Each of them comes back here, perhaps in a thread of its own.
            return fit(rows, cast(Any, params))
        config = fit_config(estimator.copy(params))
        own = {**{param.name: value for param, value in (params or {}).items()}, **options}
        session = rows.sparkSession if is_frame(rows) else active_session()
        text = description_of(config, own)
        if params:
            # Several fits follow each other.
            Progress(num_workers=config.num_ranks, epochs=config.epochs, verbose=config.verbose).note(text)
        with described(session, text):
            if isinstance(rows, (Files, PreparedFrame)):
                # As Spark's own `fit` does, into which MLflow hooks what takes DataFrames alone.
                return (estimator.copy(params) if params else estimator)._fit(rows)
            return fit(rows, params)

    @brief_errors
    def submit(self, dataset: Dataset, **options: Unpack[Options]) -> FitHandle[KerasModel]:
        """Begins a fit in the background, and returns at once: a notebook stays free, a program does other things.

        It prints nothing, unless ``verbose`` is among the options. What is wrong with these is raised here; all else,
        as `fit` raises it, by `FitHandle.result`.

        Args:
            dataset: What `fit` takes.
            options: Params that hold for this fit, by name.

        Returns:
            The handle: ``history``, ``progress``, ``cancel()`` and ``result()``.

        Examples:
            >>> handle = estimator.submit(train_df, epochs=20)  # doctest: +SKIP
            >>> handle.progress  # doctest: +SKIP
            >>> fitted = handle.result()  # doctest: +SKIP
        """
        refuse_unknown("submit", options, sorted(_PARAMS), noun="param")
        silent = set_given(self.copy(), {"verbose": 0})
        fit_config(set_given(silent.copy(), options))
        rows = cast(Any, dataset_of(dataset))
        session = rows.sparkSession if is_frame(rows) else active_session()
        return FitHandle(lambda: silent.fit(rows, **options), session, inheritable_thread_target(session))

    def fitMultiple(self, dataset: Dataset, paramMaps: Sequence[ParamMap]) -> Iterator[tuple[int, KerasModel]]:
        """Trains once with each of several param maps, on rows that are read once; as `pyspark.ml.Estimator` has it.

        Args:
            dataset: What `fit` takes.
            paramMaps: Params of each fit.

        Returns:
            The place of each param map and the fitted model, as they are asked for; threads may share it.
        """
        return FitsOfGrid(self.copy(), dataset_of(dataset), paramMaps, GridRuns(fold_asked_for()))

    def _fit(self, dataset: DataFrame | PreparedFrame | Files) -> KerasModel:
        began, began_at = time.monotonic(), time.time()
        config, given = fit_config(self), self.getOrDefault("callbacks")
        backup = backup_of(given)
        if config.pipeline_stages is not None:
            require_stages(built_model(self.getModel().source), config.pipeline_stages)
        rows = rows_of_dataset(self, self.getModel().source, dataset, config)
        job = replace(
            self._job(rows, config),
            callbacks=tuple(one for one in given if one is not backup),
            driver_callbacks=tuple(
                one for one in self.getOrDefault("driverCallbacks") if not isinstance(one, FitListener)
            ),
            traced=optional(self, self.eventsPath) is not None and is_traced(rows.source.session),
        )
        spec = job.model
        about: dict[str, Any] = {
            **model_facts(spec),
            "options": chosen_values(self),
            "versions": installed_versions(),
        }
        facts = {**about, "began": began_at, "ranks": config.num_ranks, "waits_for_all": config.waits_for_all}
        with (
            Listeners(_listeners(self, rows.source.session, facts), plain_params(self)) as listeners,
            Progress(
                num_workers=config.num_ranks,
                epochs=config.epochs,
                verbose=config.verbose,
                waits_for_all=config.waits_for_all,
                listeners=listeners,
            ) as progress,
        ):
            try:
                result = train(rows.source, job, progress)
            except ClusterError as error:
                if NO_ROOM not in str(error) or not (isinstance(dataset, PreparedFrame) and dataset.on_disk.release()):
                    raise
                progress.note("disks are full: the rows kept for several fits are released, and the fit starts again")
                result = train(rows.source, job, progress)
            if backup is not None and backup.delete_checkpoint:
                remove_checkpoints(rows.source.session, config)
            summary = FitSummary.of_record(
                progress.record,
                began_at=began_at,
                seconds=time.monotonic() - began,
                history=result.history,
                statistics=result.statistics,
                **about,
            )
            fitted = KerasModel.from_result(spec, result, summary)
            # As in all of Spark ML, so that params of the estimator, given to transform, are those of its model.
            reset_uid(fitted, self.uid)
            listeners.fitted = self._copyValues(fitted)
            return listeners.fitted

    def _job(self, rows: TrainingData, config: FitConfig) -> TrainingJob:
        """Returns the job of a fit on some rows, without callbacks."""
        spec = self.getModel().source
        weights = class_weights(
            optional(self, self.classWeight),
            spec,
            rows.trained_schema,
            rows.rows_of if rows.target_schema is None else None,
        )
        preprocessing = replace(batch_functions(self), target_schema=rows.target_schema)
        if rows.is_preprocessed:
            preprocessing = replace(preprocessing, preprocess=None)
        return TrainingJob(spec, (), config, rows.schema, class_weight=weights, preprocessing=preprocessing)

    @brief_errors
    def verify(self, dataset: Dataset, rows: int = 1000) -> Verification:
        """Trains on some rows with two workers and with one process of Keras, and says how far apart they are.

        Both sides are processes of this machine, and take two epochs in the same global batches, in the order of the
        rows. The options are those of the estimator as far as they change what a step computes; shuffling, callbacks,
        augmentation, validation, checkpoints and GPUs have no part.

        Args:
            dataset: What `fit` takes.
            rows: How many of its rows are brought to this machine: the first that Spark hands on. Two at least.

        Raises:
            ConfigurationError: The estimator trains asynchronously, where nothing is to be equal; or as in `fit`.
            DataError: There are fewer than two rows, or values that cannot be trained on.
            WorkerFailure: One of the processes failed, with its traceback.

        Examples:
            >>> print(estimator.verify(train_df))  # doctest: +SKIP
        """
        given = fit_config(self)
        if given.trains_in_rounds:
            raise ConfigurationError(
                "verify: expected aggregation='allreduce', whose ranks it runs on this machine. Received: "
                "aggregation='server'."
            )
        if not given.is_synchronous:
            raise ConfigurationError(
                "verify: expected mode='synchronous', in which workers give what one process gives. Received: "
                f"mode={given.mode!r}, whose workers go on without each other: there is nothing to be equal to."
            )
        if given.distribution is not None:
            raise ConfigurationError(
                "verify: expected workers of which each has the whole model, as they are when they average gradients. "
                "Received: a distribution, with which JAX computes as one process does. Leave it out to verify."
            )
        if given.pipeline_stages is not None:
            raise ConfigurationError(
                "verify: expected workers of which each has the whole model, as they are when they average gradients. "
                f"Received: pipelineStages={given.pipeline_stages!r}. Leave it out to verify."
            )
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 2:
            raise ConfigurationError(f"rows: expected a whole number, 2 or more. Received: {rows!r}.")
        found, config, estimator = dataset_of(dataset), config_to_verify(given), self.copy()
        found = found.frame if isinstance(found, PreparedFrame) else found
        estimator.clear(estimator.validationIndicatorCol)
        dataset = found if isinstance(found, Files) else found.limit(rows)
        data = rows_of_dataset(estimator, self.getModel().source, dataset, config)
        job = estimator._job(data, config)
        with described(data.source.session, "verify"):
            taken = data.take(rows)
        if taken is None:
            raise DataError("verify: expected two rows or more. Received: none.")
        return verified(replace(job, preprocessing=replace(job.preprocessing, augment=None)), taken)

    @brief_errors
    def fit_stream(
        self,
        dataset: DataFrame,
        *,
        checkpointLocation: str | os.PathLike[str],
        trigger: Mapping[str, Any] | None = None,
        queryName: str | None = None,
        minRowsPerWorker: int = 1,
    ) -> TrainingStream:
        """Trains on a stream, micro-batch by micro-batch, each from where the one before ended.

        Every micro-batch is trained on for ``epochs`` epochs, and leaves a checkpoint with weights and optimizer
        state. Started again with the same checkpointLocation, after a stop or a death, training goes on with
        the first micro-batch that has left none: none is trained on twice, and none is left out.

        Args:
            dataset: A streaming DataFrame, of ``spark.readStream``.
            checkpointLocation: A folder, on any file system that Spark reaches, of this stream and model alone.
            trigger: Arguments of ``DataStreamWriter.trigger``, such as ``{"availableNow": True}``; None begins a
                micro-batch as soon as the one before has ended.
            queryName: Spark's name of the query.
            minRowsPerWorker: A micro-batch of fewer rows than ``numWorkers`` times this is trained on by fewer workers.

        Returns:
            The running stream: its model and history so far, ``stop`` and ``awaitTermination``.
        """
        return start_stream(
            self,
            dataset,
            checkpoint=os.fspath(checkpointLocation),
            trigger=trigger or {},
            query_name=queryName,
            min_rows_per_worker=minRowsPerWorker,
        )

    def __repr__(self) -> str:
        values = "".join(f", {name}={value}" for name, value in chosen_values(self).items())
        return f"KerasEstimator(model={self.getModel().source!r}{values})"

    def _repr_html_(self) -> str:
        about = model_facts(self.getModel().source)
        return card("KerasEstimator", FitSummary(seconds=0.0, history={}, options=chosen_values(self), **about))

    def _parts(self) -> SavedParts:
        given = {param.name: value for param, value in self._paramMap.items()}
        code = {name: given[name] for name in CODE if name in given and given[name] != []}
        for name in {"callbacks", "driverCallbacks"} & code.keys():
            code[name] = [_unused(callback) for callback in code[name]]
        # JSON has no numbers for keys.
        weights = given.get("classWeight")
        about = {} if weights is None else {"classWeight": weights if weights == BALANCED else list(weights.items())}
        return SavedParts(spec=self.getModel().source, code=code, about=about)

    @classmethod
    def _of_parts(cls, parts: SavedParts) -> KerasEstimator:
        not_json = {name: parts.code[name] for name in ("classWeight", *CODE) if name in parts.code}
        if "classWeight" in parts.about:
            weights = parts.about["classWeight"]
            not_json["classWeight"] = weights if weights == BALANCED else dict(weights)
        if "labelCol" not in {**parts.about["paramMap"], **parts.about["defaultParamMap"]}:
            # So one without labels was saved while the constructor alone had defaults.
            not_json["labelCol"] = None
        return cls(model=parts.spec, **not_json)


def _unused(callback: Any) -> Any:
    """Returns a callback without the model and the files that it has had in a fit, which do not pickle."""
    unused = copy.copy(callback)
    for name, value in (("_model", None), ("csv_file", None), ("writer", None), ("_writers", {})):
        if hasattr(unused, name):
            setattr(unused, name, value)
    return unused


def is_traced(session: SparkSession) -> bool:
    """Returns whether fits leave a trace beside their events."""
    return is_true({_TRACE: setting(session, _TRACE) or ""}, _TRACE)


def _listeners(estimator: KerasEstimator, session: SparkSession, info: Mapping[str, Any]) -> list[FitListener]:
    """Returns the listeners of a fit: the user's, files of its events and its trace, and MLflow."""
    listeners = [one for one in estimator.getOrDefault("driverCallbacks") if isinstance(one, FitListener)]
    name = f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:8]}"
    folder, events = optional(estimator, "eventsPath"), ""
    if folder is not None:
        path = f"{folder.rstrip('/')}/{name}"
        events, write = f"{path}.jsonl", functools.partial(write_file, session, overwrite=True)
        has_moments = False
        # What is wrong with a path is said where it is written first.
        with contextlib.suppress(ConfigurationError, OSError):
            has_moments = not is_written_by_jobs(session, events) and not coordinates_on_executors(session)
        listeners.append(EventFile(functools.partial(write, events), info, has_moments=has_moments))
        if is_traced(session):
            listeners.append(TraceFile(functools.partial(write, f"{path}.json"), info))
        with contextlib.suppress(OSError):
            events = qualified(session, events)
    return [*listeners, *mlflow_listeners(events, estimator.getOrDefault("callbacks")), *followers()]
