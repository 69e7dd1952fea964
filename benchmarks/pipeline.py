"""What training in stages costs: the passes of all stages in one process, and stages on cores of their own.

::

    python benchmarks/pipeline.py                   # everything
    python benchmarks/pipeline.py --only passes     # or stages
    python benchmarks/pipeline.py --backend jax

`passes` takes the passes of all stages one after the other on one core, and compares their processor time with Keras'
own step of the same model and rows, and with Keras' steps over the same micro-batches, whose gradients its optimizer
adds up: what of the difference is that of small micro-batches. `stages` has a process and a core for each stage, and
compares them with Keras' step on one core. There, 1 is what M / (M + S - 1) of M micro-batches and S stages leaves.
Where there are fewer cores than stages, a line has no target. Contenders take turns. Prints one line of JSON per
comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from report import Measurement, median_ratio, report
from team import Member, Team, lasted, seats
from training import TIMEOUT_S, plain_environment

_PASSES_TARGET = 1.15
_STAGES_TARGET = 0.85
_WARMUP = 2


@dataclass(frozen=True)
class DenseCase:
    """A step of a model of equal dense layers.

    Args:
        stages: How many, which divide the layers.
        micro_batches: How many.
        micro_rows: Rows of each.
        layers: Dense layers.
        width: Units of each.
    """

    stages: int
    micro_batches: int
    micro_rows: int
    layers: int = 8
    width: int = 1024

    @property
    def names(self) -> list[str]:
        """The first layer of each stage but the first."""
        return [f"dense{self.layers // self.stages * stage}" for stage in range(1, self.stages)]

    def compiled(self, accumulated: int | None = None) -> Any:
        """Returns the model.

        Args:
            accumulated: Of how many steps its optimizer adds the gradients up.
        """
        import keras

        keras.utils.set_random_seed(1)
        given = [keras.layers.Dense(self.width, "relu", name=f"dense{number}") for number in range(self.layers)]
        model = keras.Sequential([keras.Input((self.width,)), *given])
        model.compile(keras.optimizers.Adam(gradient_accumulation_steps=accumulated), "mse")
        return model

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and labels."""
        rng, shape = np.random.default_rng(2), (self.micro_batches * self.micro_rows, self.width)
        return rng.normal(size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32)


def passes_of(case: DenseCase) -> Callable[[], None]:
    """Returns a step whose passes are those of the stages, in one process and without links."""
    from elephant.backends import current
    from elephant.backends.keras_private import compiled_loss
    from elephant.modeling.stages import ModelGraph, ModelStage

    model, (x, y) = case.compiled(), case.batch()
    model.train_on_batch(x[:1], y[:1])
    graph, loss = ModelGraph(model), compiled_loss(model)
    bounds = [0, *graph.named_cuts(case.names), len(graph.calls)]
    parts = [ModelStage(graph, *pair) for pair in zip(bounds[:-1], bounds[1:], strict=True)]
    functions = [
        current().stage_functions(
            part, (lambda outputs, targets: loss(targets, outputs[0])) if part is parts[-1] else None, part is parts[0]
        )
        for part in parts
    ]
    optimizers = [type(model.optimizer).from_config(model.optimizer.get_config()) for _ in parts]
    updates = []
    for optimizer, part in zip(optimizers, parts, strict=True):
        optimizer.build(part.trainable_variables)
        updates.append(current().update_function(optimizer, part.trainable_variables))

    def step() -> None:
        totals: list[Any] = [None] * len(parts)
        for start in range(0, len(x), case.micro_rows):
            tensors, ways = [x[start : start + case.micro_rows]], []
            for place, one in enumerate(functions):
                targets = y[start : start + case.micro_rows] if place == len(parts) - 1 else ()
                tensors, _, way = one.forward(tensors, targets, 1 / case.micro_batches)
                ways.append(way)
            gradients = [np.zeros_like(tensors[0])]
            for place in reversed(range(len(parts))):
                gradients, totals[place] = functions[place].backward(ways[place], gradients, 1.0, totals[place])
        for update, total in zip(updates, totals, strict=True):
            update(total)

    return step


def accumulated_of(case: DenseCase) -> Callable[[], None]:
    """Returns a step of one process that adds up the gradients of the micro-batches."""
    model, (x, y) = case.compiled(case.micro_batches), case.batch()

    def step() -> None:
        for start in range(0, len(x), case.micro_rows):
            model.train_on_batch(x[start : start + case.micro_rows], y[start : start + case.micro_rows])

    return step


