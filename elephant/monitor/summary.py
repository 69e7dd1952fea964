"""Summary of a fit: where each rank's seconds went, and what to change."""

from __future__ import annotations

import html
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from elephant.errors import ConfigurationError
from elephant.monitor.events import RankEpoch
from elephant.monitor.progress import curve_names
from elephant.monitor.report import (
    PARTS,
    TRAINING,
    VALIDATION,
    curve_with_ends,
    document,
    epochs_table,
    is_number,
    items_html,
    legend,
    pairs_html,
    scrolling,
    styled,
    table_html,
    timeline_svg,
)

# Parts of a fit's seconds from which on something is worth a change.
_MUCH_WAITING, _MUCH_EXCHANGE, _MUCH_INPUT = 0.15, 0.3, 0.1
# Epochs after the best one from which on they are too many.
_WORSE_EPOCHS = 3
# Times as many rows as the rank with the fewest has.
_UNEVEN = 1.25
# Of a line that is no event.
_SHOWN = 60


@dataclass(frozen=True, kw_only=True)
class FitSummary:
    """Summary of a fit, as the driver had it at its end; it is not saved with the model.

    Args:
        model: What was trained, in words.
        seconds: Of the whole fit, the start of its processes and Spark's share of the time with it.
        history: One number per epoch by metric; see `elephant.KerasModel.history`.
        plan: Places of the ranks; see `elephant.KerasModel.plan`.
        ranks: A dictionary for each epoch and rank; see `rank_times`.
        statistics: Counts; see `elephant.KerasModel.training_statistics`.
        options: Params of the estimator that had other values than their defaults, as text.
        versions: Of Python, Keras and elephant, by name.
        notes: Lines about the fit as a whole, and warnings of its ranks.
        state: Why this is not a fit that has ended well; empty where it is.
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

    @classmethod
    def of_events(cls, lines: Iterable[str | bytes]) -> FitSummary:
        """Returns the summary of a fit from the file that ``eventsPath`` has of it, ended or not.

        Args:
            lines: Of the file, one event each.

        Raises:
            ConfigurationError: They are no events of a fit.
        """
        events = _Events()
        for number, line in enumerate(lines):
            try:
                events.add(json.loads(line))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ConfigurationError(
                    f"line {number + 1}: expected an event of a fit, as eventsPath has them written. Received: "
                    f"{line[:_SHOWN]!r} ({type(error).__name__}). Name such a file."
                ) from error
        if events.first is None:
            raise ConfigurationError("expected events of a fit. Received: an empty file. Name another one.")
        begin, end = events.first, events.end
        return cls(
            model=begin.get("model", "a model"),
            seconds=end.get("seconds", events.last_time - begin["time"]),
            history=_numbers(end["history"]) if "history" in end else events.history(),
            plan=[place for _, place in sorted(events.plan.items())],
            ranks=rank_times([own for _, own in sorted(events.rank_epochs.items())], together=events.together),
            statistics=end.get("statistics", {}),
            options=begin.get("options", {}),
            versions=begin.get("versions", {}),
            notes=events.notes,
            state=events.state,
        )

    @property
    def staleness(self) -> dict[int, int]:
        """Number of updates of an asynchronous fit by their staleness; nothing of a synchronous one."""
        return {int(value): count for value, count in self.statistics.get("staleness", {}).items() if count}

    @property
    def by_rank(self) -> list[dict[str, Any]]:
        """The sums of `ranks` over the epochs, one dictionary of each rank."""
        return _by_rank(self.ranks)

    @property
    def rows_per_s(self) -> float:
        """Training rows of all ranks in a second, on average, without validation."""
        return sum(own["rows_per_s"] for own in self.by_rank)

    @property
    def advice(self) -> list[str]:
        """Changes to make, a sentence or two each; nothing where nothing stands out."""
        return [*_advice_of_times(self), *_advice_of_numbers(self.history, self.statistics)]

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


class _Events:
    """Contents of the lines of an event file that were read so far."""

    def __init__(self) -> None:
        self.first: dict[str, Any] | None = None
        self.end: dict[str, Any] = {}
        self.last_time = 0.0
        self.plan: dict[int, dict[str, Any]] = {}
        self.rank_epochs: dict[tuple[int, int], RankEpoch] = {}
        self.notes: list[str] = []
        self._epochs: dict[int, dict[str, Any]] = {}

    def add(self, line: dict[str, Any]) -> None:
        kind, self.last_time = line["event"], float(line["time"])
        if self.first is None:
            if kind != "fit_begin":
                raise ValueError(kind)
            self.first = line
        elif kind == "worker_begin":
            self._add_worker(line)
        elif kind == "worker_epoch":
            own = RankEpoch(**{part.name: line[part.name] for part in fields(RankEpoch)})
            self.rank_epochs[own.epoch, own.rank] = own
        elif kind == "epoch_end":
            # After a restart, those of the attempt before count no more.
            self._epochs = {epoch: logs for epoch, logs in self._epochs.items() if epoch < line["epoch"]}
            self._epochs[line["epoch"]] = line["metrics"]
        elif kind == "note":
            self.notes.append(line["text"])
        elif kind == "worker_lost":
            self.notes.append(f"rank {line['rank']} on {line['host'] or 'its host'} was lost: {line['reason']}")
        elif kind == "fit_end":
            self.end = line

    def _add_worker(self, line: dict[str, Any]) -> None:
        rank = line["rank"]
        if rank in self.plan and self.together:
            # Another attempt: its times are the fit's.
            self.plan, self.rank_epochs = {}, {}
        self.plan[rank] = {name: line[name] for name in ("rank", "host", "executor", "device", "devices", "threads")}
        if line["note"] and line["note"] not in self.notes:
            self.notes.append(line["note"])

    @property
    def together(self) -> bool:
        """True if ranks take every step together."""
        return self.first is not None and self.first["params"].get("mode") == "synchronous"

    @property
    def state(self) -> str:
        if self.end.get("error"):
            return f"This fit has failed: {self.end['error']}"
        if self.end:
            return ""
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.last_time))
        return f"This fit had not ended at {at}, when its last event came: it goes on, or its driver has died."

    def history(self) -> dict[str, list[Any]]:
        """Returns one number per epoch by metric; None for epochs before those of a fit that was resumed."""
        names = {name: None for logs in self._epochs.values() for name in logs}
        count = max(self._epochs, default=-1) + 1
        missing = dict.fromkeys(names)
        known = {epoch: {**missing, **_numbers(logs)} for epoch, logs in self._epochs.items()}
        return {name: [known.get(epoch, missing)[name] for epoch in range(count)] for name in names}


def _numbers(value: Any) -> Any:
    """Returns numbers from JSON, where null stands for one that is not finite."""
    if isinstance(value, dict):
        return {name: _numbers(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_numbers(part) for part in value]
    return math.nan if value is None else value


def rank_times(events: Sequence[RankEpoch], *, together: bool) -> list[dict[str, Any]]:
    """Returns the parts of each rank's seconds, a dictionary for each epoch and rank.

    ``epoch`` from zero, ``rank``, ``rows`` and ``rows_per_s`` of training, ``seconds`` of the epoch, and of these:
    ``compute_s`` (steps, validation and callbacks), ``exchange_s``, ``others_s`` (waiting for other ranks) and
    ``input_s`` (waiting for rows); ``bytes_sent``. Which rank a rank waits for it cannot know itself: of ranks that
    take every step together, nobody keeps the one waiting that waits least, and its seconds are those of the exchange.

    Args:
        events: Of all ranks, by epoch.
        together: Whether they take every step together.
    """
    times = []
    for _, group in groupby(events, key=lambda event: event.epoch):
        of_epoch = list(group)
        exchange_s = min(event.wait_s for event in of_epoch) if together else math.inf
        times += [_times(event, min(exchange_s, event.wait_s)) for event in of_epoch]
    return times


def _times(event: RankEpoch, exchange_s: float) -> dict[str, Any]:
    return {
        "epoch": event.epoch,
        "rank": event.rank,
        "rows": event.rows,
        "rows_per_s": event.rows / event.training_s if event.training_s > 0 else 0.0,
        "seconds": event.seconds,
        "compute_s": max(event.seconds - event.wait_s - event.input_s, 0.0),
        "exchange_s": exchange_s,
        "others_s": event.wait_s - exchange_s,
        "input_s": event.input_s,
        "bytes_sent": event.bytes_sent,
    }


def _by_rank(times: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    parts = sorted(times, key=lambda part: part["rank"])
    return [added_up(list(own)) for _, own in groupby(parts, key=lambda part: part["rank"])]


def added_up(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the sums of parts of one rank, without ``epoch``; its rate is that of all its rows.

    Examples:
        >>> parts = [{"epoch": epoch, "rank": 1, "rows": 10, "rows_per_s": 5.0 + 5.0 * epoch} for epoch in (0, 1)]
        >>> added_up(parts)["rows_per_s"] == 20 / 3
        True
    """
    took_s = sum(part["rows"] / part["rows_per_s"] for part in parts if part["rows_per_s"])
    sums = {name: sum(part[name] for part in parts) for name in parts[0] if name not in ("epoch", "rank")}
    return {"rank": parts[0]["rank"], **sums, "rows_per_s": sums["rows"] / took_s if took_s else 0.0}


