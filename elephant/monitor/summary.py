"""Summary of a fit: where each rank's seconds went, and what to change."""

from __future__ import annotations

import html
import json
import math
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from elephant.errors import ConfigurationError
from elephant.monitor.advice import advice_on_fit
from elephant.monitor.events import EpochEnded, Event, RunNote, kinds_by_line
from elephant.monitor.progress import curve_names
from elephant.monitor.rank_times import rank_starts, rank_times, sums_by_rank
from elephant.monitor.record import FitRecord, is_one_stage
from elephant.monitor.report import (
    MOST_BARS,
    PARTS,
    TRAINING,
    VALIDATION,
    card_html,
    curve_with_ends,
    document,
    epochs_table,
    folded,
    is_number,
    items_html,
    layers_table,
    legend,
    pairs_html,
    parts_with_colors,
    scrolling,
    share_html,
    styled,
    table_html,
    timeline_colors,
    timeline_svg,
)

# An error shows so much of a line that is no event.
_SHOWN = 60
# Of the places of a plan, those that a table has.
_PLACE = ("host", "device")
# Parts of a card that have more than so many curves, or lines, are folded at first.
_OPEN_CURVES, _OPEN_LINES = 3, 12
# Each cell of a notebook's file that shows a card keeps it.
_CARD_BARS = 400
_PREPARING, _PREFLIGHT, _UNTIL_TASKS = "preparing on the driver", "pre-flight", "until tasks began"
_EARLIER = "earlier attempts"