def serve_passes(member: Member, case: DenseCase) -> None:
    """The work of the process that times the passes and Keras' steps in turns, in processor time."""
    model, (x, y) = case.compiled(), case.batch()
    contenders = (passes_of(case), lambda: model.train_on_batch(x, y), accumulated_of(case))
    for _ in member.turns():
        took = []
        for step in contenders:
            began = time.process_time()
            step()
            took.append(time.process_time() - began)
        member.reply(took)


def serve_alone(member: Member, case: DenseCase) -> None:
    """The work of the process that takes Keras' step."""
    model, (x, y) = case.compiled(), case.batch()
    for _ in member.turns():
        member.reply(member.timed(lambda: model.train_on_batch(x, y)))


def serve_stage(member: Member, case: DenseCase) -> None:
    """The work of one stage."""
    from elephant.collective import form_collective
    from elephant.net import Listener
    from elephant.training.pipeline import ModelPipeline

    with Listener.bind("127.0.0.1") as listener:
        addresses, tokens = zip(*member.exchange((listener.address, secrets.token_bytes(32))), strict=True)
        collective = form_collective(member.rank, addresses, listener, tokens[0], "benchmark", TIMEOUT_S)
    with collective:
        pipeline = ModelPipeline(
            case.compiled(), stages=case.names, micro_batches=case.micro_batches, communicator=collective
        )
        given = case.batch() if pipeline.place.is_first else ()
        for _ in member.turns():
            member.reply(member.timed(lambda: pipeline.train_on_batch(*given)))


def measure_passes(options: argparse.Namespace) -> None:
    """All stages' passes on one core, against Keras' step and its steps of micro-batches, by processor time."""
    for rows in (256, 512):
        case = DenseCase(stages=2, micro_batches=4, micro_rows=rows)
        with Team(serve_passes, seats(1), case, environment=_environment(options)) as team:
            turns = [_turn(team) for _ in range(_WARMUP + options.repetitions)][_WARMUP:]
        in_stages, fused, accumulated = (list(side) for side in zip(*turns, strict=True))
        for name, others in (("fused_step", fused), ("accumulated_steps", accumulated)):
            report(
                Measurement(
                    measure=f"passes_of_stages_against_{name}",
                    case={**asdict(case), "backend": options.backend},
                    ratio=median_ratio(in_stages, others),
                    target=_PASSES_TARGET,
                    at_least=False,
                    medians={"stages_cpu_s": statistics.median(in_stages), f"{name}_cpu_s": statistics.median(others)},
                    repetitions=options.repetitions,
                )
            )


def measure_stages(options: argparse.Namespace) -> None:
    """A process and a core for each stage, against Keras' step on one core, over what the schedule leaves."""
    cores = len({seat.core for seat in seats(64)})
    for stages in (2, 4):
        case = DenseCase(stages=stages, micro_batches=8, micro_rows=256)
        with contextlib.ExitStack() as stack:
            environment = _environment(options)
            alone = stack.enter_context(Team(serve_alone, seats(1), case, environment=environment))
            team = stack.enter_context(Team(serve_stage, seats(stages), case, environment=environment))
            team.exchange()
            turns = [(_timed(alone), _timed(team)) for _ in range(_WARMUP + options.repetitions)][_WARMUP:]
        one, several = (list(side) for side in zip(*turns, strict=True))
        ideal = case.micro_batches / (case.micro_batches + stages - 1)
        report(
            Measurement(
                measure="efficiency_of_stages_against_ideal",
                case={**asdict(case), "cores": cores, "backend": options.backend},
                ratio=median_ratio(one, several) / stages / ideal,
                target=_STAGES_TARGET if cores >= stages else None,
                at_least=True,
                medians={
                    "one_process_s": statistics.median(one),
                    "stages_s": statistics.median(several),
                    "ideal_efficiency": ideal,
                },
                repetitions=options.repetitions,
            )
        )


def _environment(options: argparse.Namespace) -> dict[str, str]:
    threads = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
    return {**plain_environment(options.backend), **dict.fromkeys(threads, "1")}


def _turn(team: Team) -> Any:
    team.ask("step")
    return team.replies()[0]


def _timed(team: Team) -> float:
    team.ask("step")
    return lasted(team.timed())


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {"passes": measure_passes, "stages": measure_stages}


def main() -> None:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--backend", default="tensorflow", help="Keras' backend (tensorflow)")
    options = parser.parse_args()
    for name in options.only:
        PARTS[name](options)


if __name__ == "__main__":
    main()
