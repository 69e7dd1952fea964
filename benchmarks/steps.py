"""What a training step costs: two ranks against what the cores could do, the hook alone, and memory.

::

    python benchmarks/steps.py                 # everything
    python benchmarks/steps.py --only models   # models, kernel, hook, memory or optimizer

Every process is pinned to one core. Contenders take turns, an epoch each; a turn's
time is from its beginning to the moment at which the next epoch could begin. The
first turn, in which TensorFlow traces the model, is not counted. Prints one line of
JSON per comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from report import Measurement, median_ratio, report
from team import ANYWHERE, Member, Seat, Team, seats
from training import (
    Epoch,
    Training,
    fit_alone,
    fit_as_rank,
    fit_hooked,
    pickled_source,
    plain_environment,
    rank_environment,
)

from elephant.backends.tensorflow_exchange import EXCHANGE_VARIABLE

WARMUP = 1
_DISTURBED = 1.3
_LARGE_PARAMETERS = 24_202_250
# A small network, one that computes, one with looked-up rows and a recurrent layer, and one with many weights.
MODELS = (
    Training(workload="mlp_118k", rows=20_000, batch_size=64, epochs=0),
    Training(workload="cnn_400k", rows=12_000, batch_size=32, epochs=0),
    Training(workload="lstm_text", rows=12_000, batch_size=32, epochs=0),
    Training(workload="mlp_24m", rows=1024, batch_size=256, epochs=0),
)


@dataclass(frozen=True)
class Contender:
    """One side of a comparison.

    Args:
        work: What its processes do.
        places: Where they run.
        training: What each of them trains; its ``epochs`` follow from the repetitions.
        environment: Environment variables of its processes.
    """

    work: Callable[[Member, Training], None]
    places: Sequence[Seat]
    training: Training
    environment: Mapping[str, str]

    @classmethod
    def of_ranks(cls, places: Sequence[Seat], training: Training, backend: str = "tensorflow") -> Contender:
        """Returns ranks of elephant, as it starts them."""
        training = replace(training, source=pickled_source(training.workload, backend))
        return cls(fit_as_rank, places, training, rank_environment(backend))

    @classmethod
    def of_plain(
        cls,
        count: int,
        training: Training,
        work: Callable[[Member, Training], None] = fit_alone,
        backend: str = "tensorflow",
    ) -> Contender:
        """Returns processes that call ``model.fit``, each for itself."""
        return cls(work, seats(count), training, plain_environment(backend))

    def team(self, epochs: int) -> Team:
        """Starts the processes."""
        training = replace(self.training, epochs=epochs)
        team = Team(self.work, self.places, training, environment=self.environment)
        team.exchange()
        return team


def epochs_in_turns(contenders: Mapping[str, Contender], repetitions: int) -> dict[str, list[list[Epoch]]]:
    """Returns what the processes of each contender tell of each counted epoch."""
    told: dict[str, list[list[Epoch]]] = {name: [] for name in contenders}
    with contextlib.ExitStack() as stack:
        teams = {
            name: stack.enter_context(contender.team(WARMUP + repetitions)) for name, contender in contenders.items()
        }
        for repetition in range(WARMUP + repetitions):
            for name, team in teams.items():
                team.ask("epoch")
                epoch = team.replies()
                if repetition >= WARMUP:
                    told[name].append(epoch)
    return told


def undisturbed(epochs: list[list[Epoch]]) -> list[list[Epoch]]:
    """Returns the epochs that lasted at most `_DISTURBED` times as long as the quickest.

    Others' work lengthens an epoch, and so does ``model.fit`` itself: on one core its threads slept for 0.6 to 8 s of
    many epochs, with that core idle.
    """
    lasted = [max(epoch.seconds for epoch in team) for team in epochs]
    return [team for team, seconds in zip(epochs, lasted, strict=True) if seconds <= _DISTURBED * min(lasted)]


@dataclass(frozen=True)
class Speed:
    """How fast a contender was.

    Args:
        rows_per_s: The sum of its processes' rates, per undisturbed epoch.
        rows_per_cpu_s: The same by each process' own processor time, per undisturbed epoch: the rate that
            it would have if it never waited, neither for a rank nor for its core.
        ms_per_step: Of the processes' mean, per undisturbed epoch.
        cpu_ms_per_step: Processor time of one process, per undisturbed epoch.
        faults: Pages that the process which read most of them had to read from disk, per undisturbed epoch.
    """

    rows_per_s: list[float]
    rows_per_cpu_s: list[float]
    ms_per_step: list[float]
    cpu_ms_per_step: list[float]
    faults: list[float]

    @classmethod
    def of(cls, contender: Contender, epochs: list[list[Epoch]]) -> Speed:
        """Returns the speed that a contender's processes had, in its undisturbed epochs."""
        training, epochs = contender.training, undisturbed(epochs)
        steps = -(-training.rows // training.batch_size)
        return cls(
            rows_per_s=[sum(training.rows / epoch.seconds for epoch in team) for team in epochs],
            rows_per_cpu_s=[sum(training.rows / epoch.cpu_s for epoch in team) for team in epochs],
            ms_per_step=[statistics.mean(epoch.seconds for epoch in team) / steps * 1000 for team in epochs],
            cpu_ms_per_step=[statistics.mean(epoch.cpu_s for epoch in team) / steps * 1000 for team in epochs],
            faults=[float(max(epoch.faults for epoch in team)) for team in epochs],
        )

    def gain_over(self, peer: Speed) -> float:
        """Returns how many times the peer's rate this one is, by the clock or by processor time: the lower of the two.

        On an idle machine that is the clock's, which counts waiting. Where others use the cores it is
        not, because a process of many threads then loses more of the clock than one of few.
        """
        clock = median_ratio(self.rows_per_s, peer.rows_per_s)
        return min(clock, median_ratio(self.rows_per_cpu_s, peer.rows_per_cpu_s))


def speeds(contenders: Mapping[str, Contender], repetitions: int) -> tuple[dict[str, Speed], dict[str, float]]:
    """Returns the speed of each contender, and the medians of all."""
    told = epochs_in_turns(contenders, repetitions)
    speed = {name: Speed.of(contenders[name], epochs) for name, epochs in told.items()}
    medians = {
        f"{name}_{what}": statistics.median(values) for name, of in speed.items() for what, values in vars(of).items()
    }
    return speed, medians


def measure_models(repetitions: int) -> None:
    """Two ranks against a ``model.fit`` of its own on each core, and against one that has both cores.

    The ceiling's processes have the rows and batches of a rank; the one process has those of both ranks.
    """
    for training in MODELS:
        whole = replace(training, rows=2 * training.rows, batch_size=2 * training.batch_size)
        contenders = {
            "ranks": Contender.of_ranks(seats(2), training),
            "ceiling": Contender.of_plain(2, training),
            "both_cores": Contender(fit_alone, [ANYWHERE], whole, plain_environment()),
        }
        speed, medians = speeds(contenders, repetitions)
        ours, whole_speed = speed["ranks"], speed["both_cores"]
        # What the one process spends is its own; the ranks' rates by processor time are per process.
        cpu = median_ratio(whole_speed.cpu_ms_per_step, [2 * value for value in ours.cpu_ms_per_step])
        for measure, ratio, target in (
            ("ranks_against_ceiling", ours.gain_over(speed["ceiling"]), 0.95),
            ("ranks_against_both_cores_by_clock", median_ratio(ours.rows_per_s, whole_speed.rows_per_s), 1.0),
            ("ranks_against_both_cores_by_processor_time", cpu, 1.0),
        ):
            report(
                Measurement(
                    measure=measure,
                    case={"workload": training.workload, "batch_size": training.batch_size, "ranks": 2},
                    ratio=ratio,
                    target=target,
                    at_least=True,
                    medians=medians,
                    repetitions=repetitions,
                )
            )


def measure_kernel(repetitions: int) -> None:
    """Two ranks that exchange gradients by TensorFlow's kernel against two that do so by a callback into Python."""
    for training in MODELS[:2]:
        kernel = Contender.of_ranks(seats(2), training)
        callback = replace(kernel, environment={**kernel.environment, EXCHANGE_VARIABLE: "callback"})
        speed, medians = speeds({"kernel": kernel, "callback": callback}, repetitions)
        report(
            Measurement(
                measure="kernel_against_callback",
                case={"workload": training.workload, "batch_size": training.batch_size, "ranks": 2},
                ratio=speed["kernel"].gain_over(speed["callback"]),
                target=None,
                at_least=True,
                medians=medians,
                repetitions=repetitions,
            )
        )


def measure_hook(repetitions: int) -> None:
    """What the hook adds to a step in a world of one; and what all that a rank does adds."""
    training = Training(workload="mlp_118k", rows=20_000, batch_size=64, epochs=0)
    speed, medians = speeds(
        {
            "plain": Contender.of_plain(1, training),
            "hooked": Contender.of_plain(1, training, fit_hooked),
            "rank": Contender.of_ranks(seats(1), training),
        },
        repetitions,
    )
    for name, target in (("hooked", 0.2), ("rank", None)):
        report(
            Measurement(
                measure=f"{'hook' if name == 'hooked' else 'rank'}_overhead_alone",
                case={"workload": "mlp_118k", "batch_size": 64, "ranks": 1},
                ratio=1 / speed[name].gain_over(speed["plain"]) - 1,
                target=target,
                at_least=False,
                medians=medians,
                repetitions=repetitions,
            )
        )


def measure_memory(repetitions: int) -> None:
    """How far a rank's resident memory rises above what it is when model and optimizer are there.

    In gradient bytes; the rise of a ``model.fit`` of its own is told beside it.
    """
    training = Training(workload="mlp_24m", rows=256, batch_size=32, epochs=0)
    told = epochs_in_turns(
        {"rank": Contender.of_ranks(seats(2), training), "plain": Contender.of_plain(1, training)},
        repetitions,
    )
    gradient_bytes = 4 * _LARGE_PARAMETERS
    grown = {
        name: [max(epoch.grown for epoch in processes) / gradient_bytes for processes in epochs]
        for name, epochs in told.items()
    }
    report(
        Measurement(
            measure="peak_memory_above_model",
            case={"workload": "mlp_24m", "ranks": 2},
            # A peak only rises.
            ratio=grown["rank"][-1],
            target=2.5,
            at_least=False,
            medians={f"{name}_in_gradients": values[-1] for name, values in grown.items()},
            repetitions=repetitions,
        )
    )


def measure_optimizer(repetitions: int) -> None:
    """Two ranks that have the slots of a part of the weights each against two that have all: time, and bytes."""
    training = Training(workload="mlp_24m_deep", rows=1024, batch_size=128, epochs=0)
    divided = replace(training, options={"shard_optimizer": True})
    contenders = {
        "whole": Contender.of_ranks(seats(2), training),
        "divided": Contender.of_ranks(seats(2), divided),
    }
    told = epochs_in_turns(contenders, repetitions)
    speed = {name: Speed.of(contenders[name], epochs) for name, epochs in told.items()}
    slots = {name: max(epoch.slot_bytes for team in epochs for epoch in team) for name, epochs in told.items()}
    medians = {f"{name}_ms_per_step": statistics.median(of.ms_per_step) for name, of in speed.items()}
    medians |= {f"{name}_slot_bytes": float(count) for name, count in slots.items()}
    for measure, ratio in (
        ("divided_optimizer_seconds", median_ratio(speed["divided"].ms_per_step, speed["whole"].ms_per_step)),
        ("divided_optimizer_bytes", slots["divided"] / slots["whole"]),
    ):
        report(
            Measurement(
                measure=measure,
                case={"workload": "mlp_24m_deep", "batch_size": training.batch_size, "ranks": 2},
                ratio=ratio,
                target=None,
                at_least=False,
                medians=medians,
                repetitions=repetitions,
            )
        )


PARTS: dict[str, Callable[[int], None]] = {
    "models": measure_models,
    "kernel": measure_kernel,
    "hook": measure_hook,
    "memory": measure_memory,
    "optimizer": measure_optimizer,
}


def main() -> None:
    """Measures what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    for name in options.only:
        PARTS[name](options.repetitions)


if __name__ == "__main__":
    main()