@dataclass(frozen=True, kw_only=True)
class FitSummary:
    """Summary of a fit, as the driver had it at its end; it is not saved with the model.

    Args:
        model: What was trained, in words.
        seconds: Of the whole fit, the start of its processes and Spark's share of the time with it.
        history: One number per epoch by metric; see `elephant.KerasModel.history`.
        plan: Places of the ranks; see `elephant.KerasModel.plan`.
        ranks: A dictionary for each epoch and rank; see `elephant.monitor.rank_times.rank_times`.
        statistics: Counts; see `elephant.KerasModel.training_statistics`.
        options: Params of the estimator that had other values than their defaults, as text.
        versions: Of Python, Keras and elephant, by name.
        notes: Lines about the fit as a whole, and warnings of its ranks.
        state: Why this is not a fit that has ended well; empty where it is.
        starts: What ranks did before the first epoch of their process; see `elephant.monitor.rank_times.rank_starts`.
        before: Seconds of what the driver did before it had Spark start tasks, by name; nothing where it is not known.
        layers: A dictionary for each layer of the model: ``name``, ``kind``, ``shape`` of its output, as text,
            ``params``, and ``trained``, how many of these training changes; of a large model the first ones.
        more_layers: Number of those that are left out.
        attempts: How often ranks that take every step together have begun; `ranks` and `starts` are of the last time.
    """

    model: str
    seconds: float
    history: Mapping[str, Sequence[float]]
    plan: Sequence[Mapping[str, Any]] = ()
    ranks: Sequence[Mapping[str, Any]] = ()
    statistics: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    state: str = ""
    starts: Sequence[Mapping[str, Any]] = ()
    before: Mapping[str, float] = field(default_factory=dict)
    layers: Sequence[Mapping[str, Any]] = ()
    more_layers: int = 0
    attempts: int = 1

    @classmethod
    def of_events(cls, lines: Iterable[str | bytes]) -> FitSummary:
        """Returns the summary of a fit from the file that ``eventsPath`` has of it, ended or not.

        Args:
            lines: Of the file, one event each.

        Raises:
            ConfigurationError: They are no events of a fit.
        """
        read = _Lines()
        for number, line in enumerate(lines):
            try:
                read.add(json.loads(line))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ConfigurationError(
                    f"line {number + 1}: expected an event of a fit, as eventsPath has them written. Received: "
                    f"{line[:_SHOWN]!r} ({type(error).__name__}). Name such a file."
                ) from error
        if read.begin is None:
            raise ConfigurationError("expected events of a fit. Received: an empty file. Name another one.")
        begin, end = read.begin, read.end
        return cls.of_record(
            read.record,
            began_at=begin.get("began", begin["time"]),
            model=begin.get("model", "a model"),
            seconds=end.get("seconds", read.last_time - begin.get("began", begin["time"])),
            history=_numbers(end["history"]) if "history" in end else read.record.history_by_epoch,
            statistics=end.get("statistics", {}),
            options=begin.get("options", {}),
            versions=begin.get("versions", {}),
            state=read.state,
            before=end.get("before", {}),
            layers=begin.get("layers", ()),
            more_layers=begin.get("more_layers", 0),
        )

    @classmethod
    def of_record(cls, record: FitRecord, *, began_at: float, **values: Any) -> FitSummary:
        """Returns the summary of a fit from its record.

        Args:
            began_at: When it was called, in seconds since 1970.
            values: Those of the fields that a record does not have.
        """
        ranks = rank_times(record.rank_epochs, together=record.together, began_at=began_at)
        known = {"starts": rank_starts(record.rank_epochs, began_at), "before": _before(record, began_at), **values}
        if record.together:
            known["attempts"] = max(map(len, record.attempts.values()), default=1)
        return cls(plan=record.plan, ranks=ranks, notes=list(record.notes), **known)

    @property
    def staleness(self) -> dict[int, int]:
        """Number of updates of an asynchronous fit by their staleness; nothing of a synchronous one."""
        return {int(value): count for value, count in self.statistics.get("staleness", {}).items() if count}

    @property
    def by_rank(self) -> list[dict[str, Any]]:
        """The sums of `ranks` over the epochs, one dictionary of each rank."""
        return sums_by_rank(self.ranks)

    @property
    def parts_s(self) -> dict[str, float]:
        """Parts of the seconds by name, in their order; nothing where that is not known.

        Until training began, they are those of the rank that began last. All that a fit did that was restarted, until
        tasks of its last attempt began, are its ``earlier attempts``.

        Examples:
            >>> fitted.summary.parts_s  # doctest: +SKIP
            {'preparing on the driver': 0.3, 'pre-flight': 0.6, 'until tasks began': 0.3, 'starting the process': 0.4,
             ..., 'in epochs': 4.7, 'between and after them': 0.2}
        """
        firsts = {one["rank"]: one for one in sorted(self.starts, key=lambda one: -float(one["began_s"]))}
        if not firsts:
            return {}
        names = ("rank", "began_s")
        last = max(firsts.values(), key=lambda one: sum(value for name, value in one.items() if name != "rank"))
        before = dict(self.before) if sum(self.before.values()) <= last["began_s"] else {}
        start = {**before, _EARLIER if self.attempts > 1 else _UNTIL_TASKS: last["began_s"] - sum(before.values())}
        start |= {name: part for name, part in last.items() if name not in names}
        slowest: dict[int, float] = {}
        for of_rank in self.ranks:
            slowest[of_rank["epoch"]] = max(slowest.get(of_rank["epoch"], 0.0), of_rank["seconds"])
        epochs_s = sum(slowest.values())
        rest_s = max(self.seconds - sum(start.values()) - epochs_s, 0.0)
        return {**start, "in epochs": epochs_s, "between and after them": rest_s}

    @property
    def rows_per_s(self) -> float:
        """Training rows of all ranks in a second, on average, without validation."""
        return sum(own["rows_per_s"] for own in self.by_rank)

    @property
    def advice(self) -> list[str]:
        """Changes to make, a sentence or two each; nothing where nothing stands out."""
        return advice_on_fit(self.ranks, self.plan, self.history, self.statistics, self.options)

    def report(self, path: str | Path) -> Path:
        """Writes all of it as one HTML page, which loads nothing: curves, a time line of every rank, advice.

        Args:
            path: A file of this machine; one that is there is replaced.

        Returns:
            The absolute path.

        Examples:
            >>> fitted.summary.report("fit.html")  # doctest: +SKIP
        """
        target = Path(path).absolute()
        target.write_text(page(self), encoding="utf-8")
        return target

    def __repr__(self) -> str:
        epochs = max(map(len, self.history.values()), default=0)
        ranks, rate = len(self.by_rank), self.rows_per_s
        return f"FitSummary({epochs} epochs, {self.seconds:.1f} s, {ranks} ranks, {rate:,.0f} rows/s)"

    def _repr_html_(self) -> str:
        return sections(self)


def _before(record: FitRecord, began_at: float) -> dict[str, float]:
    """Returns the seconds until the first thing that was waited for, the pre-flight, and of that until the next one."""
    moments = list(record.waits.values())[:2]
    if len(moments) < 2:
        return {}
    return {_PREPARING: max(moments[0] - began_at, 0.0), _PREFLIGHT: max(moments[1] - moments[0], 0.0)}


