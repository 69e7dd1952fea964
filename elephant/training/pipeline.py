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
from elephant.training.schedule import StagePlace, micro_bounds
from elephant.training.schedule import one_forward_one_backward as one_forward_one_backward
from elephant.training.stage_optimizer import StageOptimizer
from elephant.training.stage_state import (
    assign_state,
    average_statistics,
    gathered_state,
    gathered_weights,
    share_values,
    stage_variables,
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
        require_cuttable(model)
        require_rowwise_losses(model)
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
        graph = ModelGraph(model)
        if any(graph.specs[number].is_masked for number in graph.outputs):
            raise UnsupportedError(
                f"{OPTION}: expected outputs without masks, whose losses are means over all rows. Received: outputs "
                f"{model.output_names if hasattr(model, 'output_names') else model.name!r}, of which one has a mask."
            )
        bounds = [0, *self._cuts(graph, stages), len(graph.calls)]
        self.stage = ModelStage(graph, bounds[self.place.stage], bounds[self.place.stage + 1])
        self._stages, self._replicas = self._groups()
        self._optimizer = StageOptimizer(model.optimizer, self.stage, self.place.stage, self._stages, self._replicas)
        self.optimizer = self._optimizer.optimizer
        if load is not None:
            load(self.stage, self.optimizer)
        share_values(self.stage, self._replicas)
        self._functions = current().stage_functions(
            self.stage, self._loss if self.place.is_last else None, self.place.is_first
        )
        self._structure: Any = None
        self._losses, self._rows = 0.0, 0.0

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

    def train_on_batch(self, x: Any = None, y: Any = None, sample_weight: Any = None) -> None:
        """Takes one step; every rank calls it, and those of the first stage give their rows, which may be none.

        Args:
            x: Inputs as the model takes them, arrays with the same number of rows.
            y: What the outputs are compared with.
            sample_weight: A weight for each row.
        """
        counts, parts = self._rows_of_step(x, (y, sample_weight))
        num_micro_batches, total_rows = int(counts[0]), counts[1]
        waiting: dict[int, Any] = {}
        totals: list[Any] | None = None
        scale = self._optimizer.scale
        for is_forward, number in one_forward_one_backward(self.place.stage, self.place.num_stages, num_micro_batches):
            if is_forward:
                waiting[number] = self._forward(parts[number] if self.place.is_first else self._receive(), total_rows)
            else:
                totals = self._backward(waiting.pop(number), scale, totals)
        self._rows += total_rows
        if total_rows:
            self._optimizer.apply(totals, scale)

    def _rows_of_step(self, x: Any, targets: Any) -> tuple[np.ndarray, list[list[np.ndarray]]]:
        """Returns how many micro-batches there are, and rows on all replicas, with this rank's rows in parts."""
        parts: list[list[np.ndarray]] = []
        place, root, counts = self.place, self.place.num_stages - 1, np.zeros(2)
        if self._structure is None:
            self._structure = self._stages.broadcast_object(_skeleton(targets), root)
        if place.is_first:
            keras.tree.assert_same_structure(self._structure, _skeleton(targets))
            given = [one for one in keras.tree.flatten(targets) if one is not None]
            arrays = _same_rows([*self._inputs_of(x), *map(np.asarray, given)])
            bounds = micro_bounds(len(arrays[0]), self._micro_batches)
            rows = self._replicas.allreduce(np.array([len(arrays[0])], np.float64))
            counts[:] = len(bounds), rows[0]
            parts = [[np.array([end - start], float), *(one[start:end] for one in arrays)] for start, end in bounds]
        self._stages.broadcast_(counts, root)
        return counts, parts

    def _inputs_of(self, x: Any) -> list[np.ndarray]:
        """Returns arrays in the order of the model's inputs."""
        structure = input_structure(functional_graph(self._model))
        by_name = isinstance(x, Mapping) and not isinstance(structure, Mapping)
        flat = [x[one.name] for one in keras.tree.flatten(structure)] if by_name else keras.tree.flatten(x)
        return [np.asarray(one) for one in flat]

    def _receive(self) -> list[np.ndarray]:
        return self._stages.recv(self._stages.rank + 1)

    def _forward(self, message: list[np.ndarray], total_rows: float) -> Any:
        """Takes a forward pass of a message: the number of rows, the tensors, what outputs are compared with."""
        count, *arrays = message
        num_inputs = num_tensors(self.stage.entering)
        inputs, targets = arrays[:num_inputs], arrays[num_inputs:]
        packed = self._packed(targets) if self.place.is_last else ()
        if self.place.is_last:
            self._build_loss(inputs, packed)
        outputs, loss, passed = self._functions.forward(inputs, packed, float(count[0]) / total_rows)
        self._losses += loss * total_rows
        if self.place.is_last:
            self._count(outputs, packed)
            # No gradient comes from outside: the loss is all that there is.
            return passed, [np.zeros_like(one) for one in _floats(outputs, self.stage.leaving)]
        self._stages.send([count, *outputs, *targets], self._stages.rank - 1)
        return passed, None

    def _backward(self, waiting: Any, scale: float, totals: list[Any] | None) -> list[Any]:
        passed, gradients = waiting
        if gradients is None:
            gradients = self._stages.recv(self._stages.rank - 1)
        back, totals = self._functions.backward(passed, gradients, scale, totals)
        if not self.place.is_first:
            self._stages.send(back, self._stages.rank + 1)
        return totals

    def _packed(self, targets: list[np.ndarray]) -> Any:
        given = iter(targets)
        return keras.tree.map_structure(lambda there: next(given) if there else None, self._structure)

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

    def predict_on_batch(self, x: Any = None) -> Any:
        """Returns the model's outputs on ranks of the last stage, and None on others; every rank calls it."""
        arrays = self._inputs_of(x) if self.place.is_first else self._stages.recv(self._stages.rank + 1)
        outputs = self._functions.infer(arrays)
        if self.place.is_last:
            return _predictions(self._model, outputs)
        self._stages.send(outputs, self._stages.rank - 1)
        return None

    def results(self) -> dict[str, Any]:
        """Returns loss and compiled metrics since the last call, over all replicas, on rank 0; every rank calls it.

        What metrics count is added up over the replicas, as it is for means, accuracies and confusion matrices.
        """
        losses = self._world.allreduce(np.array([self._losses]))[0]
        found: dict[str, Any] = {"loss": float(losses / self._rows) if self._rows else 0.0}
        self._losses, self._rows = 0.0, 0.0
        compiled = compiled_metrics(self._model) if self.place.is_last else None
        if compiled is not None and compiled.built:
            for variable in compiled.variables:
                variable.assign(self._replicas.allreduce(keras.ops.convert_to_numpy(variable)))
            found |= {name: np.asarray(value).tolist() for name, value in compiled.result().items()}
            compiled.reset_state()
        return found if self._world.rank == 0 else {}

    def state(self) -> dict[str, np.ndarray] | None:
        """Returns the variables of model and optimizer by path, on rank 0, and None on others; every rank calls it.

        It is the state of the whole model, whatever the cuts are. Moving statistics become the means over the replicas.
        """
        average_statistics(self.stage, self._replicas)
        own = stage_variables(self._model, self.stage, self.optimizer)
        return None if self.place.replica else gathered_state(own, self._stages)

    def weights(self) -> Iterator[np.ndarray]:
        """Yields the model's weights in its order, one at a time, on rank 0, and none on others; every rank takes all.

        No rank has more than its own stage and one of them. Moving statistics are those of this replica.
        """
        if not self.place.replica:
            yield from gathered_weights(self._model, self.stage, self._stages)

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Gives this rank's variables the values of a state, which may come from other cuts.

        Args:
            state: As `state` returns it, or without the optimizer's part.

        Raises:
            ConfigurationError: A variable of the model is not there.
        """
        assign_state(stage_variables(self._model, self.stage, self.optimizer), state)


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


def _require_count(name: str, count: int) -> None:
    if count < 1:
        raise ConfigurationError(f"{name}: expected an integer of at least 1. Received: {count}.")


def _skeleton(targets: Any) -> Any:
    """Returns where a nest has arrays."""
    return keras.tree.map_structure(lambda one: one is not None, targets)


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


def _floats(outputs: Sequence[np.ndarray], specs: Sequence[GraphTensorSpec]) -> list[np.ndarray]:
    return [one for one, spec in zip(outputs, specs, strict=True) if spec.is_float]
