"""Faults in fits, one at a time: of each process that has a rank, of links, disk, memory, clock; in every mode.

::

    python benchmarks/faults.py                                             # as make faults: every case, over an hour
    python benchmarks/faults.py --most 40 --seed 5                          # 40 of them, which the seed chooses
    python benchmarks/faults.py --only stop-training,restarts,mid-epoch     # one again
    python benchmarks/faults.py --only kill-training,, ,asynchronous,       # all that agree with one of these
    python benchmarks/faults.py --list

Two ranks on executors of this machine train; at the moment both wait, the fault happens, and they go on. The seed says
to which rank, and how many milliseconds after they go on, where the moment is within an epoch. `fault_table.py` has the
cases and the promise for each: an error that names the rank, or weights that are to the bit those of a fit that nothing
disturbs (asynchronous: the exact sum of all batches). Prints a line of JSON for each case: the outcome, the seconds
from the fault to the error or to the first step of a new process, the seconds until no process or file of the fit is
left, and leftovers; then a line with all that differ from the promise. It fails if there are some. A case that takes
longer than its deadline differs. Signals go to processes of the fit alone. Links, disk and memory need root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from exact_fits import counted, write_rows
from fault_injection import CASE_S, GONE_S, HEARTBEAT_S, Disturbance, FaultDriver, Held, Hung, held_ranks, until
from fault_table import (
    EPOCHS,
    RANKS,
    RUN_STEPS,
    Action,
    Case,
    Fault,
    Mode,
    Moment,
    Outcome,
    Part,
    Place,
    every_case,
    promised,
)
from leftovers import leftovers

_TIMEOUTS = {"heartbeat_s": HEARTBEAT_S, "collective_s": 60.0, "slots_s": 60.0}
_ENDS_WITHIN_S = 10.0
_MEMORY_STEP = 256 << 20
# A step lasts so long that the heartbeat of what is frozen is missed before the fit's end, or a link is cut and mended.
# Spark gives up a frozen executor later still.
_LONGEST_PAUSE_S, _LONG_PAUSE_S, _PAUSE_S = 0.15, 0.08, 0.004
_LATE_S = 0.05
_COUNTS = ("restarts", "worker_retries", "server_restarts")


@dataclass
class CaseResult:
    """Outcome of one case; seconds from the fault are None where there was nothing to wait for."""

    fault: str
    mode: str
    moment: str
    seed: int
    promised: str
    outcome: str = ""
    as_promised: bool = False
    error_s: float | None = None
    resumed_s: float | None = None
    gone_s: float | None = None
    leftovers: list[str] = field(default_factory=list)
    said: str = ""


class Suite:
    """Cases one after the other, at one kind of cluster after the other.

    Args:
        folder: Where all files are.
        seed: Of all that is left to chance in a case.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self._rows = folder / "rows"
        self._rows.mkdir()
        self._features = write_rows(self._rows)
        self._undisturbed: dict[Mode, list[np.ndarray]] = {}
        self._number = 0

    def run(self, cases: list[Case], until_s: float) -> Iterator[CaseResult]:
        """Yields the result of each case that begins before a time of the monotonic clock.

        A driver that a case has ended is replaced.
        """
        for place in Place:
            left = [case for case in cases if case.fault.place is place]
            while left and time.monotonic() < until_s:
                yield from self._with_driver(place, left, until_s)

    def _with_driver(self, place: Place, left: list[Case], until_s: float) -> Iterator[CaseResult]:
        self._number += 1
        folder = self._folder / f"driver-{self._number}"
        folder.mkdir()
        result = None
        with contextlib.ExitStack() as closing:
            driver = FaultDriver(folder, place, closing)
            self._learn(driver)
            while left and driver.is_running and time.monotonic() < until_s:
                result = self._carry_out(left.pop(0), driver)
                yield result
        # The home that a killed driver has made for Spark is taken away by the next one's session.
        homes = {str(path) for path in driver.temporary.glob("elephant-spark-*")}
        remaining = leftovers(driver.mark, homes, driver.temporary)
        if remaining and result is not None:
            # What only its end should have taken away is told of with its last case.
            yield replace(result, leftovers=remaining, as_promised=False)

    def _order(self, driver: FaultDriver, mode: Mode, moment: str, pause_s: float, memory_bytes: int = 0) -> Path:
        self._number += 1
        folder = self._folder / f"case-{self._number}"
        for name in ("waits", "steps"):
            (folder / name).mkdir(parents=True)
        driver.begin(
            mode=mode.value,
            moment=moment,
            folder=str(folder),
            rows=str(self._rows),
            pause_s=pause_s,
            memory_bytes=memory_bytes,
            timeouts=_TIMEOUTS,
        )
        return folder

    def _learn(self, driver: FaultDriver) -> None:
        """Has a driver warm up, and learns the weights of synchronous fits that nothing disturbs.

        With restarts, ranks have other rows: those of ordinary tasks instead of a barrier stage's.
        """
        for mode in (Mode.SYNCHRONOUS, Mode.RESTARTS) if not self._undisturbed else (Mode.SYNCHRONOUS,):
            self._order(driver, mode, "none", 0.0)
            answer = driver.answer(CASE_S)
            if "weights" not in answer:
                raise SystemExit(f"expected an undisturbed fit to end well. Received: {answer}")
            self._undisturbed.setdefault(mode, _arrays(answer))

    def _carry_out(self, case: Case, driver: FaultDriver) -> CaseResult:
        """Carries out one case and looks at what is left of its fit."""
        result = CaseResult(
            case.fault.value, case.mode.value, case.moment.value, self._seed, promised=promised(case).value
        )
        chance = random.Random(f"{self._seed} {case}")
        needs = _MEMORY_STEP if case.fault is Fault.MEMORY_LIMIT else 0
        folder = self._order(driver, case.mode, case.moment.value, _pause_s(case.fault), needs)
        undo = contextlib.ExitStack()
        try:
            held = held_ranks(case, driver, folder)
            disturbance = Disturbance(case, chance.choice(held), driver, chance)
            undo = disturbance.undo
            self._disturb(case, disturbance, folder, chance)
            if promised(case) is Outcome.ENDS:
                self._see_end(disturbance, held, driver, result)
            else:
                self._see_answer(case, disturbance, held, folder, driver, result)
        except Hung as error:
            result.outcome, result.said = "hangs", str(error)
            driver.dump()
            driver.kill()
        except psutil.Error as error:
            result.outcome, result.said = "could not be tried", repr(error)
            driver.kill()
        finally:
            with contextlib.suppress(Hung):
                undo.close()
        result.as_promised = result.outcome == result.promised and not result.leftovers
        return result

    def _disturb(self, case: Case, disturbance: Disturbance, folder: Path, chance: random.Random) -> None:
        """Has the fault happen at the moment, or a little later where ranks have many steps yet to make."""
        late_s = chance.uniform(0, _LATE_S)
        if case.moment in (Moment.MEETING, Moment.FIT_END) or case.fault.part is Part.DRIVER:
            disturbance.happen()
            (folder / "go").touch()
        else:
            (folder / "go").touch()
            time.sleep(late_s)
            disturbance.happen()

    def _see_end(self, disturbance: Disturbance, held: list[Held], driver: FaultDriver, result: CaseResult) -> None:
        """Waits for the end of all processes of a fit whose driver has ended."""
        _, alive = psutil.wait_procs([one.process for one in held], timeout=_ENDS_WITHIN_S)
        until(lambda: not driver.in_fit(), GONE_S, "the end of the fit's processes")
        result.gone_s = round(time.time() - disturbance.at, 2)
        result.outcome = Outcome.ENDS.value if not alive else f"ranks live for more than {_ENDS_WITHIN_S:g} s"

    def _see_answer(
        self,
        case: Case,
        disturbance: Disturbance,
        held: list[Held],
        folder: Path,
        driver: FaultDriver,
        result: CaseResult,
    ) -> None:
        answer = driver.answer(CASE_S)
        result.outcome = self._outcome(case, answer, disturbance)
        result.said = answer.get("error", "")[:300]
        if "error" in answer:
            result.error_s = round(answer["at"] - disturbance.at, 2)
        first = {str(one.process.pid) for one in held}
        later = [path.stat().st_mtime for path in (folder / "steps").iterdir() if path.name.split("-")[0] not in first]
        if [at for at in later if at > disturbance.at]:
            result.resumed_s = round(min(later) - disturbance.at, 2)
        with contextlib.suppress(Hung):
            until(lambda: not driver.in_fit(), GONE_S, "the end of the fit")
        result.gone_s = round(time.time() - disturbance.at, 2)
        result.leftovers = driver.in_fit()

    def _outcome(self, case: Case, answer: dict[str, Any], disturbance: Disturbance) -> str:
        """Returns the outcome that an answer tells of, or what else it is."""
        if "error" in answer:
            return _kind_of_error(case, answer, disturbance)
        if "weights" not in answer:
            return f"the driver has ended: {answer}"
        if not all(map(np.array_equal, _arrays(answer), self._expected(case.mode))):
            return "other weights"
        lost = sum(answer["statistics"].get(name, 0) for name in _COUNTS)
        return (Outcome.RECOVERS if lost else Outcome.UNHARMED).value

    def _expected(self, mode: Mode) -> list[np.ndarray]:
        if mode is Mode.ASYNCHRONOUS:
            return [counted(self._features, EPOCHS)]
        return [np.full(RANKS, 3.0 * RUN_STEPS)] if mode is Mode.RUN else self._undisturbed[mode]


