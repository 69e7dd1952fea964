"""Runs most benchmarks and prints the table of targets: what was asked, what was reached.

::

    python benchmarks/table.py --mnist FOLDER > table.md            # two to three hours; lines of JSON go to stderr
    python benchmarks/table.py --only fit links                     # some of the scripts
    python benchmarks/table.py --from measured.jsonl                # lines that were measured before

Measure on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from report import Measurement

SCRIPTS = (
    "allreduce",
    "steps",
    "backends",
    "links",
    "fit",
    "first_step",
    "data_path",
    "shard_epochs",
    "inference",
    "parity",
    "limited_memory",
    "parameter_server",
    "asynchronous_steps",
    "convergence",
)
# A script that takes longer than this hangs.
_DEADLINE_S = 3 * 3600

# What each measure compares, in the words of the table; the order of the rows.
TITLES = {
    "allreduce_against_gloo": "allreduce, Gloo's time over ours",
    "allreduce_against_tensorflow": "allreduce, the time of TensorFlow's RING collectives over ours",
    "tcp_allreduce_against_stream": "allreduce over TCP, time over that of a one-way stream of the same bytes",
    "tcp_allreduce_against_duplex": "allreduce over TCP, rate over that of a duplex stream without the addition",
    "rounds_against_ring": "allreduce over TCP in rounds, the time of the ring over it",
    "ranks_against_ceiling": "2 ranks: rows per second over the ceiling's",
    "ranks_against_both_cores_by_clock": "2 ranks: rows per second over those of one model.fit with both cores",
    "ranks_against_both_cores_by_processor_time": "2 ranks: rows per processor second over that one's",
    "exchange_adds_ms": "2 ranks: milliseconds that a step takes longer than without an exchange",
    "ranks_step_over_alone": "2 ranks: time of a step over that without an exchange",
    "exchange_against_ddp": "2 ranks on PyTorch: what the exchange adds over what DistributedDataParallel adds",
    "hook_overhead_alone": "hook in a world of one, MLP: time added, over the plain step",
    "rank_overhead_alone": "all that a rank of one does, MLP: time added, over the plain step",
    "peak_memory_above_model": "peak memory of a rank above model and optimizer, over the gradients' bytes",
    "overlap_against_none_on_500_megabytes_per_s": "500 MB/s, 24M parameters: rows per second, overlap over none",
    "bfloat16_against_float32_on_1_gigabit": "1 Gb/s, 10M values: allreduce rate of bfloat16 over float32's",
    "int8_against_float32_on_1_gigabit": "1 Gb/s, 10M values: allreduce rate of int8 over float32's",
    "fit_seconds": "a later fit, 10 epochs: seconds over those of a tuned model.fit that has imported Keras",
    "fit_cpu_seconds": "the same: processor seconds",
    "fit_seconds_beyond_steps": "the same: seconds beyond its steps",
    "first_fit_seconds": "a session's first fit, whose driver has Keras: seconds over one process' with its import",
    "first_fit_cpu_seconds": "the same: processor seconds",
    "script_seconds": "a program that starts Spark and fits: seconds over those of one process",
    "script_cpu_seconds": "the same: processor seconds",
    "program_against_peer": "program with elephant from its start to its end: seconds over those of another way",
    "mode_against_one_process": "a later fit: seconds over those of a tuned model.fit that has imported Keras",
    "killed_fit": "from the SIGKILL of a training process to the next step of all: seconds",
    "difference_from_one_process": "largest difference of a weight from one process in float64, over the largest",
    "fit_accuracy_lost": "whole fit: test accuracy below one process'",
    "first_step_begins": "from fit() to the first step, warm Spark: time over that of importing and building alone",
    "first_step_ends": "from fit() to the end of the first step: time over one process'",
    "shards_against_elephas": "Parquet table to shards: rows per second over Elephas' way",
    "shards_against_pyarrow": "Parquet table to shards: rows per second over pyarrow's in the worker",
    "path_against_frame": "Parquet table to shards: rows per second by its path over those of its DataFrame",
    "shard_rows_against_memory": "rows of a shard in a new order: rate over numpy's indexing in memory",
    "shard_epoch_against_memory": "epoch of fit from the shard, one worker: rows per second over model.fit's in memory",
    "rank_against_model_fit": "one rank: rows per second over model.fit's on the same core",
    "ranks_against_model_fit_on_all_cores": "ranks: rows per second over those of one model.fit on all cores",
    "ranks_against_one_rank": "ranks: rows per second over one rank's times their cores",
    "rank_against_tuned_model_fit": "one rank: rows per second over a tuned model.fit's on the same core",
    "ranks_against_tuned_model_fit_on_all_cores": "ranks: rows per second over those of a tuned model.fit on all cores",
    "ranks_against_silent_processes": "ranks: rows per second over those of tuned model.fit processes that do not talk",
    "ranks_against_ddp": "ranks: rows per second over those of DistributedDataParallel over Gloo",
    "ranks_against_compiled_ddp": "ranks: rows per second over those of DistributedDataParallel with a compiled step",
    "compiled_against_one_process": "DistributedDataParallel, compiled: rate over one process' times their cores",
    "ddp_against_one_process": "DistributedDataParallel: rows per second over one process' times their cores",
    "weak_scaling_by_processor_time": "ranks on hosts of their own: rows per processor second over one rank's",
    "weak_scaling_by_clock": "ranks on hosts of their own: rows per second over one rank's times their cores",
    "transform_against_predict": "transform: rows per second over model.predict's in memory",
    "transform_against_spark_alone": "transform: rows per second over those of Spark with an empty function",
    "transform_path_against_predict": "transform of files: rows per second over model.predict's in memory",
    "evaluate_path_against_keras": "evaluate of files: rows per second over model.evaluate's in memory",
    "evaluate_against_transform": "evaluate: rows per second over transform's",
    "evaluate_against_keras": "evaluate: rows per second over model.evaluate's in memory",
    "predict_udf_against_predict_batch_udf": "predict_udf: rows per second over those of Spark's predict_batch_udf",
    "predict_udf_against_predict_on_batch": "predict_udf: the same, where that calls predict_on_batch",
    "rows_over_memory_limit": "fit under a limit of memory: the table's bytes over the limit",
    "pull_against_stream": "pull, time over that of a one-way stream of the same bytes",
    "push_against_stream": "push with its application, time over that of a one-way stream of the same bytes",
    "pushes_in_a_row_against_stream": "push in a row of five, time over that of a one-way stream of the same bytes",
    "push_pull_against_stream": "push and pull in one round trip, time over that of a one-way stream of half the bytes",
    "pull_and_push_against_elephas": "pull and push, the time of Elephas' HTTP server over ours",
    "server_memory_above_idle": "server's memory above an idle one, over the weights",
    "exchange_against_wire_on_1_gigabit": "1 Gb/s: exchange in float32, time over that of raw TCP",
    "bfloat16_exchange_against_float32_on_1_gigabit": "1 Gb/s: time of a float32 exchange over bfloat16's",
    "int8_exchange_against_float32_on_1_gigabit": "1 Gb/s: time of a float32 exchange over int8's",
    "servers_against_one": "several servers on one machine: updates per second over those of one",
    "hogwild_against_locked": "hogwild: updates per second over those with locks",
    "additions_lost": "share of additions that is not in the weights",
    "overlapped_exchange_added_time": "exchange in the background: time added to a step, over the foreground's",
    "accuracy_lost_with_every_step": "digits, 4 workers at once, an exchange every step: accuracy below one process'",
    "accuracy_lost_with_windows": "digits, 4 workers at once, scaled windows of steps: accuracy below one process'",
    "accuracy_lost_with_plain_sums": "digits, 4 workers at once, plain sums: accuracy below one process'",
}


def run_script(name: str, arguments: Sequence[str]) -> list[Measurement]:
    """Runs one benchmark and returns what it measured, line by line to stderr as well."""
    script = Path(__file__).with_name(f"{name}.py")
    with subprocess.Popen([sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True) as process:
        measured = []
        for line in process.stdout or ():
            if line.startswith('{"measure"'):
                sys.stderr.write(line)
                measured.append(Measurement.from_line(line))
        code = process.wait(_DEADLINE_S)
    if code:
        print(f"{name}.py exited with {code}: what it had measured stands in the table", file=sys.stderr)
    return measured


def table(measured: Sequence[Measurement]) -> Iterable[str]:
    """Yields the lines of a Markdown table: a row per measure and target, with the case that is furthest from it."""
    yield "| What | Target | Reached | Worst case | All cases |"
    yield "|---|---|---|---|---|"
    for measure, title in TITLES.items():
        targets = sorted({each.target for each in measured if each.measure == measure}, key=str, reverse=True)
        for target in targets:
            cases = [each for each in measured if each.measure == measure and each.target == target]
            worst = min(cases, key=lambda each: each.ratio if each.at_least else -each.ratio)
            yield " | ".join((f"| {title}", wanted(worst), said(worst), case_of(worst), f"{span(cases)} |"))


def wanted(measurement: Measurement) -> str:
    """Returns the target as the table shows it."""
    if measurement.target is None:
        return "none"
    return f"{'at least' if measurement.at_least else 'at most'} {measurement.target:g}"


def said(measurement: Measurement) -> str:
    """Returns the worst case's ratio, and whether it is enough."""
    verdict = {True: "reached", False: "**missed**", None: "measured"}[measurement.reached]
    return f"{measurement.ratio:.3g}, {verdict}"


