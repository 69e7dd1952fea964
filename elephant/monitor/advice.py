"""Advice: what to change about a fit, and what its numbers say for that.

A rule is a function that names what it needs among its parameters, as the checks of the pre-flight do. It is asked
where all of that is known: the page of one fit knows other things than the comparison of several (`elephant bench`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from elephant.monitor.rank_times import sums_by_rank
from elephant.monitor.scaling import ScalingRun, counted, efficiencies, measured_runs
from elephant.monitor.stragglers import MUCH_WAITING, Reason, stragglers

# Parts of the time from which on something is worth a change. Runs that compare numbers of workers do nothing else, so
# that less says enough.
_MUCH_INPUT, _MUCH_EXCHANGE, _MUCH_EXCHANGE_OF_RUNS = 0.1, 0.3, 0.2
# Times as long as a step with fewer workers.
_SLOWER = 1.3
# Epochs after the best one from which on they are too many.
_WORSE_EPOCHS = 3
# Fewer workers are enough that reach the first part of the highest rate; more may pay off at the second part of the
# ideal rate.
_ENOUGH, _SCALES = 0.9, 0.8
# Distance between rates of the same run, over their median.
_SPREAD = 0.2
_WHAT_TO_DO = {
    Reason.ROWS: "It has more rows than others: repartition the DataFrame evenly.",
    Reason.STEPS: "Look at what else runs on its host, and at its threads and its device beside those of the others.",
    Reason.INPUT: "Its steps wait for their rows: look at its disk and at what else runs on its host, or hold the rows "
    "(cache='memory').",
    Reason.EPOCH_END: "Its validation or its callbacks take longer: look at its validation rows, and at what callbacks "
    "do on this rank alone.",
}

Rule = Callable[..., Iterable[str]]
_RULES: dict[Rule, tuple[str, ...]] = {}
# All that rules may ask for: numbers of one fit, and of several.
_NUMBERS = {"history", "statistics", "sums", "plan", "shares", "scaling_runs", "options"}


def _rule(function: Rule) -> Rule:
    """Adds a rule to the table; the order of the rules is that of their advice."""
    names = tuple(inspect.signature(function).parameters)
    if not _NUMBERS.issuperset(names):
        raise TypeError(f"{function.__name__}: expected parameters among {sorted(_NUMBERS)}. Received: {names}.")
    _RULES[function] = names
    return function


def advice_on_fit(
    ranks: Sequence[Mapping[str, Any]],
    plan: Sequence[Mapping[str, Any]],
    history: Mapping[str, Sequence[float]],
    statistics: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Returns changes to make, a sentence or two each; nothing where nothing stands out.

    Args:
        ranks: A dictionary for each epoch and rank; see `elephant.monitor.rank_times.rank_times`.
        plan: Places of the ranks.
        history: One number per epoch by metric.
        statistics: Counts; see `elephant.KerasModel.training_statistics`.
        options: Params of the estimator that were chosen, by name.
    """
    known: dict[str, Any] = {"history": history, "statistics": statistics, "options": options or {}}
    # In the first epoch ranks wait for each other to trace the model.
    first = min((part["epoch"] for part in ranks), default=0)
    sums = sums_by_rank([part for part in ranks if part["epoch"] > first] or ranks)
    total_s = sum(own["seconds"] for own in sums)
    if total_s:
        known |= {"sums": sums, "plan": plan, "shares": {"input_s": sum(own["input_s"] for own in sums) / total_s}}
    return _advice(known)


def advice_on_runs(runs: Sequence[ScalingRun], options: Mapping[str, Any]) -> list[str]:
    """Returns changes to make, with the numbers that say so; nothing where nothing stands out.

    Args:
        runs: Of the same fit, with different numbers of workers.
        options: Params of the estimator that were chosen, by name.
    """
    scaling_runs = measured_runs(runs)
    if not scaling_runs:
        return []
    return _advice({"scaling_runs": scaling_runs, "shares": scaling_runs[-1].shares, "options": options})