def _pause_s(fault: Fault) -> float:
    if fault is Fault.STOP_EXECUTOR:
        return _LONGEST_PAUSE_S
    return _LONG_PAUSE_S if fault.action is Action.STOP or fault.place is Place.NAMESPACES else _PAUSE_S


def _arrays(answer: dict[str, Any]) -> list[np.ndarray]:
    return [np.array(weight, np.float32) for weight in answer["weights"]]


def _kind_of_error(case: Case, answer: dict[str, Any], disturbance: Disturbance) -> str:
    """Returns `Outcome.FAILS` where an error names what was lost, else which error it is."""
    if case.fault is Fault.FULL_DISK:
        is_named = answer["class"] == "ClusterError" and "room on the local disk" in answer["error"]
    elif case.fault.part is Part.DRIVER:
        is_named = answer["class"] == "WorkerFailure"
    else:
        is_named = answer["class"] == "WorkerFailure" and disturbance.is_named(answer)
    return Outcome.FAILS.value if is_named else f"{answer['class']}, rank {answer['rank']}, {answer['executor']}"


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """Returns the cases that the arguments ask for."""
    found = list(every_case())
    if options.only:
        patterns = [text.split(",") for text in options.only]
        found = [case for case in found if any(_agrees(str(case).split(","), pattern) for pattern in patterns)]
    if os.geteuid() != 0:
        needs_root = {Fault.CUT_LINK, Fault.HALF_OPEN_LINK, Fault.FULL_DISK, Fault.MEMORY_LIMIT}
        found = [case for case in found if case.fault not in needs_root]
    if options.most is not None and len(found) > options.most:
        found = random.Random(options.seed).sample(found, options.most)
    return found


