"""`KerasModel`: what a fit returns, a Spark ML transformer with a trained Keras model inside."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, cast

import keras
import numpy as np
from pyspark.ml import Model
from pyspark.sql import DataFrame, SparkSession

from elephant.backends import current
from elephant.cluster.executors import profile_of
from elephant.cluster.gpu_plan import prediction_profile
from elephant.cluster.preload import begin_preload
from elephant.cluster.spark_private import set_params
from elephant.driver.coordinator import FitResult
from elephant.errors import ConfigurationError, brief_errors, warn_user
from elephant.modeling.model_spec import ModelSpec, given_model
from elephant.monitor.progress import plot_curves
from elephant.monitor.report import MOST_LAYERS
from elephant.monitor.summary import FitSummary, card
from elephant.spark.columns.column_selection import ColumnSelection
from elephant.spark.evaluate import Evaluation, evaluate_rows
from elephant.spark.file_formats import Files
from elephant.spark.params import ModelParams, chosen_values, input_selection, labelled_selection, optional, require_own
from elephant.spark.saving.embedding_table import EmbeddingTable, embedding_table
from elephant.spark.saving.model_files import SUFFIXES, export_model, source_of, write_model
from elephant.spark.saving.persistence import FUNCTIONS, SavedParts, SavedStage
from elephant.spark.training_data import (
    files_of,
    frame_of,
    refuse_stream,
    require_frame,
    rows_of_files,
    rows_of_frame,
)
from elephant.spark.transform import (
    Scoring,
    add_predictions,
    checked_batch_size,
    collected_predictions,
    packed_model,
    predictions_of_files,
    require_evaluable,
)
from elephant.task.model_batches import PackedFunction
from elephant.task.model_cache import PackedModel
from elephant.task.warm_processes import preload_function

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.ml.param import Param


# What is taken beside DataFrames of Spark, for errors.
_OR_FILES = ", the path of files, or elephant.Files"


class KerasModel(Model, ModelParams, SavedStage):
    """A trained Keras model that transforms DataFrames.

    Made by `KerasEstimator.fit`, by `KerasModel.load`, or of a model that was trained elsewhere. Params are set by
    their setters.

    Args:
        model: A `keras.Model`, compiled if it is to be evaluated; the path of one that Keras has saved; or a function
            without arguments that returns one. It is taken as it is now.
        customObjects: Custom layers, losses and metrics by name, besides those that the model holds.
        history: One number per epoch by metric.
        training_statistics: What was counted in the fit.
        plan: Where each rank ran.
        summary: Where the fit's time went.

    Examples:
        >>> fitted = KerasModel.load("hdfs:///models/digits")  # doctest: +SKIP
        >>> fitted.transform(df).select("prediction", "probability")  # doctest: +SKIP
        >>> KerasModel(keras_model).setFeaturesCol("pixels").transform(df)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: ModelSpec | keras.Model | Callable[[], keras.Model] | str | os.PathLike[str],
        *,
        customObjects: Mapping[str, Any] | None = None,
        history: Mapping[str, Sequence[float]] | None = None,
        training_statistics: Mapping[str, Any] | None = None,
        plan: Sequence[Mapping[str, Any]] = (),
        summary: FitSummary | None = None,
    ) -> None:
        preload_keras()
        super().__init__()
        # What no fit has been told of is not compared with a column that is called label by chance.
        self._setDefault(labelCol=None)
        self._spec = source_of(model, customObjects, to_train=False)
        self._history = {name: list(values) for name, values in (history or {}).items()}
        self._training_statistics = dict(training_statistics or {})
        self._plan = [dict(rank) for rank in plan]
        self._summary = summary
        self._seconds = None if summary is None else summary.seconds
        self._built: keras.Model | None = None
        self._packed: PackedModel | None = None

    @classmethod
    def from_result(cls, spec: ModelSpec, result: FitResult, summary: FitSummary | None = None) -> KerasModel:
        """Returns the fitted model.

        Args:
            spec: The model that was trained.
            result: What its fit returned.
            summary: Where its time went.
        """
        given, statistics = given_model(spec), result.statistics
        if given is not None and len(result.variables) == len(given.weights):
            # Of stages, none of which has had the whole model. It may be large: there is one copy of it.
            trained = spec.with_weights(result.variables, result.rows)
        else:
            trained = spec.with_variables(result.variables, result.rows)
        return cls(trained, history=result.history, training_statistics=statistics, plan=result.plan, summary=summary)

    @property
    def model(self) -> keras.Model:
        """The trained, compiled `keras.Model`, with its optimizer's state; built when first asked for.

        It is this object's own copy: training it further does not change what ``transform`` does.
        """
        if self._built is None:
            self._built = self._spec.build()
        return self._built

    @property
    def history(self) -> dict[str, list[float]]:
        """One number per epoch for the loss and every metric, over all workers; ``val_`` marks validation."""
        return {name: list(values) for name, values in self._history.items()}

    @property
    def hasSummary(self) -> bool:
        """True if there is a `summary`: of a model that this process has fitted, and not loaded."""
        return self._summary is not None

    @property
    def summary(self) -> FitSummary:
        """Times of the fit, by epoch and rank, and what to change; see docs/performance.md.

        Raises:
            RuntimeError: There is none, as of a model that was loaded.

        Examples:
            >>> pandas.DataFrame(fitted.summary.ranks)  # doctest: +SKIP
            >>> fitted.summary.report("fit.html")  # doctest: +SKIP
        """
        if self._summary is None:
            raise RuntimeError(
                "summary: expected a model that fit has returned. Received: one without a summary, which is not saved. "
                "See hasSummary."
            )
        return self._summary

    @brief_errors
    def plot(self) -> np.ndarray:
        """Draws the curves of `history`, a panel for each metric, training and validation together.

        Returns:
            The axes of the panels, shape (metrics,). A notebook shows the figure; in a script,
            ``matplotlib.pyplot.show()`` does, and ``axes[0].figure.savefig(path)`` writes it.

        Raises:
            ConfigurationError: There is no history.
            ImportError: matplotlib is not installed (``pip install 'elephant-spark[local]'``).

        Examples:
            >>> fitted.plot()  # doctest: +SKIP
        """
        if not self._history:
            raise ConfigurationError("plot: expected a model of a fit. Received: one without a history.")
        return plot_curves(self._history)

    def __repr__(self) -> str:
        return f"KerasModel({', '.join([repr(self._spec), *self._words()])})"

    def _repr_html_(self) -> str:
        known = self._summary
        if known is None:
            known = FitSummary(
                seconds=self._seconds or 0.0,
                history=self._history,
                plan=self._plan,
                statistics=self._training_statistics,
                **model_facts(self._spec),
            )
        return card("KerasModel", replace(known, options={**known.options, **chosen_values(self)}))

    def _words(self) -> list[str]:
        """Returns words about the fit: its epochs, and what it has come to."""
        epochs = max(map(len, self._history.values()), default=0)
        last = {name: values[-1] for name, values in self._history.items() if values and isinstance(values[-1], float)}
        seconds = [] if self._seconds is None else [f"{self._seconds:.1f} s"]
        return [f"{epochs} epochs", *seconds, *(f"{name}={value:.4g}" for name, value in last.items())]

    @property
    def training_statistics(self) -> dict[str, Any]:
        """Counts of a fit: ``refused_connections`` by host, and in asynchronous modes more.

        Those are connections that did not prove that they belong to the fit. In asynchronous modes there are
        among others ``updates`` that were applied and ``refused``; ``bytes_in`` and ``bytes_out`` of the
        servers; ``training_s``, seconds from the first worker's start to the last epoch's end;
        ``wait_s_per_step``, seconds that a worker waited for servers; ``staleness``, how many updates had been
        applied between a worker's pull and its push (text) by how often; ``server_restarts``, ``worker_retries``.
        With ``maxRestarts``, ``restarts`` says how often the fit went on after a loss, and ``recoveries``, of
        synchronous fits, the rank and the cost of each: ``at`` and ``resumed_at`` in seconds since 1970,
        ``steps_again``, and seconds of phases: ``told_s``, ``processes_s``, ``state_s``, ``model_s``, ``step_s``.

        ``slow_ranks`` is there where ranks of a synchronous fit have held up the others in at least half of its epochs:
        a dictionary of each, with ``rank``, ``host``, ``executor``, ``rows``, ``epochs`` (from zero), ``factor`` (its
        seconds, as a multiple of those of others) and ``reason``: ``"rows"``, ``"steps"``, ``"input"`` or
        ``"epoch_end"``.

        Of an elastic fit, ``workers`` are the numbers of workers that it went on with. If rows have moved to faster
        ones, ``moves`` is a list of dictionaries: ``epoch`` (from zero) after which they did, ``moves`` (from which
        rank, to which, how many virtual shards, how many times the seconds of a row), ``rows`` of each rank from then
        on, and the ``seconds`` that it took.
        """
        return copy.deepcopy(self._training_statistics)

    @property
    def plan(self) -> list[dict[str, Any]]:
        """Places of the training, one dictionary of each rank, by rank.

        ``rank``, ``host``, ``executor`` (Spark's id of it), ``device`` as it was shown, ``devices`` (GPUs, as
        ``CUDA_VISIBLE_DEVICES`` named them; none of a rank that computed on the CPU) and ``threads``.
        """
        return copy.deepcopy(self._plan)

    @property
    def source(self) -> ModelSpec:
        """The trained model as a value that travels to executors."""
        return self._spec

    def packed(self) -> PackedModel:
        """Returns the trained model as tasks get it that predict: without its optimizer's state."""
        if self._packed is None:
            self._packed = packed_model(self._spec)
        return self._packed

    @brief_errors
    def table(self, name: str) -> EmbeddingTable:
        """Returns the rows of an embedding layer, such as those of users that another job is to search.

        Args:
            name: The layer's: one of `elephant.ShardedEmbedding`, or of `keras.layers.Embedding`.

        Raises:
            ConfigurationError: The model has no such layer.

        Examples:
            >>> fitted.table("user").toDF().write.parquet("/data/users")  # doctest: +SKIP
        """
        return embedding_table(self.model, name)

    @brief_errors
    def transform(
        self,
        dataset: DataFrame | str | os.PathLike[str] | Files,
        params: dict[Param[Any], Any] | None = None,
        *,
        columns: Sequence[str] | None = None,
    ) -> DataFrame:
        """Returns a DataFrame with the model's predictions beside the columns of a dataset. Lazy, as all of Spark.

        Args:
            dataset: A DataFrame with the columns that the model takes; or the path of files, or `elephant.Files`, which
                are listed now, and which the tasks read themselves, without Spark's JVM.
            params: Params of this model, or of the estimator that fitted it, which hold for this call.
            columns: Of files, the columns to keep; None keeps all of them. The model's own need not be among them.

        Raises:
            SchemaError: A column is missing or unusable, or an output column is there already.
            ClusterError: inferenceUseGpu is set, and Spark cannot give its tasks GPUs.
            ConfigurationError: A param is one of another stage, there are no files, or columns are not those of files.

        Examples:
            >>> scored = fitted.transform("/data/day=2026-11-28", columns=["id"])  # doctest: +SKIP
            >>> scored.write.parquet("/data/scores")  # doctest: +SKIP
        """
        require_own(self, params, "Take it from the model, or from the estimator that has fitted it.")
        files = files_of(dataset)
        if files is not None:
            stage = self.copy(params) if params else self
            return predictions_of_files(files, stage._scoring(), columns)
        if columns is not None:
            raise ConfigurationError(
                "columns: expected a path or elephant.Files, of whose columns some are kept. Received: a DataFrame. "
                "Select from what transform returns."
            )
        return super().transform(cast("DataFrame", dataset), params)

    @brief_errors
    def _transform(self, dataset: DataFrame) -> DataFrame:
        require_frame(dataset, "transform", _OR_FILES)
        return add_predictions(dataset, self._scoring())

    def _scoring(self) -> Scoring:
        return Scoring(
            info=self._spec.info,
            model=self.packed(),
            selection=input_selection(self),
            prediction=self.getOrDefault(self.predictionCol),
            probability=self.getOrDefault(self.probabilityCol),
            raw_prediction=self.getOrDefault(self.rawPredictionCol),
            batch_size=optional(self, self.inferenceBatchSize),
            preprocessing=optional(self, self.preprocessing),
            use_gpu=self.getOrDefault(self.inferenceUseGpu),
        )

    @brief_errors
    def evaluate(self, dataset: DataFrame | str | os.PathLike[str] | Files) -> dict[str, Any]:
        """Returns the loss and the metrics over all rows of a dataset, by name.

        They are computed where the rows are, and are what ``model.evaluate`` of one process gives,
        within the rounding of floats, for any partitioning. Weights of ``weightCol`` count as in training.

        Args:
            dataset: A DataFrame with the columns that the model was trained on; or the path of files, or
                `elephant.Files`, which the tasks read themselves.

        Raises:
            SchemaError: A column is missing or unusable.
            DataError: There are no rows.
            ConfigurationError: The model is not compiled, or its rows go on where others have ended.

        Examples:
            >>> fitted.evaluate(test_df)["accuracy"]  # doctest: +SKIP
        """
        files = files_of(dataset)
        if files is None:
            require_frame(dataset, "evaluate", _OR_FILES)
            refuse_stream(dataset, "evaluate", "foreachBatch of its writeStream hands its micro-batches on")
        require_evaluable(self._spec.info)
        info, function = self._spec.info, optional(self, self.preprocessing)
        selection = labelled_selection(self)
        self._require_labels(selection)
        preprocessed = function is not None
        if files is None:
            rows = rows_of_frame(cast("DataFrame", dataset), info, selection, preprocessed=preprocessed)
        else:
            rows = rows_of_files(files, info, selection, None, preprocessed=preprocessed)
        packed = None
        if rows.target_schema is not None:
            packed = PackedFunction.of(function, rows.target_schema, [input_info.name for input_info in info.inputs])
        batch_size = checked_batch_size(optional(self, self.inferenceBatchSize))
        evaluation = Evaluation(model=self.packed(), schema=rows.schema, batch_size=batch_size, function=packed)
        session = rows.source.session
        profile = prediction_profile(session) if self.getOrDefault(self.inferenceUseGpu) else None
        return evaluate_rows(rows.source, evaluation, profile_of(session, profile))

    def _require_labels(self, selection: ColumnSelection) -> None:
        """Raises where no fit has said that the model is compared with its own input."""
        info = self._spec.info
        compares = not info.own_step and any(output.needs_label for output in info.outputs)
        if selection.label is None and compares and not self._history:
            raise ConfigurationError(
                "labelCol: expected the column that the model is compared with, of a model that no fit has returned. "
                "Received: none. Call setLabelCol first; of an autoencoder, with the column of its input."
            )

    @brief_errors
    def predict(self, dataset: DataFrame | pd.DataFrame | str | os.PathLike[str] | Files) -> np.ndarray | Any:
        """Returns the outputs of the model for all rows, as ``model.predict`` of one process gives it.

        It is computed where the rows are, as in ``transform``, and comes to the driver: outputs as they are, without
        classes or softmax. All of them have to fit the driver's memory and ``spark.driver.maxResultSize``.

        Args:
            dataset: A DataFrame with the columns that the model takes; a pandas DataFrame, whose rows go to the
                executors first; or the path of files, or `elephant.Files`, which the tasks read themselves.

        Returns:
            An array (rows, ...) in the order of ``dataset.collect()``, or of files by their paths; a list or a
            dictionary of arrays for several outputs, which ``typing.cast`` tells type checkers. An output with a
            length of its own for every row is an array of objects (rows,), an array each.

        Raises:
            SchemaError: A column is missing or unusable.
            DataError: There are no rows, or one does not fit the model.
            TypeError: The dataset is none of these.

        Examples:
            >>> fitted.predict(test_df).argmax(axis=1)  # doctest: +SKIP
        """
        files = files_of(dataset)
        rows = frame_of(dataset, "predict", _OR_FILES) if files is None else files
        return collected_predictions(rows, self._scoring())

    @brief_errors
    def export(self, path: str | os.PathLike[str], format: str = "tf_saved_model", **options: Any) -> None:
        """Writes the model for servers and devices, without elephant and without what only training needs.

        Args:
            path: Where there is nothing yet: on this machine, where it has no scheme; or a URL of a file system that
                Spark, pyarrow or fsspec know. Keras wants names that end in ``.tflite`` for ``"litert"``.
            format: As in ``keras.Model.export``: ``"tf_saved_model"``, a folder, or ``"onnx"``, ``"litert"`` and
                others that Keras has, a file.
            options: Handed to Keras: ``input_signature``, ``opset_version`` and others.

        Raises:
            FileExistsError: There is an export already.
            ConfigurationError: Keras cannot export the model in this format.
            ImportError: The format needs a package that is not installed; the message has pip's line.

        Examples:
            >>> fitted.export("hdfs:///serving/digits/1")  # doctest: +SKIP
        """
        export_model(path, self.model, format, options)

    def hasParam(self, paramName: str) -> bool:
        """Returns whether there is a param of this name."""
        # Spark looks at the attribute, of an estimator's `model` at this object's own, which would be built for that.
        return paramName != "model" and super().hasParam(paramName)

    def copy(self, extra: Any = None) -> KerasModel:
        """Returns a copy with params of its own; it builds a `model` of its own too."""
        copied = super().copy(extra)
        copied._built = None
        return copied

    @brief_errors
    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the fitted model where nothing is yet.

        Args:
            path: A name that ends in ``.keras`` or ``.h5`` gets a file of Keras: the `model`, with its optimizer's
                state, for `keras.saving.load_model` or another `KerasEstimator`. As to Keras, a path without a scheme
                is one of this machine; URLs of file systems that Spark, pyarrow or fsspec know work too. Any other
                path gets a folder for `KerasModel.load`, as all of Spark ML has them, with params and history, and
                without a scheme lies in Spark's default file system.

        Raises:
            FileExistsError: There is a file already.
            FileNotFoundError: The folder of a file of this machine is not there.
            IsADirectoryError: There is a folder where the file is to be.
            ConfigurationError: Keras cannot save the model in this form.

        Examples:
            >>> fitted.save("digits.keras")  # doctest: +SKIP
        """
        if os.fspath(path).endswith(SUFFIXES):
            write_model(path, self.model, {}, overwrite=False)
            if self._spec.archive is not None and self._spec.variables is not None:
                warn_user(
                    f"path={os.fspath(path)}: expected a model of which a file of Keras keeps all weights. Received: "
                    "one of which it does not, such as with enable_lora: Keras adds low rank factors to the kernels, "
                    "and zeros take their place, with which training cannot go on. A folder keeps all: save(path) "
                    "without .keras or .h5."
                )
        else:
            self.write().save(os.fspath(path))

    def _parts(self) -> SavedParts:
        code = {param.name: value for param, value in self._paramMap.items() if param.name in FUNCTIONS}
        about = {
            "history": self.history,
            "trainingStatistics": self.training_statistics,
            "plan": self.plan,
            "seconds": self._seconds,
        }
        return SavedParts(spec=self._spec, code=code, about=about)

    @classmethod
    def _of_parts(cls, parts: SavedParts) -> KerasModel:
        about = parts.about
        statistics, plan = about["trainingStatistics"], about["plan"]
        model = cls(parts.spec, history=about["history"], training_statistics=statistics, plan=plan)
        model._seconds = about.get("seconds")
        set_params(model, **{name: parts.code[name] for name in FUNCTIONS if name in parts.code})
        return model


def model_facts(spec: ModelSpec) -> dict[str, Any]:
    """Returns the fields of a summary that are about a model: its words and its layers, as many as a page shows."""
    layers = [asdict(layer) for layer in spec.info.layers[:MOST_LAYERS]]
    return {"model": spec.title, "layers": layers, "more_layers": len(spec.info.layers) - len(layers)}


def preload_keras(*, ranks_per_task: int = 1) -> None:
    """Has the executors of the session, where there is one, begin to import Keras: models are trained there, or used.

    Args:
        ranks_per_task: Ranks that will share a task's cores.
    """
    backend = current().name
    begin_preload(
        # None is made for this: a program may still be about to say what its session is to be.
        SparkSession.getActiveSession,
        lambda limits, spares: preload_function(backend, limits, ranks_per_task=ranks_per_task, spares=spares),
    )


def model_to_train(model: Any, custom_objects: Mapping[str, Any] | None = None) -> KerasModel:
    """Returns a user's model as the stage that an estimator keeps: Spark saves a grid over models as stages alone.

    Args:
        model: As `KerasEstimator` takes it.
        custom_objects: Custom layers, losses and metrics by name, besides those that the model holds.

    Raises:
        ConfigurationError: It is no model, is not compiled, or cannot be rebuilt.
    """
    spec = source_of(model, custom_objects)
    # What an earlier fit has come to is no part of what is to be trained.
    return model if isinstance(model, KerasModel) and not model.history else KerasModel(spec)
