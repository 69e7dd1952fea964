"""Preparation of a model in a training process: devices, precision, and preprocessing."""

from __future__ import annotations

import keras

from elephant.config import FitConfig
from elephant.data.epoch_plan import random_state
from elephant.data.schema import RowSpec
from elephant.modeling.variables import (
    BFLOAT16,
    FLOAT16,
    build_variables,
    lower_precision,
    random_generators,
    rated_optimizers,
)
from elephant.training.executor import computes_on_gpu
from elephant.training.job import TrainingJob


def prepared_model(job: TrainingJob, rows: RowSpec, *, num_ranks: int, policy: str | None = None) -> keras.Model:
    """Builds a job's model, and gives its optimizers the learning rate that the fit asks for.

    Keras' settings and its random seed are those of the whole process afterwards.

    Args:
        policy: What the model is to compute in, of those of `elephant.modeling.variables`; None leaves it as it is.
    """
    config = job.config
    job.model.settings.apply()
    # What layers and model functions draw without a seed of their own, they draw from this one.
    keras.utils.set_random_seed(config.seed % 2**32)
    model = job.model.build()
    build_variables(model, rows)
    if config.learning_rate is not None:
        model.optimizer.learning_rate = config.learning_rate
    if config.scale_learning_rate:
        for optimizer in rated_optimizers(model):
            # The ranks of one worker share its batch.
            factor = num_ranks // config.gpus_per_worker
            optimizer.learning_rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate)) * factor
    if policy is not None:
        lower_precision(model, policy)
    return model


def mixed_policy(config: FitConfig) -> str | None:
    """Returns the policy of mixed precision that suits this process; None where the fit does not ask for one.

    GPUs compute in float16, of all kinds that there are; processors, where they have such
    instructions at all, in bfloat16, which needs no scaling of the loss.
    """
    if not config.mixed_precision:
        return None
    return FLOAT16 if computes_on_gpu(keras.config.backend()) else BFLOAT16


def reseed(model: keras.Model, seed: int, rank: int) -> None:
    """Gives the random generators of a worker's model a state of its own.

    Ranks that started with the same generators would drop the same units in every step. Rank 0 keeps the model's.
    """
    if rank > 0:
        for index, generator in enumerate(random_generators(model)):
            generator.assign(random_state(seed, rank, index).astype(generator.dtype))
