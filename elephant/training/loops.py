"""Which of Keras' compiled loops can hold a step that the ranks take together."""

from __future__ import annotations

import contextlib
import logging

import keras

from elephant.config import FitConfig
from elephant.data.epoch_plan import EpochPlan

logger = logging.getLogger(__name__)


def leave_room_for_buckets() -> None:
    """Gives TensorFlow a second thread for operations: the backward pass goes on beside those that send.

    It has to be said before TensorFlow computes anything, and is without effect afterwards.
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with contextlib.suppress(RuntimeError):
            threads = tf.config.threading
            threads.set_inter_op_parallelism_threads(max(threads.get_inter_op_parallelism_threads(), 2))


def leave_compiled_loops(model: keras.Model, plan: EpochPlan, frequency: str | int) -> None:
    """Switches off, with one line in the log, what would break the exchange between ranks.

    Args:
        model: The model to train.
        plan: The steps of an epoch.
        frequency: How often the ranks exchange; see `elephant.config.FitConfig`.
    """
    if model.jit_compile and plan.world_size > 1 and frequency == "batch":
        logger.warning("jit_compile is switched off: XLA cannot contain the exchange of gradients between ranks.")
        model.jit_compile = False
    # Several steps at a time need steps that all weigh the same, and that divide the epoch (Keras would
    # draw the missing ones from the next epoch's rows) and the time between two averages of weights.
    length = model.steps_per_execution
    fits = len(set(plan.training_rows)) == 1 and plan.steps % length == 0
    if isinstance(frequency, int):
        fits = fits and frequency % length == 0
    if length > 1 and not fits:
        logger.warning("steps_per_execution is set to 1: the epoch's %d steps are not all alike.", plan.steps)
        model.steps_per_execution = 1


def leave_loops_of_server(model: keras.Model, config: FitConfig) -> None:
    """Switches off, with one line in the log, what would break the exchange with parameter servers.

    Args:
        model: The model to train.
        config: The options of the fit.
    """
    if model.jit_compile and config.pushes_gradients:
        logger.warning("jit_compile is switched off: XLA cannot contain the exchange with the parameter server.")
        model.jit_compile = False
    if model.steps_per_execution > 1:
        logger.warning("steps_per_execution is set to 1: every step is numbered for the parameter server.")
        model.steps_per_execution = 1
