"""``elephant attach``: what a fit shows where it runs, shown elsewhere, from the file of its events."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elephant.cli.event_file import FoundEvents, find_events
from elephant.errors import ConfigurationError, shown_text
from elephant.monitor.events import Event, RunNote, WorkersChanged
from elephant.monitor.listeners import Listeners
from elephant.monitor.progress import Progress
from elephant.monitor.report import SHORTEST_S
from elephant.monitor.summary import FitSummary, event_of

NAME = "elephant attach"
_POLL_S = 1.0
# The driver writes the file every five seconds, and more seldom where writing is slow.
_SILENCE_S = 60.0


def attach(given: argparse.Namespace) -> int:
    """Shows a fit until it ends; returns the exit code."""
    try:
        events = find_events(given.run)
        with Watched(events.name, events.run_id) as watched:
            return _follow(events, watched, given.timeout)
    except ConfigurationError as error:
        sys.stderr.write(f"{NAME}: {given.run}: {shown_text(error)}\n")
        return 2
    except BrokenPipeError:
        # That of the output, whose reader has gone.
        raise
    except OSError as error:
        sys.stderr.write(
            f"{NAME}: {given.run}: expected a file that can be read. Received: {error}. Look at its path.\n"
        )
        return 1
    except KeyboardInterrupt:
        sys.stdout.write(f"left: the fit goes on. elephant attach {given.run} comes back to it\n")
        return 128 + 2


def _follow(events: FoundEvents, watched: Watched, timeout_s: float | None) -> int:
    state, silent_since, is_said = None, time.monotonic(), False
    while True:
        content = None
        try:
            now = events.state()
            if now is not None and now != state:
                content = events.read(watched.offset)
        except OSError:
            # It may be a network away, and has been there.
            if state is None:
                raise
        if content is not None:
            state, is_said, silent_since = now, False, time.monotonic()
            if watched.take(content):
                return watched.end()
        silent_s = time.monotonic() - silent_since
        if silent_s >= _SILENCE_S and not is_said:
            is_said = True
            watched.note_silence(silent_s)
        if timeout_s is not None and silent_s >= timeout_s:
            sys.stderr.write(
                f"{NAME}: expected the fit to tell more, or its end. Received: nothing for {silent_s:.0f} s. See "
                "whether its driver runs, or pass a longer --timeout.\n"
            )
            return 1
        # What is shown goes on where nobody reads it: here that is the end.
        sys.stdout.flush()
        time.sleep(_POLL_S)


class Watched:
    """Fit as the lines of its event file tell it, in a ``with`` block around what is shown.

    Args:
        name: Of the fit.
        run_id: Of its MLflow run; empty where that is not known.

    Attributes:
        offset: Where in the file the lines begin that are not shown yet, or of the moment.
        last_time: When the last line was written, by the clock of the fit's driver, in seconds since 1970.
    """

    def __init__(self, name: str, run_id: str = "") -> None:
        self._name, self._run_id = name, run_id
        self._closing = contextlib.ExitStack()
        self._progress: Progress | None = None
        self._params: Mapping[str, Any] = {}
        self._lines: list[bytes] = []
        # Notes that follow from what ranks have told: the file has them as well.
        self._own_notes: list[str] = []
        self._has_checkpoints = False
        self._begun = self._output = ""
        self._end: Mapping[str, Any] | None = None
        self._saved: Mapping[str, Any] = {}
        self.offset = 0
        self.last_time = 0.0

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *exit: Any) -> None:
        # Without what has happened: who leaves stops no fit.
        self._closing.close()

    def take(self, content: bytes) -> bool:
        """Shows what is new in the file, of which this is from `offset` on; returns whether no more is to come.

        Raises:
            ConfigurationError: There are no events of a fit.
        """
        lines = content.splitlines(keepends=True)
        told = self._parsed(lines)
        # What is of the moment stands at the end.
        num_lasting = next((index for index, (_, event) in enumerate(told) if event and event.of_moment), len(told))
        with warnings.catch_warnings():
            # The fit warns where it runs; what is wrong with a loss is said in the end.
            warnings.simplefilter("ignore")
            for line, event in told[:num_lasting]:
                self._show(line, event)
            self._show_moment(told[num_lasting:])
        self._lines += lines[:num_lasting]
        self.offset += sum(map(len, lines[:num_lasting]))
        if self._end is None or self._progress is None:
            return False
        is_over = bool(self._end["error"] or self._saved or not self._output)
        if not is_over:
            self._progress.note(f"the fit has ended well, and its job saves the model at {self._output}")
        return is_over

    def _parsed(self, lines: Iterable[bytes]) -> list[tuple[dict[str, Any], Event | None]]:
        told: list[tuple[dict[str, Any], Event | None]] = []
        for text in lines:
            try:
                line = json.loads(text)
                line["time"] = float(line["time"])
                if self._progress is None and not told and (line["event"] != "fit_begin" or "params" not in line):
                    raise ValueError("a fit begins with fit_begin")
                told.append((line, event_of(line)))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ConfigurationError(
                    f"expected events of a fit, as eventsPath has them written. Received: {text[:60]!r} "
                    f"({type(error).__name__}: {error}). Name such a file."
                ) from error
        return told

    def _show(self, line: Mapping[str, Any], event: Event | None) -> None:
        self.last_time = line["time"]
        if self._progress is None:
            self._begin(line)
            return
        self._has_checkpoints = self._has_checkpoints or line["event"] == "checkpoint"
        if line["event"] == "fit_end":
            self._end = line
        elif line["event"] == "model_saved":
            self._saved = line
        elif isinstance(event, RunNote) and event.text in self._own_notes:
            self._own_notes.remove(event.text)
        elif isinstance(event, WorkersChanged):
            self._progress.expect(event.workers)
        elif event is not None:
            notes = self._progress.record.notes
            known = len(notes)
            self._progress.show(event)
            if not isinstance(event, RunNote):
                self._own_notes += notes[known:]

    def _show_moment(self, told: Sequence[tuple[dict[str, Any], Event | None]]) -> None:
        """Draws the live line once, when it is known of all ranks where they are."""
        if self._progress is None or not told:
            return
        for _, event in told[:-1]:
            if event is not None:
                self._progress.record.add(event)
        self._show(*told[-1])

    def _begin(self, line: Mapping[str, Any]) -> None:
        self._params, self._output = line["params"], line.get("output", "")
        progress = Progress(
            num_workers=line.get("ranks", 0),
            epochs=self._params.get("epochs", 0),
            verbose=1,
            waits_for_all=line.get("waits_for_all", False),
            listeners=Listeners(params=self._params),
        )
        self._progress = self._closing.enter_context(progress)
        self._begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.last_time))
        self._progress.note(f"{self._name}: {line.get('model', 'a model')}, begun at {self._begun}")

    def note_silence(self, seconds: float) -> None:
        """Says that nothing has come for some time."""
        if self._progress is not None:
            self._progress.note(
                f"no event for {seconds:.0f} s, the last one at {_clock(self.last_time)}: the fit's driver is gone or "
                "busy, or takes long to write. Waiting for more; Ctrl-C leaves"
            )

    def end(self) -> int:
        """Says how the fit has ended, and where its model is; returns the exit code."""
        self._closing.close()
        summary = FitSummary.of_events(self._lines)
        path = self._params.get("checkpointPath")
        kept = "" if path is None else f"its checkpoints are in {path}: elephant checkpoints {path} lists them"
        logged = self._run_id and f"MLflow, where it logs models, has it as runs:/{self._run_id}/model"
        problem = summary.state
        if self._saved.get("error"):
            problem = f"This fit has ended well, and its model is not at {self._output}: {self._saved['error']}"
        if problem:
            sys.stderr.write(f"{NAME}: {problem}{f'; {kept}' if kept and self._has_checkpoints else ''}\n")
            return 1
        place = f"at {self._output}" if self._output else "with the program that has called fit"
        epochs = max(map(len, summary.history.values()), default=0)
        said = [
            f"the fit that began at {self._begun} has ended well after {summary.seconds:.1f} s: {epochs:,} epochs, "
            f"{len(summary.plan):,} ranks, {summary.rows_per_s:,.0f} rows/s",
            *(f"  {seconds:8.1f} s {name}" for name, seconds in summary.parts_s.items() if seconds >= SHORTEST_S),
            *(f"advice: {text}" for text in summary.advice),
            "; ".join(filter(None, [f"its model is {place}", logged, kept])),
        ]
        sys.stdout.write("\n".join(said) + "\n")
        sys.stdout.flush()
        return 0


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S UTC", time.gmtime(seconds))
