"""Pipeline: a model in stages, each on ranks of its own, which train on micro-batches one after the other.

A stage sends what crosses a cut to the next one, and gets the gradients back, in the order of `schedule`. At the end
of a step the replicas of a stage add up their gradients, and each stage applies its own (`stage_optimizer`): what one
process gives that adds up the gradients of the same micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from elephant.backends import current
from elephant.backends.keras_private import (
    compiled_loss,
    compiled_metrics,
    functional_graph,
    input_structure,
    output_structure,
)
from elephant.collective import api
from elephant.collective.communicator import Communicator
from elephant.errors import ConfigurationError, UnsupportedError
from elephant.modeling.stage_costs import call_costs
from elephant.modeling.stages import (
    OPTION,
    GraphTensorSpec,
    ModelGraph,
    ModelStage,
    num_tensors,
    require_cuttable,
)
from elephant.modeling.stages import without_values as without_values  # for users, who build models in it
from elephant.modeling.variable_paths import OPTIMIZER, SCALE
from elephant.training.moving_statistics import average_moving_statistics
from elephant.training.schedule import StagePlace, micro_bounds
from elephant.training.schedule import one_forward_one_backward as one_forward_one_backward
from elephant.training.stage_optimizer import StageOptimizer
from elephant.training.stage_state import (
    gathered_state,
    gathered_weights,
    load_variables,
    share_state,
    share_values,
    stage_variables,
    whole_variables,
)


class ModelPipeline:
    """A compiled model that the ranks of a run train in stages; every rank makes it, with the same arguments.

    Args:
        model: A Sequential or functional model, compiled. If its layers were made in `without_values`, no rank has the
            weights of other stages, not even at the start.
        stages: How many stages, with cuts that make them take equally long; or the names of the layers with which
            all stages but the first begin.
        micro_batches: Into how many parts each batch is divided.
        communicator: All ranks, a multiple of the number of stages; those of this run where it is None.
        load: Gives the stage and the optimizer of its weights values, see `elephant.training.stage_values`; None leaves
            those that the model was made with.

    Attributes:
        place: This rank's.
        stage: The layers of this rank.
        optimizer: That of this rank's weights.
        stages: The ranks of this replica, the last stage first.
        replicas: The ranks of this stage.
        step_loss: In the last stage, the loss of the last step of this replica's rows, of all stages, times these rows.

    Raises:
        UnsupportedError: The model has no graph, a train_step of its own, several optimizers, or a layer that would
            be on both sides of a cut.
        ConfigurationError: The stages do not fit the model or the ranks.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        stages: int | Sequence[str],
        micro_batches: int,
        communicator: Communicator | None = None,
        load: Callable[[ModelStage, keras.optimizers.Optimizer], None] | None = None,
    ) -> None:
        self._world = api.current_collective() if communicator is None else communicator
        graph = require_stages(model, stages)
        num_stages = stages if isinstance(stages, int) else len(stages) + 1
        _require_count("microBatches", micro_batches)
        _require_count(OPTION, num_stages)
        if self._world.world_size % num_stages:
            raise ConfigurationError(
                f"{OPTION}: expected a number of ranks that {num_stages} stages divide. Received: "
                f"{self._world.world_size} ranks."
            )
        num_replicas = self._world.world_size // num_stages
        self._model, self._micro_batches = model, micro_batches
        self.place = StagePlace(self._world.rank, num_stages, num_replicas)
        bounds = [0, *self._cuts(graph, stages), len(graph.calls)]
        self.stage = ModelStage(graph, bounds[self.place.stage], bounds[self.place.stage + 1])
        self.stages, self.replicas = self._groups()
        self._optimizer = StageOptimizer(model.optimizer, self.stage, self.place.stage, self.stages, self.replicas)
        self.optimizer = self._optimizer.optimizer
        if load is not None:
            load(self.stage, self.optimizer)
        share_values(self.stage, self.replicas)
        self._functions = current().stage_functions(
            self.stage, self._loss if self.place.is_last else None, self.place.is_first
        )
        # Where targets of steps, and of tests, have arrays.
        self._structures: dict[bool, Any] = {}
        self._losses, self._rows, self.step_loss = 0.0, 0.0, 0.0
        # Those of this replica since its moving statistics were those of all.
        self._own_rows = 0.0
        # Whether layers add losses of their own to those of their weights; None until a test has shown it.
        self._adds_losses: bool | None = None

    @property
    def waited_s(self) -> float:
        """Seconds so far in which this rank stood still for other stages and replicas."""
        return self.stages.waited_s + self.replicas.waited_s

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to them so far."""
        return self.stages.bytes_sent + self.replicas.bytes_sent

    def _cuts(self, graph: ModelGraph, stages: int | Sequence[str]) -> tuple[int, ...]:
        if not isinstance(stages, int):
            return graph.named_cuts(stages)
        # Ranks measure different times, and have to agree.
        costs = np.array(call_costs(graph) if self._world.rank == 0 else np.zeros(len(graph.calls)))
        self._world.broadcast_(costs)
        return graph.balanced_cuts(stages, costs.tolist())

    def _groups(self) -> tuple[Communicator, Communicator]:
        """Returns the ranks of this replica, by rank, and those of this stage."""
        place, made = self.place, []
        columns = [
            [place.rank_of(stage, replica) for stage in reversed(range(place.num_stages))]
            for replica in range(place.num_replicas)
        ]
        rows = [
            [place.rank_of(stage, replica) for replica in range(place.num_replicas)]
            for stage in range(place.num_stages)
        ]
        for ranks in (*columns, *rows):
            group = self._world.new_group(ranks)
            if group is not None:
                made.append(group)
        stages, replicas = made
        return stages, replicas

    def train_on_batch(
        self,
        x: Any = None,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
    ) -> None:
        """Takes one step; every rank calls it, and those of the first stage give their rows, which may be none.

        Args:
            x: Inputs as the model takes them, arrays with the same number of rows.
            y: What the outputs are compared with; as the model's outputs are, where there are several.
            sample_weight: A weight for each row, or such weights for each output.
            class_weight: By class number, the weight of each row whose label that is, or is one-hot for it; others
                weigh 1. For a model of one output, in the place of `sample_weight`.

        Raises:
            ConfigurationError: Arrays differ in their number of rows, or classes cannot have weights here.
        """
        if class_weight is not None and self.place.is_first:
            sample_weight = _weights_of_classes(y, sample_weight, class_weight)
        counts, parts = self._rows_of_step(x, (y, sample_weight))
        num_micro_batches, total_rows = int(counts[0]), counts[1]
        self.step_loss = 0.0
        waiting: dict[int, Any] = {}
        totals: list[Any] | None = None
        scale = self._optimizer.scale
        for is_forward, number in one_forward_one_backward(self.place.stage, self.place.num_stages, num_micro_batches):
            if is_forward:
                waiting[number] = self._forward(parts[number] if self.place.is_first else self._receive(), total_rows)
            else:
                totals = self._backward(waiting.pop(number), scale, totals)
        self._rows += total_rows
        self._losses += self.step_loss
        if total_rows:
            self._optimizer.apply(totals, scale)

    def _rows_of_step(self, x: Any, targets: Any) -> tuple[np.ndarray, list[list[np.ndarray]]]:
        """Returns how many micro-batches there are, and rows on all replicas, with this rank's rows in parts."""
        parts: list[list[np.ndarray]] = []
        place, root, counts = self.place, self.place.num_stages - 1, np.zeros(2)
        structure = self._agreed_structure(targets, training=True)
        if place.is_first:
            arrays = self._arrays_of(x, targets, structure)
            bounds = micro_bounds(len(arrays[0]), self._micro_batches)
            rows = self.replicas.allreduce(np.array([len(arrays[0])], np.float64))
            counts[:] = len(bounds), rows[0]
            parts = [[np.array([end - start, 0.0]), *(one[start:end] for one in arrays)] for start, end in bounds]
        self.stages.broadcast_(counts, root)
        return counts, parts

    def _agreed_structure(self, targets: Any, *, training: bool) -> Any:
        if training not in self._structures:
            root = self.place.num_stages - 1
            self._structures[training] = self.stages.broadcast_object(_skeleton(targets), root)
        return self._structures[training]

    def _arrays_of(self, x: Any, targets: Any, structure: Any) -> list[np.ndarray]:
        keras.tree.assert_same_structure(structure, _skeleton(targets))
        given = [one for one in keras.tree.flatten(targets) if one is not None]
        return _same_rows([*self._inputs_of(x), *map(np.asarray, given)])

    def _inputs_of(self, x: Any) -> list[np.ndarray]:
        """Returns arrays in the order of the model's inputs."""
        structure = input_structure(functional_graph(self._model))
        by_name = isinstance(x, Mapping) and not isinstance(structure, Mapping)
        flat = [x[one.name] for one in keras.tree.flatten(structure)] if by_name else keras.tree.flatten(x)
        return [np.asarray(one) for one in flat]

    def _receive(self) -> list[np.ndarray]:
        return self.stages.recv(self.stages.rank + 1)

    def _forward(self, message: list[np.ndarray], total_rows: float) -> Any:
        """Takes a forward pass of a message.

        Args:
            message: The number of rows and the losses of the stages before, the tensors, what outputs are compared
                with.
        """
        (num_rows, loss), inputs, targets = self._opened(message)
        self._own_rows += num_rows
        packed = _packed(targets, self._structures[True]) if self.place.is_last else ()
        if self.place.is_last:
            self._build_loss(inputs, packed)
        outputs, own, passed = self._functions.forward(inputs, packed, num_rows / total_rows)
        loss += own
        if self.place.is_last:
            self.step_loss += loss * total_rows
            self._count(outputs, packed)
            # No gradient comes from outside: the loss is all that there is.
            return passed, [np.zeros_like(one) for one in _floats(outputs, self.stage.leaving)]
        self.stages.send([np.array([num_rows, loss]), *outputs, *targets], self.stages.rank - 1)
        return passed, None

    def _opened(self, message: list[np.ndarray]) -> tuple[list[float], list[np.ndarray], list[np.ndarray]]:
        numbers, *arrays = message
        count = num_tensors(self.stage.entering)
        return numbers.tolist(), arrays[:count], arrays[count:]

    def _backward(self, waiting: Any, scale: float, totals: list[Any] | None) -> list[Any]:
        passed, gradients = waiting
        if gradients is None:
            gradients = self.stages.recv(self.stages.rank - 1)
        back, totals = self._functions.backward(passed, gradients, scale, totals)
        if not self.place.is_first:
            self.stages.send(back, self.stages.rank + 1)
        return totals

    def _loss(self, outputs: list[Any], targets: Any) -> Any:
        y, weights = targets
        return compiled_loss(self._model)(y, _predictions(self._model, outputs), weights)

    def _build_loss(self, inputs: list[np.ndarray], targets: Any) -> None:
        """Has the compiled losses make what they count with, which a compiled function cannot."""
        compiled = compiled_loss(self._model)
        if not compiled.built:
            outputs = [keras.ops.convert_to_tensor(one) for one in self._functions.infer(inputs)]
            self._loss(outputs, targets)
            for metric in compiled.metrics:
                metric.reset_state()

    def _count(self, outputs: list[np.ndarray], targets: Any) -> None:
        compiled = compiled_metrics(self._model)
        if compiled is not None:
            y, weights = targets
            tensors = [keras.ops.convert_to_tensor(one) for one in outputs]
            compiled.update_state(y, _predictions(self._model, tensors), weights)
        if compiled_loss(self._model).metrics:
            # The losses of several outputs, which the passes do not count.
            self._loss([keras.ops.convert_to_tensor(one) for one in outputs], targets)

    def test_on_batch(self, x: Any = None, y: Any = None, sample_weight: Any = None) -> tuple[float, float]:
        """Counts rows in the metrics, and trains on none; all ranks of a replica call it.

        Args:
            x: As in `train_on_batch`, by the rank of the first stage.
            y: As there.
            sample_weight: As there.

        Returns:
            The mean loss of the rows, of all stages up to this one, and the number of rows.
        """
        structure = self._agreed_structure((y, sample_weight), training=False)
        if self.place.is_first:
            arrays = self._arrays_of(x, (y, sample_weight), structure)
            message = [np.array([len(arrays[0]), 0.0]), *arrays]
        else:
            message = self._receive()
        (num_rows, loss), inputs, targets = self._opened(message)
        outputs, own = self._inferred(inputs)
        loss += own
        if not self.place.is_last:
            self.stages.send([np.array([num_rows, loss]), *outputs, *targets], self.stages.rank - 1)
            return loss, num_rows
        packed = _packed(targets, structure)
        self._build_loss(inputs, packed)
        tensors = [keras.ops.convert_to_tensor(one) for one in outputs]
        with keras.StatelessScope():
            loss += float(keras.ops.convert_to_numpy(self._loss(tensors, packed)))
        self._count(outputs, packed)
        return loss, num_rows

    def _inferred(self, inputs: list[np.ndarray]) -> tuple[list[np.ndarray], float]:
        """Returns the outputs of this stage, and the losses of its layers and weights."""
        penalties = [one.regularizer(one) for one in self.stage.trainable_variables if one.regularizer is not None]
        if self._adds_losses is not False:
            # No compiled function gives them: so it is tried once whether there are any.
            made = self.stage([keras.ops.convert_to_tensor(one) for one in inputs], training=False)
            losses = self.stage.losses
            self._adds_losses = len(losses) > len(penalties)
            return [keras.ops.convert_to_numpy(one) for one in made], _sum(losses)
        return self._functions.infer(inputs), _sum(penalties)

    def predict_on_batch(self, x: Any = None) -> Any:
        """Returns the model's outputs on ranks of the last stage, and None on others; every rank calls it."""
        arrays = self._inputs_of(x) if self.place.is_first else self.stages.recv(self.stages.rank + 1)
        outputs = self._functions.infer(arrays)
        if self.place.is_last:
            return _predictions(self._model, outputs)
        self.stages.send(outputs, self.stages.rank - 1)
        return None

    def results(self) -> dict[str, Any]:
        """Returns loss and compiled metrics since the last call, over all replicas, on rank 0; every rank calls it.

        What metrics count is added up over the replicas, as it is for means, accuracies and confusion matrices.
        Moving statistics become the averages over the replicas, weighted by their rows, as at the end of an epoch.
        """
        self._average_statistics()
        losses = self._world.allreduce(np.array([self._losses]))[0]
        found: dict[str, Any] = {"loss": float(losses / self._rows) if self._rows else 0.0}
        self._losses, self._rows = 0.0, 0.0
        compiled = compiled_metrics(self._model) if self.place.is_last else None
        if compiled is not None and compiled.built:
            for variable in compiled.variables:
                variable.assign(self.replicas.allreduce(keras.ops.convert_to_numpy(variable)))
            found |= {name: keras.ops.convert_to_numpy(value).tolist() for name, value in compiled.result().items()}
            compiled.reset_state()
        return found if self._world.rank == 0 else {}

    def state(self) -> dict[str, np.ndarray] | None:
        """Returns the variables of model and optimizer by path, on rank 0, and None on others; every rank calls it.

        It is the state of the whole model, whatever the cuts are, with the paths that checkpoints have; see
        `elephant.modeling.variable_paths`. Moving statistics become the averages over the replicas, weighted by their
        rows.
        """
        self._average_statistics()
        return gathered_state(self._own_variables(), self.stages, self.replicas)

    def _own_variables(self) -> dict[str, Any]:
        return stage_variables(self._model, self.stage, self.optimizer, self.place.replica)

    def _average_statistics(self) -> None:
        if self.place.num_replicas == 1:
            return
        rows = self.replicas.allreduce(np.array([self._own_rows]))[0]
        if rows:
            average_moving_statistics(self.stage, self.replicas, self._own_rows / rows)
        self._own_rows = 0.0

    def weights(self) -> Iterator[np.ndarray]:
        """Yields the model's weights in its order, one at a time, on rank 0, and none on others; every rank takes all.

        No rank has more than its own stage and one of them. Moving statistics are those of this replica.
        """
        if not self.place.replica:
            yield from gathered_weights(self._model, self.stage, self.stages)

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Gives this rank's variables the values of a state, which may come from other cuts.

        Args:
            state: As `state` returns it, or the arrays of a checkpoint; what is none of the model's weights may be
                missing. Of an open ``numpy.load(...)``, this stage's arrays alone are read.

        Raises:
            ConfigurationError: A weight of the model is not there, or has another shape.
        """
        load_variables(self._own_variables(), state)

    def put_together(self, *, optimizer: bool) -> None:
        """Gives the whole model the values that its variables have in their stages; every rank calls it.

        Moving statistics, and random generators, are those of this rank's replica.

        Args:
            optimizer: Whether the model's optimizer gets those of the stages' optimizers, too.
        """
        whole = whole_variables(self._model, self.place.replica)
        share_state(self._own_variables(), whole, self.stages, optimizer=optimizer)

    def follow_optimizer(self) -> None:
        """Gives the optimizer of this stage the values that the variables of the model's optimizer have."""
        whole = whole_variables(self._model, self.place.replica)
        for path, variable in self._own_variables().items():
            if path.startswith((OPTIMIZER, SCALE)) and path in whole:
                variable.assign(whole[path])