class _Lines:
    """Lines of an event file that were read so far, and the record of the fit that they are of."""

    def __init__(self) -> None:
        self.begin: dict[str, Any] | None = None
        self.end: dict[str, Any] = {}
        self.last_time = 0.0
        self.record = FitRecord()

    def add(self, line: dict[str, Any]) -> None:
        name, self.last_time = line["event"], float(line["time"])
        if self.begin is None:
            if name != "fit_begin":
                raise ValueError(name)
            self.begin = line
            self.record = FitRecord(together=is_one_stage(line["params"]))
        elif name == "fit_end":
            self.end = {**line, "before": _seconds_by_name(line.get("before", {}))}
        elif (event := event_of(line)) is not None:
            self.record.add(event)

    @property
    def state(self) -> str:
        if self.end.get("error"):
            return f"This fit has failed: {self.end['error']}"
        if self.end:
            return ""
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.last_time))
        return f"This fit had not ended at {at}, when its last event came: it goes on, or its driver has died."


def event_of(line: Mapping[str, Any]) -> Event | None:
    """Returns the event that a line of an event file is of; None where that is for listeners alone."""
    name = line["event"]
    if name == "epoch_end":
        return EpochEnded(rank=0, epoch=line["epoch"], logs=_numbers(line["metrics"]), seconds=line["seconds"])
    if name == "worker_lost":
        return RunNote(text=f"rank {line['rank']} on {line['host'] or 'its host'} was lost: {line['reason']}")
    kind = kinds_by_line().get(name)
    if kind is None:
        return None
    values = {part.name: _value(line[part.name], part.default) for part in fields(kind) if part.name in line}
    if "start" in values:
        values["start"] = _seconds_by_name(values["start"])
    return kind(**values)


def _value(value: Any, default: Any) -> Any:
    """Returns the value of an event's field, in which null may stand for what is not known."""
    return None if value is None and default is None else _numbers(value)


def _seconds_by_name(parts: Mapping[str, Any]) -> dict[str, float]:
    """Returns seconds by name; raises TypeError where they are something else."""
    seconds = dict(parts)
    if not all(isinstance(part, int | float) for part in seconds.values()):
        raise TypeError("seconds")
    return seconds


