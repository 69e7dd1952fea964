"""Progress of a fit on the driver: lines, history, and curves."""

from __future__ import annotations

import contextlib
import math
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from elephant.monitor.events import EpochEnded, Event, Printed, RunNote, Started, StepEnded
from elephant.monitor.listeners import Listeners
from elephant.monitor.log_stream import TokenBucket

_PLAIN_INTERVAL_S = 5.0
# Of all workers together: each limits its own before it sends them.
_LINES_PER_S = 50.0
_BURST_LINES = 1000


class History:
    """Collects the logs of the epochs, in the form of Keras' ``History.history``.

    >>> history = History()
    >>> history.add({"loss": 0.5})
    >>> history.add({"loss": 0.25, "val_loss": 0.3})
    >>> history.as_dict()
    {'loss': [0.5, 0.25], 'val_loss': [0.3]}
    """

    def __init__(self) -> None:
        self._series: dict[str, list[float]] = {}

    def add(self, logs: Mapping[str, Any]) -> None:
        """Appends the numbers of one epoch."""
        for name, value in logs.items():
            self._series.setdefault(name, []).append(value)

    def as_dict(self) -> dict[str, list[float]]:
        """Returns a copy: name of the metric to one number per epoch."""
        return {name: list(values) for name, values in self._series.items()}