def require_stages(model: keras.Model, stages: int | Sequence[str]) -> ModelGraph:
    """Returns the graph of a compiled model that can be trained in stages; no process but this one is needed to tell.

    Args:
        stages: As `ModelPipeline` takes them.

    Raises:
        UnsupportedError: The model cannot be cut so, or trained in parts.
        ConfigurationError: It is not compiled, or has no layers of these names.
    """
    require_cuttable(model)
    require_rowwise_losses(model)
    graph = ModelGraph(model)
    if any(graph.specs[number].is_masked for number in graph.outputs):
        raise UnsupportedError(
            f"{OPTION}: expected outputs without masks, whose losses are means over all rows. Received: outputs "
            f"{model.output_names if hasattr(model, 'output_names') else model.name!r}, of which one has a mask."
        )
    if isinstance(stages, int):
        graph.balanced_cuts(stages, [1.0] * len(graph.calls))
    else:
        graph.named_cuts(stages)
    return graph


def require_rowwise_losses(model: keras.Model) -> None:
    """Checks that losses are means over rows, which those of micro-batches add up to.

    Raises:
        UnsupportedError: A loss is a sum, or divides by something else.
    """
    for loss in keras.tree.flatten(model.loss):
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if reduction not in ("sum_over_batch_size", "mean"):
            raise UnsupportedError(
                f"{OPTION}: expected losses with reduction='sum_over_batch_size'. Received: {loss.name!r} with "
                f"reduction={reduction!r}."
            )
        if getattr(loss, "ignore_class", None) is not None:
            raise UnsupportedError(
                f"{OPTION}: expected losses that count all rows. Received: {loss.name!r} with "
                f"ignore_class={loss.ignore_class}, the mean over those of other classes. Give the rows a weight of "
                "zero instead."
            )