def _agrees(words: list[str], pattern: list[str]) -> bool:
    return all(not wanted or word == wanted for word, wanted in zip(words, pattern, strict=True))


def main() -> None:
    """Carries out the cases, and prints what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", help="fault,mode,moment, each of which may be empty")
    parser.add_argument("--most", type=int, help="cases, chosen by the seed")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no other case begins")
    parser.add_argument("--keep", action="store_true", help="the folder with the drivers' logs")
    parser.add_argument("--list", action="store_true", help="the cases and their outcomes, and nothing else")
    options = parser.parse_args()
    cases = chosen_cases(options)
    if options.list:
        for case in cases:
            print(f"{case}: {promised(case).value}")
        return
    outcomes: Counter[str] = Counter()
    wrong = []
    until_s = time.monotonic() + 60 * options.minutes
    folder = tempfile.mkdtemp(prefix="faults-")
    try:
        for result in Suite(Path(folder), options.seed).run(cases, until_s):
            print(json.dumps(asdict(result)), flush=True)
            outcomes[result.outcome] += 1
            if not result.as_promised:
                wrong.append(f"{result.fault},{result.mode},{result.moment}")
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    done = sum(outcomes.values())
    summary = {"cases": done, "not_begun": len(cases) - done, "outcomes": outcomes, "not_as_promised": wrong}
    print(json.dumps(summary), flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