def _advice(known: Mapping[str, Any]) -> list[str]:
    asked = {rule: {name: known[name] for name in names} for rule, names in _RULES.items() if known.keys() >= {*names}}
    return [text for rule, values in asked.items() for text in rule(**values)]


@_rule
def _on_workers(scaling_runs: Sequence[ScalingRun]) -> Iterable[str]:
    first, last = scaling_runs[0], scaling_runs[-1]
    best = max(scaling_runs, key=lambda run: run.rows_per_s)
    enough = next(run for run in scaling_runs if run.rows_per_s >= _ENOUGH * best.rows_per_s)
    if enough is not last:
        gain = last.rows_per_s / enough.rows_per_s - 1
        yield (
            f"Use {counted(enough.workers)}: {last.workers} train {abs(gain):.0%} {'more' if gain >= 0 else 'fewer'} "
            f"rows per second ({last.rows_per_s:,.0f} after {enough.rows_per_s:,.0f})."
        )
    elif last is not first and (share := efficiencies(scaling_runs)[last.workers]) >= _SCALES:
        yield (
            f"More workers are likely to pay off: {last.workers} reach {share:.0%} of what they could by the rate of "
            f"{first.workers}."
        )


@_rule
def _on_cores(scaling_runs: Sequence[ScalingRun]) -> Iterable[str]:
    first, last, slower = scaling_runs[0], scaling_runs[-1], _slower(scaling_runs)
    if slower > _SLOWER:
        yield (
            f"Computing a step takes {slower:.1f} times as long with {counted(last.workers)} as with {first.workers}: "
            "they share cores or memory. Give each worker cores of its own (spark.task.cpus, executors on more "
            "machines), or use fewer workers."
        )


