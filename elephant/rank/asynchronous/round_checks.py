"""Checks of models that are trained in rounds: a server gives what one process gives for means over rows alone."""

from __future__ import annotations

import keras

from elephant.config import FitConfig
from elephant.errors import UnsupportedError
from elephant.modeling.model_info import has_own_step
from elephant.modeling.optimizer_translation import inner_optimizer, translate
from elephant.modeling.variables import layout_of
from elephant.parameter_server.optimizers import without_clipping
from elephant.rank.input.feed import BatchFeed
from elephant.rank.trials.coupling import RankLosses, require_mean_of_rows
from elephant.rank.trials.loss_trial import LossTrial, may_couple_rows, try_out
from elephant.rank.trials.row_dependence import MOST_ROWS


def check_rounds(model: keras.Model, config: FitConfig) -> None:
    """Raises UnsupportedError for a model of which a round at parameter servers is not the step of one process."""
    received = None
    if has_own_step(model):
        received = "a model with a train_step of its own, of which nothing tells how its gradients are to be weighed"
    elif inner_optimizer(model.optimizer) is not model.optimizer:
        received = "an optimizer that scales the loss, with which single workers leave steps out"
    elif (
        config.asynchronous.parameter_servers > 1
        and without_clipping(translate(model.optimizer, layout_of(model)))[1] is not None
    ):
        received = "gradients that are clipped by their norm, of which each of several parameter servers has a part"
    if received is not None:
        raise UnsupportedError(
            "aggregation='server': expected the train_step of Keras, an optimizer without loss scaling, and with "
            f"parameterServers above 1 no clipping by norms. Received: {received}. Use aggregation='allreduce'."
        )


def try_losses_out(losses: RankLosses, model: keras.Model, feed: BatchFeed, config: FitConfig) -> LossTrial | None:
    """Tries model and losses on some of a worker's rows, before any step, as ranks do that average among themselves.

    Returns:
        What tries the losses on further rows; None where nothing is left to try.

    Raises:
        UnsupportedError: Rows meet in the model or in a loss, or a loss is a sum.
    """
    batch = feed.sample(MOST_ROWS) if may_couple_rows(model) else None
    if batch is None:
        return None
    trial = try_out(losses, model, batch, sample=feed.sample, allowed=config.allow_batch_coupled_loss, metrics=False)
    for loss in losses.losses:
        require_mean_of_rows(loss, counts_elements=False)
    return trial