def _require_count(name: str, count: int) -> None:
    if count < 1:
        raise ConfigurationError(f"{name}: expected an integer of at least 1. Received: {count}.")


def _skeleton(targets: Any) -> Any:
    """Returns where a nest has arrays."""
    return keras.tree.map_structure(lambda one: one is not None, targets)


def _weights_of_classes(y: Any, sample_weight: Any, class_weight: Mapping[int, float]) -> np.ndarray:
    """Returns the weights of rows that Keras makes of those of classes."""
    if sample_weight is not None or keras.tree.is_nested(y):
        raise ConfigurationError(
            "class_weight: expected a model of one output, and no sample_weight. Received: "
            f"{'sample_weight' if sample_weight is not None else 'labels of several outputs'}. Multiply the weights "
            "into sample_weight, one array for each output."
        )
    labels = np.asarray(y)
    if labels.ndim > 1:
        labels = labels.argmax(-1) if labels.shape[-1] != 1 else labels[..., 0]
    numbers, places = np.unique(np.round(labels).astype(int), return_inverse=True)
    return np.array([class_weight.get(int(number), 1.0) for number in numbers], np.float32)[
        places.reshape(labels.shape)
    ]


def _packed(targets: list[np.ndarray], structure: Any) -> Any:
    """Returns arrays in the nest that `_skeleton` has described."""
    given = iter(targets)
    return keras.tree.map_structure(lambda there: next(given) if there else None, structure)


def _same_rows(arrays: list[np.ndarray]) -> list[np.ndarray]:
    if len({len(one) for one in arrays}) != 1:
        raise ConfigurationError(
            f"x, y, sample_weight: expected arrays with as many rows. Received: {[len(one) for one in arrays]}."
        )
    return arrays


def _predictions(model: keras.Model, outputs: list[Any]) -> Any:
    """Returns the outputs of the last stage as the model gives them."""
    structure = output_structure(functional_graph(model))
    packed = keras.tree.pack_sequence_as(structure, outputs)
    return packed[0] if isinstance(packed, list) and len(packed) == 1 else packed


def _sum(losses: Sequence[Any]) -> float:
    return float(sum(np.sum(keras.ops.convert_to_numpy(one)) for one in losses))


def _floats(outputs: Sequence[np.ndarray], specs: Sequence[GraphTensorSpec]) -> list[np.ndarray]:
    return [one for one, spec in zip(outputs, specs, strict=True) if spec.is_float]
