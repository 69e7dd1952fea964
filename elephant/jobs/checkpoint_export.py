"""A checkpoint as a ``.keras`` file: its numbers in the layers that the user names."""

from __future__ import annotations

import os
import sys

import keras

from elephant.checkpoint.manager import Checkpoint
from elephant.errors import ConfigurationError
from elephant.jobs.inputs import resolve
from elephant.kinds import is_reference
from elephant.rank.checkpoints import assign_checkpoint


def export(checkpoint: Checkpoint, model: str, path: str) -> str:
    """Saves a checkpoint's model, with its optimizer's state where it is compiled; returns the model's name.

    Args:
        checkpoint: As `elephant.checkpoint.manager.CheckpointManager.read` returns it.
        model: A ``.keras`` file, or ``module:function``, whose layers are those of the fit's model.
        path: Of the ``.keras`` file to write.

    Raises:
        ConfigurationError: The model cannot be had, or is another one.
    """
    built = _built(model)
    assign_checkpoint(built, checkpoint)
    built.save(path)
    return str(built.name)


def _built(name: str) -> keras.Model:
    # As `python -m` has it: the module is looked for where the user is.
    sys.path += [folder for folder in (os.getcwd(),) if folder not in sys.path]
    if is_reference(name):
        model = resolve("--model", name)()
    else:
        try:
            model = keras.saving.load_model(name)
        except (OSError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"--model: expected a .keras file that Keras can load, or module:function. Received: {name!r}: "
                f"{str(error).splitlines()[0]}"
            ) from error
    if not isinstance(model, keras.Model):
        raise ConfigurationError(f"--model: expected a keras.Model. Received: {type(model).__name__} of {name!r}.")
    return model
