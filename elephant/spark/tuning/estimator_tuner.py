"""A tuner of KerasTuner whose trials are fits of an estimator."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import keras
from keras_tuner.engine.base_tuner import BaseTuner

from elephant.spark.file_formats import Files
from elephant.spark.prepared import PreparedFrame
from elephant.spark.training_data import dataset_of
from elephant.spark.tuning.reading_ahead import prepared

if TYPE_CHECKING:
    import keras_tuner

    from elephant.spark.estimator import Dataset, KerasEstimator


class EstimatorTuner(BaseTuner):
    """Tuner of KerasTuner whose trials are fits of an estimator, one after the other, over rows that are read once.

    Args:
        oracle: Suggests hyperparameters, such as ``keras_tuner.oracles.BayesianOptimizationOracle``, and has the
            objective: a metric of the fit, in its last epoch.
        hypermodel: A function that takes hyperparameters and returns a compiled model, or a `keras_tuner.HyperModel`.
        estimator: What the trials have in common; its model is replaced. It stays as it is.
        params: Takes hyperparameters, and returns params of the estimator, such as ``{"batchSize": hp.Choice(...)}``.
        options: More of `keras_tuner.engine.base_tuner.BaseTuner`, such as ``directory`` and ``overwrite``.

    Examples:
        >>> oracle = keras_tuner.oracles.RandomSearchOracle("val_loss", max_trials=10)  # doctest: +SKIP
        >>> tuner = EstimatorTuner(oracle, build, KerasEstimator(model=model, validationFraction=0.2))  # doctest: +SKIP
        >>> tuner.search(train_df)  # doctest: +SKIP
        >>> [best] = tuner.get_best_models()  # doctest: +SKIP
    """

    def __init__(
        self,
        oracle: keras_tuner.Oracle,
        hypermodel: keras_tuner.HyperModel | Callable[[keras_tuner.HyperParameters], keras.Model],
        estimator: KerasEstimator,
        *,
        params: Callable[[keras_tuner.HyperParameters], Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(oracle, hypermodel, **options)
        self._estimator, self._params = estimator, params
        if params is not None:
            space = self.oracle.get_space()
            params(space)
            self.oracle.update_space(space)

    def search(self, dataset: Dataset) -> None:
        """Runs trials until the oracle has enough; those of before, in the same folder, count.

        Args:
            dataset: What `elephant.KerasEstimator.fit` takes.
        """
        rows: Any = dataset_of(dataset)
        if isinstance(rows, (Files, PreparedFrame)):
            super().search(rows)
            return
        with prepared(rows, self._estimator) as kept:
            super().search(kept)

    def run_trial(self, trial: Any, dataset: Any) -> dict[str, float]:
        """Fits with the hyperparameters of a trial, saves the model, and returns the metrics of the last epoch."""
        hyperparameters = trial.hyperparameters
        given = {} if self._params is None else self._params(hyperparameters)
        model = self.hypermodel.build(hyperparameters)
        fitted = self._estimator.copy().setParams(model=model, **given).fit(dataset)
        fitted.model.save(self._file_of(trial))
        return {name: float(values[-1]) for name, values in fitted.history.items()}

    def load_model(self, trial: Any) -> keras.Model:
        """Returns the model that a trial has fitted."""
        return keras.saving.load_model(self._file_of(trial))

    def _file_of(self, trial: Any) -> str:
        return os.path.join(self.get_trial_dir(trial.trial_id), "model.keras")