@_rule
def _on_slowest_rank(
    sums: Sequence[Mapping[str, Any]], plan: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> Iterable[str]:
    if options.get("pipelineStages") or not any(own["others_s"] for own in sums):
        # Each rank has work of another kind, or waits for no other one.
        return
    # Over all epochs: one epoch the one may be slower and the next the other, which nobody can help.
    for slowest in stragglers(sums)[:1]:
        place = next((part for part in plan if part["rank"] == slowest.rank), {})
        yield (
            f"Rank {slowest.rank} on {place.get('host', 'its host')} is the slowest: others wait for it "
            f"{slowest.waiting:.0%} of their time. {_WHAT_TO_DO[slowest.reason]}"
        )


@_rule
def _on_exchange_of_fit(sums: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Iterable[str]:
    share = sum(own["exchange_s"] for own in sums) / sum(own["seconds"] for own in sums)
    if options.get("pipelineStages"):
        if share > _MUCH_EXCHANGE:
            yield (
                f"Stages wait for each other {share:.0%} of the time. More microBatches keep all of them busy, as long "
                "as each has enough rows; a larger batchSize gives them more. Stages that are named may be cut where "
                "they take equally long: pipelineStages with a number measures that."
            )
        return
    if share > _MUCH_EXCHANGE:
        yield (
            f"Exchanging takes {share:.0%} of the time. A larger batchSize or frequency=k exchanges less often; "
            "between hosts, compression='bfloat16' sends half as much."
        )


@_rule
def _on_exchange_of_runs(scaling_runs: Sequence[ScalingRun], options: Mapping[str, Any]) -> Iterable[str]:
    run, share = scaling_runs[-1], scaling_runs[-1].shares["exchange_s"]
    if share <= _MUCH_EXCHANGE_OF_RUNS:
        return
    by_step = options.get("frequency", "batch") == "batch"
    # A step with twice the rows computes twice as long, and exchanges as long as before.
    yield (
        f"Exchanging takes {share:.0%} of a step of {counted(run.workers)}, however many rows the step has: "
        f"batchSize={2 * run.batch_size} would train up to {2 / (2 - share) - 1:.0%} more rows per second. The "
        "learning rate may have to rise with it."
    )
    asynchronous = options.get("mode", "synchronous") != "synchronous"
    if by_step and asynchronous and not options.get("backgroundExchange"):
        yield "backgroundExchange=True computes the next step while an exchange goes on."
    if by_step and run.hosts > 1 and not options.get("compression"):
        rate = run.bytes_per_step / (run.step_s * share)
        yield (
            f"compression='bfloat16' halves the {run.bytes_per_step / 1e6:,.1f} MB that a worker sends in a step, at "
            f"{rate / 1e6:,.0f} MB/s: up to {1 / (1 - share / 2) - 1:.0%} more rows per second."
        )
    if by_step and options.get("aggregation", "allreduce") == "allreduce":
        yield (
            f"frequency=8 exchanges weights every 8 steps: up to {1 / (1 - share * 7 / 8) - 1:.0%} more rows per "
            "second. Workers differ in between: compare the accuracy."
        )


@_rule
def _on_waiting(scaling_runs: Sequence[ScalingRun]) -> Iterable[str]:
    last = scaling_runs[-1]
    if last.shares["others_s"] > MUCH_WAITING and _slower(scaling_runs) <= _SLOWER:
        yield (
            f"{counted(last.workers)} wait for slower ones {last.shares['others_s']:.0%} of their time. Where machines "
            "differ for good, mode='asynchronous' lets each go at its own pace; compare the accuracy then."
        )


@_rule
def _on_input(shares: Mapping[str, float]) -> Iterable[str]:
    if shares["input_s"] > _MUCH_INPUT:
        yield (
            f"Steps wait for their rows {shares['input_s']:.0%} of the time. Let preprocessing run once "
            "(without a generator), do less in augmentation, or hold the rows (cache='memory')."
        )


@_rule
def _on_noise(scaling_runs: Sequence[ScalingRun]) -> Iterable[str]:
    noisy = max(scaling_runs, key=lambda run: run.spread)
    if noisy.spread > _SPREAD:
        yield (
            f"Rates with {counted(noisy.workers)} differ by {noisy.spread:.0%} from epoch to epoch: smaller "
            "differences say nothing. Measure on a quieter cluster, or take more steps."
        )


@_rule
def _on_loss(history: Mapping[str, Sequence[float]]) -> Iterable[str]:
    if not all(map(math.isfinite, _numbers_of(history, "loss")[-1:])):
        yield "The loss is not finite: lower the learning rate, or clip gradients (clipnorm of the optimizer)."


@_rule
def _on_validation(history: Mapping[str, Sequence[float]]) -> Iterable[str]:
    losses = _numbers_of(history, "val_loss")
    known = [epoch for epoch, loss in enumerate(losses) if not math.isnan(loss)]
    best = min(known, key=losses.__getitem__, default=len(losses))
    if len(losses) - best > max(len(losses) // 4, _WORSE_EPOCHS):
        yield (
            f"val_loss was lowest in epoch {best + 1} of {len(losses)}: "
            "keras.callbacks.EarlyStopping(restore_best_weights=True) ends there and keeps that model."
        )


@_rule
def _on_counts(statistics: Mapping[str, Any]) -> Iterable[str]:
    for name, text in (
        ("refused", "updates were not finite and are left out: lower the learning rate, or look for rows with NaN."),
        ("worker_retries", "times a worker was started in the place of one that was lost: see the executors' logs."),
        ("restarts", "times the fit was started again after a failure: see the notes."),
    ):
        if statistics.get(name):
            yield f"{statistics[name]:,} {text}"


def _numbers_of(history: Mapping[str, Sequence[float]], name: str) -> list[float]:
    return [value for value in history.get(name, ()) if value is not None]


def _slower(scaling_runs: Sequence[ScalingRun]) -> float:
    """Returns how many times as long a step computes with the most workers; of other batches it is another one."""
    first, last = scaling_runs[0], scaling_runs[-1]
    return _compute_s(last) / _compute_s(first) if first.batch_size == last.batch_size else 1.0


def _compute_s(run: ScalingRun) -> float:
    return run.step_s * run.shares["compute_s"]