def _advice_of_times(summary: FitSummary) -> list[str]:
    # In the first epoch ranks wait for each other to trace the model.
    first = min((part["epoch"] for part in summary.ranks), default=0)
    ranks = _by_rank([part for part in summary.ranks if part["epoch"] > first] or summary.ranks)
    if not any(own["seconds"] for own in ranks):
        return []
    advice, total_s = [], sum(own["seconds"] for own in ranks)
    slowest = min(ranks, key=lambda own: own["others_s"])
    # One epoch the one may be slower and the next the other, which nobody can help.
    late_s = sum(own["others_s"] - slowest["others_s"] for own in ranks)
    waiting = late_s / max(total_s - slowest["seconds"], slowest["seconds"])
    if waiting > _MUCH_WAITING:
        place = next((part for part in summary.plan if part["rank"] == slowest["rank"]), {})
        fewest = min(own["rows"] for own in ranks)
        why = (
            "It has more rows than others: repartition the DataFrame evenly."
            if slowest["rows"] > _UNEVEN * fewest
            else "Look at what else runs on its host, and at its threads and its device beside those of the others."
        )
        advice.append(
            f"Rank {slowest['rank']} on {place.get('host', 'its host')} is the slowest: the others wait for it "
            f"{waiting:.0%} of their time. {why}"
        )
    for name, much, text in (
        ("exchange_s", _MUCH_EXCHANGE,
         "Exchanging takes {part:.0%} of the time. A larger batchSize or frequency=k exchanges less often; between "
         "hosts, compression='bfloat16' sends half as much."),
        ("input_s", _MUCH_INPUT,
         "Steps wait for their rows {part:.0%} of the time. Let preprocessing run once (without a generator), do less "
         "in augmentation, or hold the rows (cache='memory')."),
    ):  # fmt: skip
        part = sum(own[name] for own in ranks) / total_s
        if part > much:
            advice.append(text.format(part=part))
    return advice


