"""Mixed precision: the layers of a model that is there already compute in 16 bits, and keep their weights in 32.

Keras chooses a layer's policy when the layer is made, and an archive names it for every layer. So the policy is
given to the layers of the built model, to those that compute in float32; another policy is the user's own choice.
"""

from __future__ import annotations

import keras

FLOAT16, BFLOAT16 = "mixed_float16", "mixed_bfloat16"
_ADDED = "_elephant_loss_scale"


def lower_precision(model: keras.Model, policy: str) -> None:
    """Makes a model compute in 16 bits, as if it had been made under another policy.

    With float16 small gradients would vanish: the optimizer is wrapped into one that scales the loss, as
    ``compile`` does it, unless it is one already (Micikevicius et al. 2018, section 3.2).

    Args:
        model: A built, compiled model, whose optimizer is built.
        policy: ``"mixed_float16"`` or ``"mixed_bfloat16"``.
    """
    for layer in model._flatten_layers(include_self=True):
        if layer.dtype_policy.name == "float32":
            layer.dtype_policy = policy
    if policy == FLOAT16 and not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        scaling = keras.optimizers.LossScaleOptimizer(model.optimizer)
        scaling.build(model.trainable_variables)
        setattr(scaling, _ADDED, True)
        model.optimizer = scaling


def kept_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer whose state is the model's own: without the scaling that `lower_precision` has added."""
    return optimizer.inner_optimizer if getattr(optimizer, _ADDED, False) else optimizer


def added_scale(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables of the scaling that `lower_precision` has added; none where it has added none."""
    return [optimizer.step_counter, optimizer.dynamic_scale] if getattr(optimizer, _ADDED, False) else []
