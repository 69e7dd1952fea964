"""How long the pre-flight of a fit takes on a running local cluster: when executors are asked, and when they are known.

::

    python benchmarks/preflight.py                 # two executors

The first pre-flight of an application starts Python on the executors, which the fit would have to do otherwise.
It is told beside the others.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from report import Measurement, report

_TARGET_S = 1.0


def seconds_of(session: Any, workers: int, *, known: bool) -> float:
    """Returns what one pre-flight takes.

    Args:
        session: The Spark session.
        workers: Workers of the fit.
        known: Whether the executors have been asked before.
    """
    from elephant.cluster.checks import executor_facts
    from elephant.cluster.checks.preflight import Requirements, run_checks
    from elephant.cluster.checks.registry import refuse_failures

    if not known:
        executor_facts.known_executors.forget()
    began = time.monotonic()
    check_results = run_checks(session, Requirements(num_workers=workers, backend="tensorflow"), print).check_results
    seconds = time.monotonic() - began
    refuse_failures(check_results)
    return seconds


def main() -> None:
    """Measures both kinds, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="executors and workers (2)")
    parser.add_argument("--repetitions", type=int, default=15, help="of each kind (15)")
    options = parser.parse_args()

    from elephant.cluster.local import local_session

    session = local_session(options.workers)
    try:
        first = seconds_of(session, options.workers, known=False)
        turns = [
            (seconds_of(session, options.workers, known=False), seconds_of(session, options.workers, known=True))
            for _ in range(options.repetitions)
        ]
    finally:
        session.stop()
    asked, known = (statistics.median(side) for side in zip(*turns, strict=True))
    report(
        Measurement(
            measure="preflight",
            case={"workers": options.workers},
            ratio=asked / _TARGET_S,
            target=1.0,
            at_least=False,
            medians={"asked_s": asked, "known_s": known, "first_s": first},
            repetitions=options.repetitions,
        )
    )


if __name__ == "__main__":
    main()