def _advice_of_numbers(history: Mapping[str, Sequence[float]], statistics: Mapping[str, Any]) -> list[str]:
    losses, validated = (
        [value for value in history.get(name, ()) if value is not None] for name in ("loss", "val_loss")
    )
    advice = []
    if any(not math.isfinite(loss) for loss in losses):
        advice.append("The loss is not finite: lower the learning rate, or clip gradients (clipnorm of the optimizer).")
    known = [epoch for epoch, loss in enumerate(validated) if not math.isnan(loss)]
    best = min(known, key=validated.__getitem__, default=len(validated))
    if len(validated) - best > max(len(validated) // 4, _WORSE_EPOCHS):
        advice.append(
            f"val_loss was lowest in epoch {best + 1} of {len(validated)}: "
            "keras.callbacks.EarlyStopping(restore_best_weights=True) ends there and keeps that model."
        )
    for name, text in (
        ("refused", "updates were not finite and are left out: lower the learning rate, or look for rows with NaN."),
        ("worker_retries", "times a worker was started in the place of one that was lost: see the executors' logs."),
        ("restarts", "times the fit was started again after a failure: see the notes."),
    ):
        if statistics.get(name):
            advice.append(f"{statistics[name]:,} {text}")
    return advice


def page(summary: FitSummary) -> str:
    """Returns the summary of a fit as an HTML page that loads nothing."""
    return document(_title(summary), _body(summary))


def _title(summary: FitSummary) -> str:
    return f"Fit of {summary.model}"


def sections(summary: FitSummary) -> str:
    """Returns the summary of a fit as one element of an HTML page, with its style."""
    return styled(_title(summary), _body(summary))


def _body(summary: FitSummary) -> str:
    figures = "".join(
        f"<figure><figcaption>{html.escape(name)}</figcaption>{curve_with_ends(name, summary.history)}</figure>"
        for name in curve_names(summary.history)
    )
    colors = {"training": TRAINING}
    if any(name.startswith("val_") for name in summary.history):
        colors["validation"] = VALIDATION
    timeline = timeline_svg(summary.ranks)
    counts = {name: value for name, value in summary.statistics.items() if isinstance(value, int | float)}
    parts = [
        ("Advice", items_html(summary.advice)),
        ("Curves", figures and f'{legend(colors)}<div class="curves">{figures}</div>'),
        ("Time line", timeline and f"{legend(dict(PARTS.values()))}{scrolling(timeline, 'line')}"),
        ("Ranks", _ranks_table(summary)),
        ("Epochs", epochs_table(summary.history)),
        ("Staleness", pairs_html(dict(sorted(summary.staleness.items())), "staleness", "updates")),
        ("Counts", pairs_html(counts)),
        ("Notes", items_html(summary.notes)),
        ("Params", pairs_html(summary.options)),
        ("Versions", pairs_html(summary.versions)),
    ]
    shown = "".join(f"<h2>{title}</h2>{part}" for title, part in parts if part)
    state = f'<p class="state">{html.escape(summary.state)}</p>' if summary.state else ""
    return f"{state}{_tiles(summary)}{shown}"


def _tiles(summary: FitSummary) -> str:
    """Returns the numbers of the whole fit, and the last one of each metric."""
    epochs, minutes = max(map(len, summary.history.values()), default=0), summary.seconds / 60
    facts = {
        "epochs": f"{epochs:,}",
        "time": f"{minutes:.1f} min" if minutes >= 2 else f"{summary.seconds:.1f} s",
        "ranks": f"{len(summary.plan) or len(summary.by_rank):,}",
        "training rows/s": f"{summary.rows_per_s:,.0f}",
    }
    last = {name: line[-1] for name, line in summary.history.items() if line and is_number(line[-1])}
    facts |= {name: f"{value:.4g}" for name, value in last.items()}
    tiles = (f"<div><dt>{html.escape(name)}</dt><dd>{text}</dd></div>" for name, text in facts.items())
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def _ranks_table(summary: FitSummary) -> str:
    plan = {place["rank"]: place for place in summary.plan}
    rows = [
        (
            own["rank"],
            f"{own['rows']:,}",
            f"{own['rows_per_s']:,.0f}",
            *(f"{own[name]:.1f} s" for name in PARTS),
            f"{own['bytes_sent'] / 1e6:,.1f} MB",
            plan.get(own["rank"], {}).get("host", ""),
            plan.get(own["rank"], {}).get("device", ""),
        )
        for own in summary.by_rank
    ]
    titles = ("rank", "rows", "rows/s", *(title for title, _ in PARTS.values()), "sent", "host", "device")
    return scrolling(table_html(titles, rows), "numbers ranks") if rows else ""
