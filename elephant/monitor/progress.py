"""Progress of a fit on the driver: lines, and curves of its history."""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import io
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from elephant.checkpoint.state import place_in_words
from elephant.errors import help_url, warn_user
from elephant.monitor.events import (
    Awaited,
    EpochEnded,
    Event,
    Printed,
    RunNote,
    ShardsMoved,
    Started,
    StateSaved,
    StepEnded,
    WorkersChanged,
)
from elephant.monitor.listeners import Listeners
from elephant.monitor.log_stream import TokenBucket
from elephant.monitor.stragglers import Straggler, StragglerWatch

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

# Part of a step, or of an epoch, by which ranks differ when one is called the slowest.
_NOTED = 0.1
# The limit is for all workers together; each has limited its own lines before.
_LINES_PER_S = 50.0
_BURST_LINES = 1000
# Ranks that take every step together print the same within a moment.
_SAME_WITHIN_S = 2.0
_MOST_REMEMBERED = 1000
# A stream whose lines cannot be written over is told what a fit waits for from so many seconds on.
_QUIET_START_S = 10.0
_SILENT_S = 1.0


def save_curves(history: Mapping[str, Sequence[float]], path: str | Path) -> Path:
    """Draws one panel per metric, training and validation together, into a PNG file.

    Args:
        history: What `KerasModel.history` holds: one number per epoch by metric.

    Returns:
        The absolute path of the file.

    Raises:
        ImportError: matplotlib is not installed (``pip install 'elephant-spark[local]'``).
    """
    _require_matplotlib("save_curves")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    _draw(figure, history)
    target = Path(path).absolute()
    figure.savefig(target, dpi=120)
    return target


def plot_curves(history: Mapping[str, Sequence[float]]) -> np.ndarray:
    """Draws the panels of `save_curves` with pyplot, which shows them; returns their axes, shape (metrics,)."""
    _require_matplotlib("plot")
    from matplotlib import pyplot

    return _draw(pyplot.figure(layout="constrained"), history)


def curve_names(history: Mapping[str, object]) -> list[str]:
    """Returns the names of what has a curve of its own, in their order; validation goes with training.

    >>> curve_names({"accuracy": [0.5], "loss": [1.0], "val_loss": [2.0], "learning_rate": [0.1]})
    ['accuracy', 'loss']
    """
    return [name for name in history if not name.startswith("val_") and name != "learning_rate"]