def save_curves(history: Mapping[str, Sequence[float]], path: str | Path) -> Path:
    """Draws one panel per metric, training and validation together, into a PNG file.

    Args:
        history: What `KerasModel.history` holds: one number per epoch by metric.

    Returns:
        The absolute path of the file.

    Raises:
        ImportError: matplotlib is not installed (``pip install 'elephant-spark[local]'``).
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError("save_curves needs matplotlib: pip install 'elephant-spark[local]'") from error

    names = [name for name in history if not name.startswith("val_") and name != "learning_rate"]
    figure = Figure(figsize=(5.2 * len(names), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    for position, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), position + 1)
        for label, key in (("training", name), ("validation", f"val_{name}")):
            if key in history:
                values = history[key]
                axes.plot(range(1, len(values) + 1), values, marker="o", markersize=3, label=label)
        axes.set_title(name)
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    target = Path(path).absolute()
    figure.savefig(target, dpi=120)
    return target


class Progress:
    """Prints a fit's events.

    On a terminal the progress is one line that is written over; elsewhere (a
    notebook, a log file) it is a line every few seconds. What workers print comes with
    their rank and host in front. What cannot be shown, because nobody reads the
    stream any more, does not end a fit.

    Args:
        epochs: Epochs that were asked for; zero for a function.
        verbose: 0 prints nothing, 1 everything, 2 no progress within an epoch.
        listeners: Told of all events; None where there are none.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        epochs: int,
        verbose: int,
        stream: TextIO | None = None,
        bucket: TokenBucket | None = None,
        listeners: Listeners | None = None,
    ) -> None:
        self._num_workers = num_workers
        self._epochs = epochs
        self._verbose = verbose
        self._listeners = listeners
        self._stream = stream
        self._started: dict[int, Started] = {}
        self._columns: list[str] = []
        self._epoch_began = time.monotonic()
        self._noted_at = 0.0
        self._moving = ""
        self._bucket = bucket or TokenBucket(per_second=_LINES_PER_S, burst=_BURST_LINES)
        self._left_out = 0
        self._warns_of_loss = True

    @property
    def shows_output(self) -> bool:
        """Whether what workers print is shown."""
        return self._verbose > 0

    def show(self, event: Event) -> None:
        """Prints what there is to say about an event; warns of the first epoch whose loss is not finite."""
        if self._listeners is not None:
            self._listeners.show(event)
        if isinstance(event, EpochEnded):
            self._watch_loss(event)
        if self._verbose == 0:
            return
        if isinstance(event, Started):
            is_new = event.rank not in self._started
            self._started[event.rank] = event
            # A worker that takes the place of a lost one changes nothing of the plan.
            if is_new and len(self._started) == self._num_workers:
                self._show_plan()
        elif isinstance(event, StepEnded) and self._verbose == 1:
            self._show_step(event)
        elif isinstance(event, EpochEnded):
            self._show_epoch(event)
        elif isinstance(event, Printed):
            self._show_output(event)
        elif isinstance(event, RunNote):
            self.note(event.text)

    def note(self, text: str) -> None:
        """Prints one line about the fit as a whole."""
        if self._verbose:
            self._write(text)

    def _show_plan(self) -> None:
        # A run of a function has no rows.
        columns = 7 if any(event.training_rows for event in self._started.values()) else 5
        titles = ("rank", "host", "executor", "device", "threads", "training rows", "validation rows")
        rows: list[tuple[str, ...]] = [titles]
        for rank in sorted(self._started):
            event = self._started[rank]
            numbers = (event.threads, event.training_rows, event.validation_rows)
            rows.append((str(rank), event.host, event.executor, event.device, *(f"{number:,}" for number in numbers)))
        rows = [row[:columns] for row in rows]
        self._write("\n".join(_table(rows)))
        warm = sum(event.warm for event in self._started.values())
        if warm:
            self._write(f"{warm} of {len(self._started)} processes were forked from waiting ones (warmWorkers)")
        self._epoch_began = time.monotonic()

    def _show_step(self, event: StepEnded) -> None:
        now = time.monotonic()
        moving = self._is_terminal
        if not moving and now - self._noted_at < _PLAIN_INTERVAL_S:
            return
        text = f"epoch {event.epoch + 1}/{self._epochs}  step {event.step}/{event.steps}"
        if "loss" in event.logs:
            text += f"  loss {event.logs['loss']:.4f} (rank {event.rank})"
        self._noted_at = now
        if moving:
            self._put("\r" + text.ljust(len(self._moving)))
            self._moving = text
        else:
            self._write(text)

    def _show_output(self, event: Printed) -> None:
        place, moving = f"[rank {event.rank}, {event.host}]", self._moving
        lines = []
        for line in event.lines:
            if not self._bucket.take():
                self._left_out += 1
                continue
            if self._left_out:
                lines.append(f"({self._left_out:,} lines of workers are left out: they print more than can be shown)")
                self._left_out = 0
            lines.append(f"{place} {line}")
        if event.left_out:
            lines.append(f"{place} ({event.left_out:,} lines are left out: it prints more than can be shown)")
        if lines:
            self._write("\n".join(lines))
            self._put(moving)
            self._moving = moving

    def _show_epoch(self, event: EpochEnded) -> None:
        if not self._columns:
            self._columns = [name for name, value in event.logs.items() if isinstance(value, float)]
            self._write("  ".join(["epoch".rjust(9), "seconds", *(name.rjust(_width(name)) for name in self._columns)]))
        now = time.monotonic()
        seconds = now - self._epoch_began if event.seconds is None else event.seconds
        cells = [f"{event.epoch + 1}/{self._epochs}".rjust(9), f"{seconds:7.1f}"]
        cells += [f"{event.logs.get(name, float('nan')):.4g}".rjust(_width(name)) for name in self._columns]
        self._epoch_began = now
        self._write("  ".join(cells))

    def _watch_loss(self, event: EpochEnded) -> None:
        loss = event.logs.get("loss", 0.0)
        if self._warns_of_loss and isinstance(loss, float) and not math.isfinite(loss):
            self._warns_of_loss = False
            warnings.warn(
                f"The loss is {loss} since epoch {event.epoch + 1}: the model learns nothing from there on. Lower the "
                "learning rate, or clip gradients (clipnorm of the optimizer).",
                stacklevel=2,
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
            # What a notebook puts there, or a stream that is closed.
            return False

    def _out(self) -> TextIO:
        return self._stream or sys.stdout


def _width(name: str) -> int:
    return max(len(name), 8)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