def case_of(measurement: Measurement) -> str:
    """Returns the case as words."""
    return ", ".join(f"{name} {value}" for name, value in measurement.case.items())


def span(cases: Sequence[Measurement]) -> str:
    """Returns the range of the ratios, and how many of them are enough."""
    ratios = [each.ratio for each in cases]
    reached = sum(1 for each in cases if each.reached)
    counted = "" if cases[0].target is None or len(cases) == 1 else f"; {reached} of {len(cases)} reached"
    return f"{min(ratios):.3g} to {max(ratios):.3g}{counted}" if len(cases) > 1 else f"{ratios[0]:.3g}"


def machine() -> str:
    """Returns a line on where and on what this runs."""
    import importlib.metadata

    names = ("elephant-spark", "keras", "tensorflow", "torch", "pyspark", "numpy")
    versions = []
    for name in names:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return f"{cores} cores, load {load:.1f} before, Python {platform.python_version()}, {', '.join(versions)}."


def main() -> None:
    """Runs what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--mnist", type=Path, help="folder with the four IDX files for the whole fit")
    parser.add_argument("--elephas", type=Path, help="folder of an environment with Elephas; made when missing")
    parser.add_argument("--repetitions", type=int, help="of every measurement; each script's own number without it")
    parser.add_argument("--from", type=Path, dest="lines", help="a file of lines to make the table of")
    options = parser.parse_args()
    if options.lines is not None:
        lines = options.lines.read_text().splitlines()
        measured = [Measurement.from_line(line) for line in lines if line.startswith('{"measure"')]
    else:
        print(machine(), end="\n\n")
        common = [] if options.repetitions is None else ["--repetitions", str(options.repetitions)]
        own = {
            "fit": [] if options.mnist is None else ["--mnist", str(options.mnist)],
            "parameter_server": [] if options.elephas is None else ["--elephas", str(options.elephas)],
        }
        measured = [each for name in options.only for each in run_script(name, [*common, *own.get(name, [])])]
    print("\n".join(table(measured)))


if __name__ == "__main__":
    main()