def _require_matplotlib(name: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(f"{name} needs matplotlib: pip install 'elephant-spark[local]'")


def _draw(figure: Figure, history: Mapping[str, Sequence[float]]) -> np.ndarray:
    from matplotlib.ticker import MaxNLocator

    names = curve_names(history)
    figure.set_size_inches(5.2 * len(names), 3.8)
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    for panel, name in zip(axes, names, strict=True):
        for label, key in (("training", name), ("validation", f"val_{name}")):
            if key in history:
                values = history[key]
                panel.plot(range(1, len(values) + 1), values, marker="o", markersize=3, label=label)
        panel.set_title(name)
        panel.set_xlabel("epoch")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
        panel.legend()
    return axes


class Progress:
    """Prints a fit's events, in a ``with`` block around it: one that is interrupted leaves a sentence.

    On a terminal and in a notebook the progress within an epoch is one line that is written over; a file gets a line
    for each epoch. What workers print comes with their rank and host in front, once where several print the same. What
    cannot be shown, because nobody reads the stream any more, does not end a fit.

    Args:
        epochs: Epochs that were asked for; zero for a function.
        verbose: 0 prints nothing, 1 or ``"auto"`` everything, 2 no progress within an epoch.
        waits_for_all: Whether ranks take every step together, and have the same to do in it: those that others wait
            for are named then.
        listeners: Told of all events; None where there are none.

    Attributes:
        record: What the events so far say together.
        straggler_watch: Knows the ranks that others have waited for.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        epochs: int,
        verbose: int | str,
        stream: TextIO | None = None,
        bucket: TokenBucket | None = None,
        waits_for_all: bool = False,
        listeners: Listeners | None = None,
    ) -> None:
        self._num_workers = num_workers
        self._epochs = epochs
        self._listeners = Listeners() if listeners is None else listeners
        self.record = self._listeners.record
        self.straggler_watch = StragglerWatch(waits_for_all=waits_for_all)
        self._verbose = 1 if verbose == "auto" else verbose
        self._stream = stream
        self._shows_plan = True
        self._columns: list[str] = []
        self._moving = ""
        self._bucket = bucket or TokenBucket(per_second=_LINES_PER_S, burst=_BURST_LINES)
        self._left_out = 0
        self._printed: dict[str, tuple[int, float]] = {}
        self._warns_of_loss = True
        # When the wait for ranks began that there is now, and what was said of it.
        self._waits_since: float | None = None
        self._silent_until = 0.0
        self._awaited: set[str] = set()
        self._checkpoint: StateSaved | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt) and self._verbose:
            self._write(self._words_on_stop())
        elif self._moving:
            # What comes next is not to begin in the middle of the line.
            self._put("\n")
        self._moving = ""

    @property
    def shows_output(self) -> bool:
        """True if what workers print is shown."""
        return self._verbose != 0

    def show(self, event: Event) -> None:
        """Prints what there is to say about an event; warns of the first epoch whose loss is not finite.

        Ranks that others wait for are named in notes, when all that the ranks tell of an epoch has come.
        """
        event = self._listeners.show(event)
        if isinstance(event, StepEnded):
            # Most events are steps.
            if self._verbose == 1:
                self._show_step(event)
            return
        if isinstance(event, EpochEnded):
            self._watch_loss(event)
        elif isinstance(event, StateSaved):
            self._checkpoint = event
        if self._verbose:
            self._print(event)
        for line in event.texts if isinstance(event, ShardsMoved) else self.straggler_watch.add(event):
            self.note(line)

    def _print(self, event: Event) -> None:
        if isinstance(event, EpochEnded):
            self._show_epoch(event)
        elif isinstance(event, Printed):
            self._show_output(event)
        elif isinstance(event, RunNote):
            self._write(event.text)
        elif isinstance(event, Awaited):
            self._show_wait(event)
        elif isinstance(event, Started) and self._shows_plan and len(self.record.started) == self._num_workers:
            # A worker that takes the place of a lost one changes nothing of the plan.
            self._shows_plan = False
            self._show_plan()

    def expect(self, num_workers: int) -> None:
        """Takes the number of workers with which an elastic fit begins or goes on; their plan is shown again."""
        self._num_workers, self._shows_plan = num_workers, True
        self.show(WorkersChanged(workers=num_workers))

    def note(self, text: str) -> None:
        """Prints one line about the fit as a whole."""
        self.show(RunNote(text=text))

    def awaits(self, text: str) -> None:
        """Says what a fit waits for that has not begun, and for how long: in the live line, or once where it is long.

        Args:
            text: Of a few words, which tell something else where other words follow the number that they begin with;
                nothing where a fit waits for nothing.
        """
        now = time.monotonic()
        if not text and self._waits_since is None:
            # Said at each turn of a fit's driver: that it is there need not be shown as often.
            if now < self._silent_until:
                return
            self._silent_until = now + _SILENT_S
        if not text or self._waits_since is None:
            self._waits_since = now if text else None
        self.show(Awaited(text=text, seconds=0 if self._waits_since is None else int(now - self._waits_since)))

    def _show_wait(self, awaited: Awaited) -> None:
        line, kind = f"starting, {awaited.seconds} s: {awaited.text}", awaited.text.strip("0123456789")
        if not awaited.text:
            self._awaited.clear()
        elif self._verbose == 1 and self._moves:
            self._show_moving(line)
        elif awaited.seconds >= _QUIET_START_S and kind not in self._awaited:
            self._awaited.add(kind)
            self._write(line)

    def _words_on_stop(self) -> str:
        """Returns how far a fit, or a run of a function, had come when it was interrupted, and what is left of it."""
        record, places = self.record, []
        if record.steps:
            last = min(record.steps.values(), key=_position)
            places = [f" in epoch {last.epoch + 1} of {self._epochs}, step {last.step} of {last.steps}"]
        elif record.epochs:
            places = [f" after epoch {record.epochs[-1].epoch + 1} of {self._epochs}"]
        elif record.awaited is not None:
            places = [f" before the first step, after {record.awaited.seconds} s: {record.awaited.text}"]
        if self._checkpoint is not None:
            state = place_in_words(self._checkpoint.epochs, self._checkpoint.step)
            places.append(f"; its last checkpoint is of {state}: resume=True goes on from there")
        elif self._listeners.params.get("checkpointPath") is None:
            if self._epochs:
                places.append("; nothing of it is kept, because it makes no checkpoints")
        elif self._listeners.params.get("resume"):
            places.append("; it has made no new checkpoint: resume=True goes on from the last one of before, if any")
        else:
            places.append("; nothing of it is kept, because its first checkpoint was still to come")
        return "".join(["stopped", *places])

    def _show_plan(self) -> None:
        started = [start for _, start in sorted(self.record.started.items())]
        # A run of a function has no rows.
        columns = 7 if any(start.training_rows for start in started) else 5
        rows: list[tuple[str, ...]] = [
            ("rank", "host", "executor", "device", "threads", "training rows", "validation rows")
        ]
        for start in started:
            numbers = (start.threads, start.training_rows, start.validation_rows)
            rows.append(
                (str(start.rank), start.host, start.executor, start.device, *(f"{number:,}" for number in numbers))
            )
        self._write("\n".join(_table([row[:columns] for row in rows])))
        warm = sum(start.warm for start in started)
        if warm:
            self._write(f"{warm} of {len(started)} processes were forked from waiting ones")

    def _show_step(self, step: StepEnded) -> None:
        record = self.record
        if record.steps.get(step.rank) is not step or not self._moves:
            return
        text = live_line(
            list(record.steps.values()),
            list(record.started.values()),
            self._epochs,
            self.straggler_watch.latest_stragglers,
        )
        self._show_moving(text)

    def _show_moving(self, text: str) -> None:
        """Writes the live line over what it was."""
        if self._is_terminal:
            # A longer line would go on in the next one, and could not be written over.
            width = shutil.get_terminal_size().columns - 1
            text, self._moving = text[:width], self._moving[:width]
        if text != self._moving:
            self._put("\r" + text.ljust(len(self._moving)))
            self._moving = text

    def _show_output(self, printed: Printed) -> None:
        place, moving = f"[rank {printed.rank}, {printed.host}]", self._moving
        lines = []
        for line in printed.lines:
            if self._is_repeated(printed.rank, line):
                continue
            if not self._bucket.take():
                self._left_out += 1
                continue
            if self._left_out:
                lines.append(f"({self._left_out:,} lines of workers are left out: they print more than can be shown)")
                self._left_out = 0
            lines.append(f"{place} {line}")
        if printed.left_out:
            lines.append(f"{place} ({printed.left_out:,} lines are left out: it prints more than can be shown)")
        if lines:
            self._write("\n".join(lines))
            self._put(moving)
            self._moving = moving

    def _is_repeated(self, rank: int, line: str) -> bool:
        """Returns whether another rank has printed the same line a moment ago, and so spoken for this one."""
        now = time.monotonic()
        speaker, printed_at = self._printed.get(line, (rank, now))
        if speaker != rank and now - printed_at < _SAME_WITHIN_S:
            return True
        if len(self._printed) >= _MOST_REMEMBERED:
            self._printed.clear()
        self._printed[line] = (rank, now)
        return False

    def _show_epoch(self, ended: EpochEnded) -> None:
        if not self._columns:
            self._columns = [name for name, value in ended.logs.items() if isinstance(value, float)]
            self._write("  ".join(["epoch".rjust(9), "seconds", *(name.rjust(_width(name)) for name in self._columns)]))
        cells = [f"{ended.epoch + 1}/{self._epochs}".rjust(9), f"{ended.seconds or 0.0:7.1f}"]
        cells += [f"{ended.logs.get(name, float('nan')):.4g}".rjust(_width(name)) for name in self._columns]
        self._write("  ".join(cells))

    def _watch_loss(self, ended: EpochEnded) -> None:
        loss = ended.logs.get("loss", 0.0)
        if self._warns_of_loss and not ended.is_lost and isinstance(loss, float) and not math.isfinite(loss):
            self._warns_of_loss = False
            warn_user(
                f"The loss is {loss} since epoch {ended.epoch + 1}: the model learns nothing from there on. Lower the "
                "learning rate, clip gradients (clipnorm of the optimizer), or look for rows with NaN. "
                f"See {help_url('nan')}"
            )

    def _write(self, text: str) -> None:
        clear = "\r" + " " * len(self._moving) + "\r" if self._moving else ""
        self._moving = ""
        self._put(clear + text + "\n")

    def _put(self, text: str) -> None:
        out = self._out()
        # One that is closed raises ValueError, one that nobody reads OSError, and what users put there raises anything;
        # a process without a console has none.
        with contextlib.suppress(Exception):
            encoding = getattr(out, "encoding", None) or "utf-8"
            out.write(text.encode(encoding, "replace").decode(encoding))
            out.flush()

    @property
    def _is_terminal(self) -> bool:
        try:
            return bool(self._out().isatty())
        except (AttributeError, ValueError):
            # Users may have put anything there; a stream may be closed.
            return False

    @property
    def _moves(self) -> bool:
        """True if a line can be written over: on terminals, and in notebooks and PyCharm's console, which are none."""
        out = self._out()
        return self._is_terminal or (self._stream is None and (_is_notebook(out) or _is_pycharm(out)))

    def _out(self) -> TextIO:
        return self._stream or sys.stdout


def live_line(
    steps: Sequence[StepEnded], started: Sequence[Started], epochs: int, stragglers: Sequence[Straggler] = ()
) -> str:
    """Returns the line that tells where a fit is.

    Metrics are the average of what each rank has said last of its own rows, by rows: ``~`` marks them, because the
    ranks have said it at different moments. The slowest rank is the one that others have waited for in the last epoch,
    and why. Where there was none, it is the one that waits least, if all take every step together, and else the one
    that is furthest behind; none is named where the difference is small.

    Args:
        steps: The latest report of each rank.
        started: What the ranks said when they started.
        epochs: Of the fit.
        stragglers: Of the last epoch.

    >>> steps = [StepEnded(rank=rank, epoch=1, step=30, steps=100, logs={"loss": 1.0 + rank}, rows=30 * (3 - 2 * rank),
    ...                    rows_per_s=100.0, step_s=0.5, wait_s=0.3 * rank) for rank in (0, 1)]
    >>> live_line(steps, [], 2)
    'epoch 2/2  step 30/100  200 rows/s  0:35 left  loss ~1.2500  (rank 0 is the slowest)'
    """
    last = min(steps, key=_position)
    parts = [f"epoch {last.epoch + 1}/{epochs}", f"step {last.step}/{last.steps}"]
    ranks = sum(rank.training_rows > 0 for rank in started)
    if all(step.step_s for step in steps) and len(steps) >= ranks:
        left_s = int((epochs * last.steps - last.epoch * last.steps - last.step) * last.step_s)
        clock = f"{left_s // 3600}:{left_s // 60 % 60:02}:" if left_s >= 3600 else f"{left_s // 60}:"
        parts += [f"{sum(step.rows_per_s for step in steps):,.0f} rows/s", f"{clock}{left_s % 60:02} left"]
    same = [step for step in steps if step.epoch == last.epoch]
    for name in (name for name, value in last.logs.items() if isinstance(value, float)):
        known = [(step.rows, value) for step in same if isinstance(value := step.logs.get(name), float)]
        total = sum(rows for rows, _ in known)
        if total:
            mean = sum(rows * value for rows, value in known) / total
            parts.append(f"{name} {'~' if max(len(steps), ranks) > 1 else ''}{mean:.4f}")
    return "  ".join([*parts, *_words_on_slowest(steps, started, stragglers)])


def _words_on_slowest(
    steps: Sequence[StepEnded], started: Sequence[Started], stragglers: Sequence[Straggler]
) -> list[str]:
    if stragglers:
        rank = stragglers[0].rank
        host = next((f" on {start.host}" for start in started if start.rank == rank and start.host), "")
        return [f"(rank {rank}{host} is the slowest: {stragglers[0].text})"]
    slowest = _slowest(steps, together=all(rank.first_step is not None for rank in started))
    return [] if slowest is None else [f"(rank {slowest.rank} is the slowest)"]


def _position(step: StepEnded) -> float:
    return step.epoch + step.step / step.steps


def _slowest(steps: Sequence[StepEnded], *, together: bool) -> StepEnded | None:
    if together:
        slowest = min(steps, key=lambda step: step.wait_s)
        return slowest if max(step.wait_s for step in steps) - slowest.wait_s > _NOTED * slowest.step_s else None
    slowest = min(steps, key=_position)
    return slowest if max(map(_position, steps)) - _position(slowest) > _NOTED else None


def _is_notebook(out: TextIO) -> bool:
    shell = getattr(builtins, "get_ipython", None)
    # Output that goes to a file or a string is none of a notebook.
    return hasattr(shell and shell(), "kernel") and not isinstance(out, io.TextIOWrapper | io.StringIO)


def _is_pycharm(out: TextIO) -> bool:
    return out is sys.__stdout__ and bool(os.environ.get("PYCHARM_HOSTED"))


def _width(name: str) -> int:
    return max(len(name), 8)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
