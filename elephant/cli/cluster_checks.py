"""Checks of what executors have said to doctor. Plain facts go in, findings come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elephant.cluster.finding import FAILURE, OK, UNKNOWN, WARNING, Finding, finding

_FIREWALL = (
    "Set spark.driver.host to an address of the driver that executors reach, and let connections from the executors "
    "to the driver's free ports through the firewall."
)


def check_reach(unreached: Mapping[str, str], asked: int, place: str, *, needed: bool) -> Finding:
    """Returns whether executors reach the driver.

    Args:
        unreached: What hindered those that do not, by their names.
        asked: How many tried.
        place: Where they tried to come, for the message.
        needed: Whether a fit fails otherwise; elsewhere an executor takes the driver's part.
    """
    name, expected = "way to the driver", f"executors that reach the driver at {place}"
    if not asked:
        return finding(name, UNKNOWN, expected=expected, received="no executor to ask")
    if not unreached:
        return finding(name, OK, expected=expected, received=f"{asked} of {asked} executors reach {place}")
    reasons = ", ".join(f"{executor}: {reason}" for executor, reason in unreached.items())
    if not needed:
        remedy = "Rank 0 then hosts what the driver hosts otherwise; nothing is to be done unless fits fail."
        return finding(name, WARNING, expected=expected, received=reasons, remedy=remedy)
    return finding(name, FAILURE, expected=expected, received=reasons, remedy=_FIREWALL)


def check_gpus(said: Sequence[Mapping[str, Any]], *, wanted: int) -> Finding:
    """Returns whether the executors' hosts have GPUs, and TensorFlow can use them.

    Args:
        said: What `elephant.cli.executor_probe.gpu_function` returned on each.
        wanted: GPUs that the fit needs.
    """
    hosts = {one["host"]: one for one in said}
    listed = sum(len(one["gpus"]) for one in hosts.values())
    usable = sum(one["tensorflow"] or 0 for one in hosts.values())
    expected = f"{wanted} GPUs that TensorFlow can use"
    received = f"{listed} by nvidia-smi, {usable} by TensorFlow"
    problems = [f"{name}: {one['complaint'] or one['error']}" for name, one in hosts.items()]
    problems = [problem for problem in problems if not problem.endswith(": ")]
    remedy = (
        "Install the driver and CUDA that this TensorFlow needs (pip install 'tensorflow[and-cuda]')."
        if listed >= wanted
        else "Use executors with GPUs (spark.executor.resource.gpu.amount), or useGpu=False."
    )
    return finding(
        "GPUs",
        usable >= wanted,
        expected=expected,
        received=received + (f" ({'; '.join(problems)})" if problems and usable < wanted else ""),
        remedy=remedy,
    )


def check_trial(num_workers: int, ranks: Sequence[int], seconds: float, error: str) -> Finding:
    """Returns whether a run of a small function on all ranks went well, with processes and connections as of a fit.

    Args:
        num_workers: Ranks.
        ranks: What they added up together, on each of them.
        seconds: What it took.
        error: Why it failed; empty when it did not.
    """
    expected_sum = num_workers * (num_workers + 1) // 2
    right = not error and list(ranks) == [expected_sum] * num_workers
    return finding(
        "trial run",
        right,
        expected=f"a barrier stage of {num_workers} ranks that reach each other, and add up their numbers",
        received=error.rstrip(".")
        or (f"{seconds:.1f} s for {num_workers} ranks" if right else f"the sums {list(ranks)}"),
        remedy="The text above says what was expected. If ranks do not connect, open the ports between executors, and "
        "see which addresses their host names resolve to (docs/clusters.md).",
    )
