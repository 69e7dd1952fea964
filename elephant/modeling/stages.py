"""Stages: a Sequential or functional model as a list of calls, cut into parts that follow one another.

Nested models are unfolded, so that a cut may be inside a backbone. A tensor that is made before a cut and used after
it crosses it, with its mask: residuals, inputs that are used late and outputs that end early are carried along. The
parts have the layers of the model itself, so that variables keep their paths, and a stage computes what the model
would, to the last bit.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from elephant.backends.keras_private import (
    calls_in_order,
    forget_waiting_variables,
    functional_graph,
    give_mask,
    has_value,
    initialize_variable,
    input_structure,
    mask_of,
    standardized_inputs,
    with_training,
)
from elephant.errors import ConfigurationError, UnsupportedError

OPTION = "pipelineStages"


@dataclass(frozen=True)
class GraphTensorSpec:
    """A tensor of a graph.

    Attributes:
        shape: The first dimension are the rows.
        dtype: Its name.
        is_masked: Whether Keras gives it a mask.
    """

    shape: tuple[int | None, ...]
    dtype: str
    is_masked: bool

    @property
    def is_float(self) -> bool:
        """True if a gradient flows back through it."""
        return "float" in self.dtype


@dataclass(frozen=True)
class GraphCall:
    """One call of an operation.

    Attributes:
        names: Of the operation, after those of the nested models that it is in.
        operation: A layer, another operation, or the way into a graph.
        run: Takes values by tensor's number, and whether in training; returns the values of ``outputs``.
        inputs: Numbers of the tensors that it takes.
        outputs: Numbers of those that it makes.
    """

    names: tuple[str, ...]
    operation: Any
    run: Callable[[dict[int, Any], bool], Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def variables(self) -> list[Any]:
        """Variables of the operation; none of one that is no layer."""
        return list(getattr(self.operation, "variables", ()))


class ModelGraph:
    """The calls of a model in the order in which Keras makes them, nested models unfolded.

    Attributes:
        calls: The first one takes the inputs as they come, and makes of them what the model expects.
        specs: The tensors, by number.
        inputs: Numbers of the inputs.
        outputs: Numbers of the outputs; one may be there twice.

    Raises:
        UnsupportedError: The model has no graph.
    """

    def __init__(self, model: keras.Model) -> None:
        functional = functional_graph(model)
        if functional is None:
            raise UnsupportedError(
                f"{OPTION}: expected a Sequential or functional model that is built, whose graph can be cut. Received: "
                f"{model.name!r} of class {type(model).__name__}. Build it of layers with keras.Input, or train it "
                f"without {OPTION}."
            )
        self.calls: list[GraphCall] = []
        self.specs: list[GraphTensorSpec] = []
        self.inputs = tuple(self._number(tensor) for tensor in functional.inputs)
        self.outputs = self._unfold(functional, self.inputs, ())

    def _number(self, tensor: Any) -> int:
        masked = mask_of(tensor) is not None
        self.specs.append(GraphTensorSpec(tuple(tensor.shape), keras.backend.standardize_dtype(tensor.dtype), masked))
        return len(self.specs) - 1

    def _unfold(self, functional: Any, given: tuple[int, ...], names: tuple[str, ...]) -> tuple[int, ...]:
        numbers = {id(tensor): self._number(tensor) for tensor in functional.inputs}
        self._append_entrance(functional, given, tuple(numbers.values()), names)
        for node in calls_in_order(functional):
            inputs = tuple(numbers[id(tensor)] for tensor in node.input_tensors)
            inner = self._unfoldable(node)
            if inner is None:
                made = tuple(self._number(tensor) for tensor in node.output_tensors)
                self._append_node(node, numbers, inputs, made, names)
            else:
                made = self._unfold(inner, inputs, (*names, node.operation.name))
            numbers.update(zip(map(id, node.output_tensors), made, strict=True))
        return tuple(numbers[id(tensor)] for tensor in functional.outputs)

    def _unfoldable(self, node: Any) -> Any:
        """Returns the graph of a nested model; None of other operations, and where its own call does more."""
        inner = functional_graph(node.operation)
        if inner is None or any(mask_of(tensor) is not None for tensor in node.input_tensors):
            return None
        # Tensors by name may be given in another order than the graph has them.
        by_name = [isinstance(given, dict) for given in list(node.arguments.args[:1])]
        is_alike = by_name == [isinstance(input_structure(inner), dict)]
        return inner if is_alike and len(inner.inputs) == len(node.input_tensors) else None

    def _append_entrance(
        self, functional: Any, given: tuple[int, ...], made: tuple[int, ...], names: tuple[str, ...]
    ) -> None:
        def enter(values: dict[int, Any], training: bool) -> Sequence[Any]:
            found: Sequence[Any] = standardized_inputs(functional, [values[number] for number in given])
            return found

        self.calls.append(GraphCall(names, None, enter, given, made))

    def _append_node(
        self, node: Any, numbers: dict[int, int], inputs: tuple[int, ...], made: tuple[int, ...], names: tuple[str, ...]
    ) -> None:
        places = {id(tensor): numbers[id(tensor)] for tensor in node.input_tensors}

        def run(values: dict[int, Any], training: bool) -> Sequence[Any]:
            args, kwargs = node.arguments.fill_in({key: values[number] for key, number in places.items()})
            found: Sequence[Any] = keras.tree.flatten(with_training(node.operation, training)(*args, **kwargs))
            return found

        names = (*names, node.operation.name)
        self.calls.append(GraphCall(names, node.operation, run, inputs, made))

    def crossing(self, cut: int) -> tuple[int, ...]:
        """Returns the numbers of the tensors that cross a cut: made before it, and used after it or an output.

        Args:
            cut: So many calls are before it.
        """
        if cut == 0:
            return self.inputs
        if cut == len(self.calls):
            return self.outputs
        made = {*self.inputs, *(number for call in self.calls[:cut] for number in call.outputs)}
        used = {*self.outputs, *(number for call in self.calls[cut:] for number in call.inputs)}
        return tuple(sorted(made & used))

    def divided(self, cut: int) -> str | None:
        """Returns the name of an operation with variables on both sides of a cut; None where there is none."""
        before = {id(variable) for call in self.calls[:cut] for variable in call.variables}
        return next(
            (call.names[-1] for call in self.calls[cut:] if any(id(variable) in before for variable in call.variables)),
            None,
        )

    def named_cuts(self, names: Sequence[str]) -> tuple[int, ...]:
        """Returns the cuts before layers, each of which is the first of a stage.

        Args:
            names: Of layers or nested models, in the order of the model.

        Raises:
            ConfigurationError: There is no such layer, or they are in another order.
            UnsupportedError: A layer with variables would be on both sides of a cut.
        """
        cuts = []
        for name in names:
            found = [place for place, call in enumerate(self.calls) if name in call.names]
            if not found:
                known = dict.fromkeys(part for call in self.calls for part in call.names)
                raise ConfigurationError(
                    f"{OPTION}: expected names of layers. Received: {name!r}. The model has {', '.join(known)}."
                )
            cuts.append(found[0])
        # The first call takes the inputs: a stage has more than that.
        if any(later <= earlier for earlier, later in zip([1, *cuts], cuts, strict=False)):
            raise ConfigurationError(
                f"{OPTION}: expected layers in the order in which the model computes them, after its first one, each "
                f"the first of a stage. Received: {list(names)}, which are numbers {cuts} of {len(self.calls)}."
            )
        for cut in cuts:
            self._require_whole(cut)
        return tuple(cuts)

    def _require_whole(self, cut: int) -> None:
        name = self.divided(cut)
        if name is not None:
            raise UnsupportedError(
                f"{OPTION}: expected a cut with all calls of a layer on one side. Received: a cut before "
                f"{self.calls[cut].names[-1]!r}, with calls of {name!r}, or with its variables, on both sides. Cut "
                "before the first or after the last of them, or give each side a layer of its own: weights that are "
                "shared, such as those of an embedding with the head, have to be in one stage."
            )

    def _named_shared(self) -> str:
        cuts = range(2, len(self.calls))
        names = dict.fromkeys(name for name in map(self.divided, cuts) if name is not None)
        return f": {', '.join(map(repr, names))}" if names else ""

    def balanced_cuts(self, num_stages: int, costs: Sequence[float]) -> tuple[int, ...]:
        """Returns the cuts with which the dearest stage is as cheap as can be.

        Args:
            num_stages: How many stages there are to be.
            costs: Of each call.

        Raises:
            UnsupportedError: The model cannot be cut into so many stages, each with variables.
        """
        places = [cut for cut in range(2, len(self.calls)) if self.divided(cut) is None]
        places = _with_variables_between(places, [bool(call.variables) for call in self.calls])
        cuts = linear_partition(costs, places, num_stages)
        if cuts is None:
            raise UnsupportedError(
                f"{OPTION}: expected a model with at least {num_stages} parts that can be apart from each other. "
                f"Received: one with {len(places) + 1}. Calls of one layer, and layers that share weights, are in one "
                f"part, with all between them{self._named_shared()}. Ask for fewer stages, or give each weights of its "
                "own."
            )
        return cuts


def _with_variables_between(places: Sequence[int], has_variables: Sequence[bool]) -> list[int]:
    """Returns the cuts with variables between them: before each call that has some, the nearest one."""
    chosen: list[int] = []
    last = 0
    for place, end in itertools.pairwise([*places, len(has_variables)]):
        if any(has_variables[last:place]) and any(has_variables[place:end]):
            chosen.append(place)
            last = place
    return chosen


def linear_partition(costs: Sequence[float], places: Sequence[int], count: int) -> tuple[int, ...] | None:
    """Returns the cuts with which the largest sum of a part's costs is smallest, by dynamic programming; None of none.

    Args:
        costs: Of items in their order.
        places: Cuts that are allowed, ascending: so many items are before one.
        count: Of parts.

    Examples:
        >>> linear_partition([1, 1, 1, 3], [1, 2, 3], 2)
        (3,)
        >>> linear_partition([1, 1], [], 2) is None
        True
    """
    prefix = np.concatenate([[0.0], np.cumsum(np.asarray(costs, float))])
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for part in range(count):
        ends = places if part < count - 1 else [len(costs)]
        options = {
            end: [
                (max(cost, float(prefix[end] - prefix[start])), (*cuts, end))
                for start, (cost, cuts) in best.items()
                if start < end
            ]
            for end in ends
        }
        best = {end: min(found) for end, found in options.items() if found}
    return best[len(costs)][1][:-1] if best else None


class ModelStage(keras.layers.Layer):
    """A part of a model as a layer: takes and gives lists of tensors, masks after those that have one.

    Its layers are the model's own. Of a model that was made in `without_values`, they get their values here.

    Args:
        graph: The model's.
        start: So many calls are before it.
        stop: So many calls are before it and in it.

    Attributes:
        entering: The tensors that it takes.
        leaving: Those that it gives.
    """

    def __init__(self, graph: ModelGraph, start: int, stop: int) -> None:
        # The dtype is not to matter: the layers inside cast for themselves.
        super().__init__(name=f"stage_{start}_{stop}", dtype="float32", autocast=False)
        calls = graph.calls[start:stop]
        entering, leaving = graph.crossing(start), graph.crossing(stop)
        self.entering = tuple(graph.specs[number] for number in entering)
        self.leaving = tuple(graph.specs[number] for number in leaving)
        own = {id(call.operation): call.operation for call in calls}
        self.operations = [one for one in own.values() if isinstance(one, keras.layers.Layer)]
        for variable in self.variables:
            if not has_value(variable):
                initialize_variable(variable)
        self._program = _Program(calls, entering, self.entering, leaving, self.leaving)
        self.built = True

    def call(self, inputs: Sequence[Any], training: bool = False) -> list[Any]:
        """Computes the stage.

        Args:
            inputs: The tensors of `entering`, then the masks of those that have one.
            training: As in Keras.

        Returns:
            The tensors of `leaving`, then the masks of those that have one.
        """
        return self._program.run(inputs, training)


@dataclass(frozen=True, eq=False)
class _Program:
    """The calls of a stage: a value of its own, which Keras does not look into."""

    calls: Sequence[GraphCall]
    entering: Sequence[int]
    entering_specs: Sequence[GraphTensorSpec]
    leaving: Sequence[int]
    leaving_specs: Sequence[GraphTensorSpec]

    def run(self, inputs: Sequence[Any], training: bool) -> list[Any]:
        masks = iter(inputs[len(self.entering) :])
        values = dict(zip(self.entering, inputs, strict=False))
        for number, spec in zip(self.entering, self.entering_specs, strict=True):
            if spec.is_masked:
                give_mask(values[number], next(masks))
        for call in self.calls:
            values.update(zip(call.outputs, call.run(values, training), strict=True))
        made = [values[number] for number in self.leaving]
        return made + [mask_of(one) for one, spec in zip(made, self.leaving_specs, strict=True) if spec.is_masked]


def num_tensors(specs: Sequence[GraphTensorSpec]) -> int:
    """Returns how many tensors cross a cut, masks included."""
    return len(specs) + sum(spec.is_masked for spec in specs)


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Has the variables of models that are made in a ``with`` block have shapes and no values.

    `ModelStage` gives its own variables the values that they would have had. The others take no memory.
    """
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        # Else the next scope of Keras' gives all of them values.
        forget_waiting_variables()