def _numbers(value: Any) -> Any:
    """Returns numbers from JSON, where null stands for one that is not finite."""
    if isinstance(value, dict):
        return {name: _numbers(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_numbers(part) for part in value]
    return math.nan if value is None else value


def page(summary: FitSummary) -> str:
    """Returns the summary of a fit as an HTML page that loads nothing."""
    return document(_title(summary), _body(summary))


def _title(summary: FitSummary) -> str:
    return f"Fit of {summary.model}"


def sections(summary: FitSummary) -> str:
    """Returns the summary of a fit as one element of an HTML page, with its style."""
    return styled(_title(summary), _body(summary))


def card(kind: str, summary: FitSummary) -> str:
    """Returns a model, its params and its fit as one compact element of an HTML page, with its style.

    What is long is folded. What there is nothing of, as of an estimator, which has not trained, is left out.

    Args:
        kind: What has the card, such as ``KerasEstimator``.
        summary: Of the fit; or of nothing but a model and params.
    """
    names = sorted(curve_names(summary.history), key=lambda name: name != "loss")
    curves = [curve_with_ends(name, summary.history, width=280, height=130) for name in names]
    curves = [curve for curve in curves if curve]
    ranks, layers, params = len(summary.plan) or len(summary.by_rank), _num_layers(summary), len(summary.options)
    return card_html(
        kind,
        summary.model,
        _state(summary),
        # Curves have the last numbers of all metrics below them.
        _tiles(summary, {"loss", "val_loss"}) if summary.history else "",
        folded(f"Advice ({len(summary.advice)})", items_html(summary.advice), is_open=True),
        _curves(summary, curves[:_OPEN_CURVES]),
        folded(f"More curves ({len(curves) - _OPEN_CURVES})", _curves(summary, curves[_OPEN_CURVES:])),
        folded("Where the time went", _shares(summary), is_open=True),
        folded(f"Params ({params})", pairs_html(summary.options), is_open=params <= _OPEN_LINES),
        # A fit shows its curves first.
        folded(
            f"Layers ({layers:,})",
            layers_table(summary.layers, summary.more_layers),
            is_open=not summary.history and layers <= _OPEN_LINES,
        ),
        folded(f"Ranks ({ranks:,})", _ranks_table(summary)),
        folded("Time line", _timeline(summary, _CARD_BARS)),
        folded(f"Notes ({len(summary.notes)})", items_html(summary.notes)),
    )


def _body(summary: FitSummary) -> str:
    counts = {name: value for name, value in summary.statistics.items() if isinstance(value, int | float)}
    curves = [curve_with_ends(name, summary.history) for name in curve_names(summary.history)]
    parts = [
        ("Advice", items_html(summary.advice)),
        ("Curves", _curves(summary, [curve for curve in curves if curve])),
        ("Where the time went", _shares(summary)),
        ("Time line", _timeline(summary)),
        ("Ranks", _ranks_table(summary)),
        ("Epochs", epochs_table(summary.history)),
        ("Staleness", pairs_html(dict(sorted(summary.staleness.items())), "staleness", "updates")),
        ("Counts", pairs_html(counts)),
        ("Notes", items_html(summary.notes)),
        ("Params", pairs_html(summary.options)),
        ("Layers", layers_table(summary.layers, summary.more_layers)),
        ("Versions", pairs_html(summary.versions)),
    ]
    shown = "".join(f"<h2>{title}</h2>{part}" for title, part in parts if part)
    return f"{_state(summary)}{_tiles(summary)}{shown}"


def _num_layers(summary: FitSummary) -> int:
    return len(summary.layers) + summary.more_layers


def _state(summary: FitSummary) -> str:
    return f'<p class="state">{html.escape(summary.state)}</p>' if summary.state else ""


def _curves(summary: FitSummary, curves: Sequence[str]) -> str:
    colors = {"training": TRAINING}
    if any(name.startswith("val_") for name in summary.history):
        colors["validation"] = VALIDATION
    return f'<div>{legend(colors)}<div class="curves">{"".join(curves)}</div></div>' if curves else ""


def _shares(summary: FitSummary) -> str:
    return share_html(parts_with_colors(summary.parts_s))


def _timeline(summary: FitSummary, most_bars: int = MOST_BARS) -> str:
    timeline = timeline_svg(summary.ranks, summary.starts, summary.parts_s, most_bars=most_bars)
    return timeline and f"{legend(timeline_colors(summary.parts_s))}{scrolling(timeline, 'line')}"


def _tiles(summary: FitSummary, metrics: Container[str] | None = None) -> str:
    """Returns the numbers of the whole fit, those that are known, and the last one of each metric, or of some."""
    epochs, minutes = max(map(len, summary.history.values()), default=0), summary.seconds / 60
    facts = {"epochs": f"{epochs:,}"}
    if summary.seconds:
        facts["time"] = f"{minutes:.1f} min" if minutes >= 2 else f"{summary.seconds:.1f} s"
    if summary.plan or summary.ranks:
        facts["ranks"] = f"{len(summary.plan) or len(summary.by_rank):,}"
    if summary.ranks:
        facts["training rows/s"] = f"{summary.rows_per_s:,.0f}"
    last = {name: line[-1] for name, line in summary.history.items() if line and is_number(line[-1])}
    facts |= {name: f"{value:.4g}" for name, value in last.items() if metrics is None or name in metrics}
    # No list of descriptions, which some notebooks lay out in a way of their own.
    tiles = (f"<div><span>{html.escape(name)}</span> <b>{text}</b></div>" for name, text in facts.items())
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _ranks_table(summary: FitSummary) -> str:
    """Returns a table of ranks and their places; where nothing is known of their epochs, of their places alone."""
    places = {place.get("rank"): (place.get("host", ""), place.get("device", "")) for place in summary.plan}
    if not summary.ranks:
        rows = [(rank, *place) for rank, place in places.items()]
        return scrolling(table_html(("rank", *_PLACE), rows), "numbers ranks") if rows else ""
    rows = [
        (
            own["rank"],
            f"{own['rows']:,}",
            f"{own['rows_per_s']:,.0f}",
            *(f"{own[name]:.1f} s" for name in PARTS),
            f"{own['bytes_sent'] / 1e6:,.1f} MB",
            *places.get(own["rank"], ("", "")),
        )
        for own in summary.by_rank
    ]
    titles = ("rank", "rows", "rows/s", *(title for title, _ in PARTS.values()), "sent", *_PLACE)
    return scrolling(table_html(titles, rows), "numbers ranks")
