"""Models with a train_step of their own that is written once, for each backend of Keras in its way."""

import sys

import keras
from pyspark import cloudpickle

# Executors do not have this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class OwnStep(keras.Model):
    """A model that says in ``step`` what it learns from a batch."""

    def step(self, data, update):
        """Returns the logs of a step.

        Args:
            data: As Keras gives it to a ``train_step``.
            update: Called as ``update(loss, variables, optimizer)`` with a function that computes a loss;
                applies its gradients and returns the loss.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def train_step(self, *given):
        return {"tensorflow": self._on_tensorflow, "torch": self._on_torch, "jax": self._on_jax}[
            keras.config.backend()
        ](*given)

    def _on_tensorflow(self, data):
        import tensorflow as tf

        def update(loss, variables, optimizer):
            with tf.GradientTape() as tape:
                value = loss()
            optimizer.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))
            return value

        return self.step(data, update)

    def _on_torch(self, data):
        import torch

        def update(loss, variables, optimizer):
            self.zero_grad()
            value = loss()
            value.backward()
            gradients = [variable.value.grad for variable in variables]
            with torch.no_grad():
                optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return value.detach()

        return self.step(data, update)

    def _on_jax(self, state, data):
        import jax

        groups = (
            self.trainable_variables,
            self.non_trainable_variables,
            self.optimizer.variables,
            self.metrics_variables,
        )
        known = [variable for group in groups for variable in group]
        with keras.StatelessScope(list(zip(known, [value for part in state for value in part], strict=True))) as scope:

            def update(loss, variables, optimizer):
                def of_values(values):
                    now = [(variable, scope.get_current_value(variable)) for variable in known]
                    replaced = {id(variable): value for variable, value in zip(variables, values, strict=True)}
                    with keras.StatelessScope([(one, replaced.get(id(one), value)) for one, value in now]):
                        return loss()

                values = [scope.get_current_value(variable) for variable in variables]
                value, gradients = jax.value_and_grad(of_values)(values)
                optimizer.apply_gradients(zip(gradients, variables, strict=True))
                return value

            logs = self.step(data, update)
        return logs, tuple([scope.get_current_value(variable) for variable in group] for group in groups)