def require_cuttable(model: keras.Model) -> None:
    """Checks that a compiled model can be trained in stages.

    Raises:
        ConfigurationError: It is not compiled.
        UnsupportedError: It has a step or a loss of its own, several optimizers, or accumulates gradients itself.
    """
    if not getattr(model, "compiled", False):
        raise ConfigurationError(
            f"{OPTION}: expected a compiled model. Received: {model.name!r}, which is not.",
            topic="a-model-that-is-not-compiled",
        )
    for name in ("train_step", "compute_loss"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise UnsupportedError(
                f"{OPTION}: expected Keras' own {name}, which can be taken in stages. Received: that of "
                f"{type(model).__name__}. Train without {OPTION}."
            )
    several = getattr(keras.optimizers, "MultiOptimizer", None)
    if several is not None and isinstance(model.optimizer, several):
        raise UnsupportedError(
            f"{OPTION}: expected one optimizer. Received: {type(model.optimizer).__name__}. Train without {OPTION}."
        )
    if model.steps_per_execution > 1:
        raise UnsupportedError(
            f"{OPTION}: expected a model that takes one step at a time. Received: steps_per_execution="
            f"{model.steps_per_execution}. Compile it without."
        )
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if inner.gradient_accumulation_steps:
        raise UnsupportedError(
            f"{OPTION}: expected an optimizer that does not accumulate gradients itself. Received: "
            f"gradient_accumulation_steps={inner.gradient_accumulation_steps}. Use larger batches and microBatches."
        )
