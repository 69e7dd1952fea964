"""Summary of a fit, from what its ranks have told of their epochs, or its events: sums, advice, page in a browser."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from browser import Frame, look_at, needs_browser

from elephant.errors import ConfigurationError
from elephant.monitor import record as record_module
from elephant.monitor import report
from elephant.monitor.events import (
    Awaited,
    EpochEnded,
    RankEpoch,
    RankFailure,
    RunNote,
    Started,
    from_message,
    to_message,
)
from elephant.monitor.listeners import EventFile, Listeners
from elephant.monitor.rank_times import rank_starts, rank_times
from elephant.monitor.record import FitRecord
from elephant.monitor.report import timeline_svg
from elephant.monitor.summary import FitSummary, card, event_of, page

SVG = "{http://www.w3.org/2000/svg}"


LAYERS = [
    {"name": "frozen", "kind": "Dense", "shape": "(None, 64)", "params": 50240, "trained": 0},
    {"name": "<script>", "kind": "Dense", "shape": "(None, 10)", "params": 650, "trained": 650},
]


def event(rank, epoch=0, *, rows=100, seconds=10.0, wait_s=1.0, input_s=0.5, end_s=2.0):
    return RankEpoch(
        rank=rank, epoch=epoch, rows=rows, seconds=seconds, training_s=10.0 - end_s, wait_s=wait_s, input_s=input_s,
        bytes_sent=1_000_000, training_wait_s=wait_s,
    )  # fmt: skip


def summary_of(*events, together=True, **more):
    plan = [{"rank": rank, "host": f"h{rank}", "device": "CPU"} for rank in range(3)]
    values = {"model": "<m>", "seconds": 30.0, "history": {"loss": [2.0, 1.0]}, "plan": plan}
    return FitSummary(**{**values, "ranks": rank_times(events, together=together), **more})


def test_event_when_it_crosses_the_channel_then_is_the_same():
    assert from_message(to_message(event(1, 3))) == event(1, 3)


def test_times_when_ranks_step_together_then_who_waits_least_tells_what_the_exchange_takes():
    first, second = rank_times([event(0, wait_s=4.0), event(1, wait_s=1.0)], together=True)
    assert (first["exchange_s"], first["others_s"], first["compute_s"], first["input_s"]) == (1.0, 3.0, 5.5, 0.5)
    assert (second["exchange_s"], second["others_s"], second["rows_per_s"]) == (1.0, 0.0, 12.5)
    assert first["end_s"] == second["end_s"] == 2.0 and "began_s" not in first
    # At their own pace, workers wait for servers alone.
    first, second = rank_times([event(0, wait_s=4.0), event(1, wait_s=1.0)], together=False)
    assert (first["exchange_s"], first["others_s"]) == (4.0, 0.0)


def test_by_rank_when_there_are_epochs_then_adds_them_up():
    summary = summary_of(event(0, 0), event(1, 0), event(0, 1, rows=300), event(1, 1))
    first, second = summary.by_rank
    assert (first["rank"], first["rows"], first["seconds"], first["bytes_sent"]) == (0, 400, 20.0, 2_000_000)
    assert (first["rows_per_s"], second["rows_per_s"]) == (25.0, 12.5)
    assert repr(summary) == "FitSummary(2 epochs, 30.0 s, 2 ranks, 38 rows/s)"


# Two ranks of a fit that is called at 1000: the second one begins last, and its first epoch takes longest.
TIMED = [
    replace(event(0), heard=1017.0, start={"reading rows": 4.0, "preparing": 1.0}, first_step_s=3.0),
    replace(event(1, seconds=12.0), heard=1019.0, start={"reading rows": 1.0, "preparing": 0.5}, first_step_s=3.0),
    replace(event(0, 1), heard=1029.5),
    replace(event(1, 1), heard=1029.5),
]


def timed_summary():
    starts, ranks = rank_starts(TIMED, 1000.0), rank_times(TIMED, together=True, began_at=1000.0)
    return summary_of(seconds=30.0, starts=starts, ranks=ranks)


def test_parts_when_ranks_tell_how_they_began_then_add_up_to_the_whole_fit_and_are_on_the_page():
    summary = timed_summary()
    assert [start["began_s"] for start in summary.starts] == [2.0, 5.5]
    assert [own["began_s"] for own in summary.ranks] == [7.0, 7.0, 19.5, 19.5]
    parts = {"until tasks began": 5.5, "reading rows": 1.0, "preparing": 0.5, "in epochs": 22.0}
    assert summary.parts_s == {**parts, "between and after them": 1.0}
    assert "until tasks began 5.5 s" in page(summary)
    assert summary_of(event(0)).parts_s == {} and "until tasks began" not in page(summary_of(event(0)))
    # A worker that was started again has another start, and what the fit waited for is the first one.
    again = replace(TIMED[3], start={"reading rows": 2.0})
    assert summary_of(starts=rank_starts([*TIMED[:3], again], 1000.0)).parts_s["until tasks began"] == 5.5


def test_time_line_when_ranks_tell_how_they_began_then_has_the_whole_wait_from_call_to_return():
    summary = timed_summary()
    # Ten pixels for a second.
    drawn = ElementTree.fromstring(timeline_svg(summary.ranks, summary.starts, summary.parts_s, width=370))
    assert [text.text for text in drawn.iter(f"{SVG}text")] == ["fit", "rank 0", "rank 1", "30.0 s"]
    bars = [(bar.find(f"{SVG}title").text, float(bar.get("x")) - 70, float(bar.get("width")), bar.get("y"))
            for bar in drawn.iter(f"{SVG}rect")]  # fmt: skip
    fit = [(about.partition(" s ")[2], x, width) for about, x, width, y in bars if y == "3"]
    assert fit == [
        ("until tasks began", 0.0, 55.0),
        ("reading rows", 55.0, 10.0),
        ("preparing", 65.0, 5.0),
        ("in epochs", 70.0, 220.0),
        ("between and after them", 290.0, 10.0),
    ]
    # A rank has its own start, and nothing where it did nothing of the fit.
    first = [(about.removeprefix("rank 0"), x, width) for about, x, width, y in bars if y == "25"][:4]
    assert first == [
        (": 4.00 s reading rows", 20.0, 40.0),
        (": 1.00 s preparing", 60.0, 10.0),
        (", epoch 1: 3.00 s the first step, with its trace", 70.0, 30.0),
        (", epoch 1: 5.50 s computing", 100.0, 55.0),
    ]
    assert next(x for about, x, _, y in bars if "epoch 2" in about and y == "25") == 195.0


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        (summary_of(event(0), event(1)), []),
        (summary_of(), []),
        (summary_of(event(0), event(1, wait_s=9.0), event(0, 1), event(1, 1)), []),
        (summary_of(event(0), event(0, 1, wait_s=5.0), event(1, 1), event(0, 2), event(1, 2, wait_s=5.0)), []),
        (summary_of(event(0), event(1, wait_s=5.0)), ["Rank 0 on h0 is .* others wait for it 40% .* Look at"]),
        (summary_of(event(0, rows=200), event(1, wait_s=5.0)), ["Rank 0 on h0 .* repartition the DataFrame"]),
        (summary_of(event(0, input_s=4.5), event(1, wait_s=5.0)), ["Rank 0 .* wait for their rows", "Steps wait"]),
        (summary_of(event(0, end_s=5.0), event(1, wait_s=5.0)), ["Rank 0 on h0 .* 40% .* validation or its callbacks"]),
        (summary_of(event(0), event(1, wait_s=5.0), together=False), []),
        (summary_of(event(0), event(1, wait_s=5.0), options={"pipelineStages": "2"}), []),
        (summary_of(event(0, wait_s=4.0), event(1, wait_s=4.0)), ["Exchanging takes 40% of the time. .*frequency=k"]),
        (summary_of(event(0, input_s=3.0)), ["Steps wait for their rows 30% of the time. .*without a generator"]),
        (summary_of(history={"loss": [1.0, float("nan")]}), ["The loss is not finite"]),
        (summary_of(history={"val_loss": [3.0, 1.0, 2.0, 2.0, 2.0, 2.0]}), ["val_loss was lowest in epoch 2 of 6"]),
        (summary_of(history={"val_loss": [3.0, 1.0, 2.0]}), []),
        (summary_of(history={"val_loss": [float("nan"), 5.0, 4.0, 3.0, 2.0, 1.0]}), []),
        (summary_of(history={"val_loss": [float("nan"), 1.0, *[2.0] * 4]}), ["val_loss was lowest in epoch 2 of 6"]),
        (summary_of(history={"val_loss": [float("nan")] * 6}), []),
        (summary_of(statistics={"refused": 3, "worker_retries": 1}), ["3 updates were not finite", "1 times a worker"]),
    ],
)  # fmt: skip
def test_advice_when_something_stands_out_then_says_what_to_change(summary, expected):
    assert len(summary.advice) == len(expected)
    assert all(re.match(pattern, text) for pattern, text in zip(expected, summary.advice, strict=True))


def test_time_line_when_drawn_then_each_rank_has_a_line_of_its_seconds():
    drawn = ElementTree.fromstring(timeline_svg(summary_of(event(0), event(1, seconds=5.0)).ranks, width=170))
    bars = list(drawn.iter(f"{SVG}rect"))
    by_line = {top: [bar for bar in bars if bar.get("y") == top] for top in ("3", "25")}
    # 100 pixels for the 10 seconds of the slower one.
    assert [sum(float(bar.get("width")) for bar in line) for line in by_line.values()] == [100.0, 50.0]
    assert bars[0].find(f"{SVG}title").text == "rank 0, epoch 1: 8.50 s computing"
    many = [event(rank, epoch) for epoch in range(500) for rank in range(4)]
    few = list(ElementTree.fromstring(timeline_svg(summary_of(*many).ranks)).iter(f"{SVG}rect"))
    assert len(few) <= 2000
    # A notebook keeps a card in each of its cells that shows one; a page of its own has all.
    sizes = [len(made(summary_of(*many))) for made in (lambda of: card("KerasModel", of), page)]
    assert sizes[0] < 120_000 < sizes[1]
    assert timeline_svg([]) == ""


def test_report_when_written_then_holds_all_of_the_fit_and_loads_nothing(tmp_path):
    events = [event(0), event(1, wait_s=5.0), event(0, 1), event(1, 1, wait_s=5.0)]
    summary = summary_of(
        *events,
        notes=["said & done"],
        options={"epochs": "2"},
        versions={"keras": "3"},
        statistics={"staleness": {"2": 7}},
    )
    path = summary.report(tmp_path / "fit.html")
    text = path.read_text(encoding="utf-8")
    assert path == tmp_path / "fit.html"
    assert "<h1>Fit of &lt;m&gt;</h1>" in text and "said &amp; done" in text
    titles = ["Advice", "Curves", "Time line", "Ranks", "Epochs", "Staleness", "Notes", "Params", "Versions"]
    assert re.findall("<h2>(.*?)</h2>", text) == titles
    assert re.findall(r'(?:src|href)="|@import|url\(', text) == []
    ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))


def started(rank, **more):
    place = {"host": f"h{rank}", "executor": str(rank), "device": "CPU", "threads": 2}
    return Started(rank=rank, **place, training_rows=100, validation_rows=0, **more)


def events_of(*shown, mode="synchronous", fitted=None, error=None, **facts):
    """Returns the lines that a fit's file of events has."""
    written, facts = [], {"model": "<m>", "options": {"epochs": "2"}, "versions": {"keras": "3"}, **facts}
    listeners = Listeners([EventFile(written.append, facts)], {"mode": mode})
    listeners.fitted = fitted
    listeners.__enter__()
    for one in shown:
        listeners.show(one)
    if fitted or error:
        listeners.__exit__(None, error, None)
    return written[-1].splitlines()


HISTORY = {"loss": [2.0, math.nan], "per_class": [[0.5, 1.0], [0.25, math.inf]]}
FIT = [
    started(0, note="GPU 3 is not seen"),
    started(1),
    RunNote(rank=0, text="callbacks run here"),
    event(0),
    event(1, wait_s=5.0),
    EpochEnded(rank=0, epoch=0, logs={"loss": 2.0, "per_class": [0.5, 1.0]}),
    event(0, 1),
    event(1, 1, wait_s=5.0),
    EpochEnded(rank=0, epoch=1, logs={"loss": math.nan, "per_class": [0.25, math.inf]}),
]


def test_events_when_a_fit_has_ended_then_make_the_page_that_its_summary_makes():
    plan = [
        {"rank": rank, "host": f"h{rank}", "executor": str(rank), "device": "CPU", "devices": [], "threads": 2}
        for rank in (0, 1)
    ]
    counts = {"updates": 7, "staleness": {"2": 7}}
    summary = summary_of(
        *(one for one in FIT if isinstance(one, RankEpoch)), history=HISTORY, plan=plan, statistics=counts,
        options={"epochs": "2"}, versions={"keras": "3"}, notes=["GPU 3 is not seen", "callbacks run here"],
        layers=LAYERS, more_layers=3,
    )  # fmt: skip
    read = FitSummary.of_events(events_of(*FIT, fitted=SimpleNamespace(summary=summary), layers=LAYERS, more_layers=3))
    assert "and 3 more" in page(read)
    # Of infinity JSON knows nothing.
    assert page(read) == page(summary).replace("inf]", "nan]") and read.starts == []
    assert [{**own, "began_s": 0.0} for own in summary.ranks] == read.ranks
    assert read.plan == plan and read.state == ""


def test_events_when_ranks_tell_how_they_began_then_make_the_parts_and_the_time_line_that_the_fit_makes():
    lines = events_of(*TIMED, EpochEnded(rank=0, epoch=1, logs={"loss": 1.0}), began=1000.0, fitted=SimpleNamespace(
        summary=SimpleNamespace(seconds=30.0, history={}, statistics={}, before={"pre-flight": 1.0})))  # fmt: skip
    read, known = FitSummary.of_events(lines), timed_summary()
    assert (read.starts, read.ranks) == (known.starts, known.ranks)
    # Of the time before there were tasks, the driver knows more.
    assert read.parts_s == {"pre-flight": 1.0, **known.parts_s, "until tasks began": 4.5}
    # Hours of training before a restart are no wait for tasks.
    again = [*map(started, (0, 1)), event(0), *map(started, (0, 1)), *TIMED, EpochEnded(rank=0, epoch=1, logs={})]
    restarted = FitSummary.of_events(events_of(*again, began=1000.0))
    assert restarted.parts_s["earlier attempts"] == 5.5 and "until tasks began" not in restarted.parts_s


def test_summary_when_a_driver_has_said_what_it_waits_for_then_has_the_seconds_before_spark_starts_tasks(monkeypatch):
    record, clock = FitRecord(), [1000.5]
    monkeypatch.setattr(record_module.time, "time", lambda: clock[0])
    for text, seconds in (("the look", 0.25), ("the look", 0.25), ("tasks", 2.0), ("2 running tasks", 3.0), ("", 9.0)):
        record.add(Awaited(text=text, seconds=0))
        clock[0] += seconds
    summary = FitSummary.of_record(record, began_at=1000.0, model="m", seconds=20.0, history={})
    assert summary.before == {"preparing on the driver": 0.5, "pre-flight": 0.5}
    unknown = FitSummary.of_record(FitRecord(), began_at=1000.0, model="m", seconds=20.0, history={})
    assert unknown.before == unknown.parts_s == {}


def test_events_when_a_fit_goes_on_or_has_failed_then_make_the_page_so_far_and_say_so():
    lost = RankFailure(rank=1, kind="MemoryError", message="no room")
    read = FitSummary.of_events(events_of(*FIT[:6], lost))
    assert read.history == {"loss": [2.0]} and len(read.ranks) == 2
    assert re.match(r"This fit had not ended at 20\d\d-.* UTC, when its last event came: it goes on, or", read.state)
    assert read.notes[-1] == "rank 1 on h1 was lost: MemoryError: no room"
    assert f'<p class="state">{read.state}</p>' in page(read)
    failed = FitSummary.of_events(events_of(*FIT, error=ValueError("<no>")))
    assert failed.state == "This fit has failed: ValueError: <no>" and "ValueError: &lt;no&gt;" in page(failed)
    assert failed.history["loss"][0] == 2.0 and math.isnan(failed.history["loss"][1])
    assert "The loss is not finite" in failed.advice[-1]


def test_events_when_ranks_begin_again_then_are_those_of_the_last_attempt_and_of_all_epochs():
    again = [started(0), started(1), event(0, 1, rows=7), EpochEnded(rank=0, epoch=1, logs={"loss": 1.0})]
    read = FitSummary.of_events(events_of(*FIT, *again))
    assert [own["rows"] for own in read.ranks] == [7] and read.history["loss"] == [2.0, 1.0]
    # A worker that nobody waits for has the times of all its attempts.
    read = FitSummary.of_events(events_of(*FIT, *again, mode="asynchronous"))
    assert [own["rows"] for own in read.ranks] == [100, 100, 7, 100]
    # Of epochs before a fit was resumed nothing is known here.
    read = FitSummary.of_events(events_of(*again))
    assert read.history == {"loss": [None, 1.0]} and read.advice == []
    assert "<td>1</td><td></td>" in page(read) and "<polyline" in page(read)


BEGIN = '{"event": "fit_begin", "time": 1, "params": {}}'


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([], "expected events of a fit. Received: an empty file"),
        (["# elephant"], "line 1: expected an event of a fit.* Received: '# elephant'"),
        (['{"event": "epoch_end", "time": 1}'], "line 1: expected an event"),
        ([BEGIN, "[1]"], "line 2: expected an event"),
        ([BEGIN, '{"event": "fit_end", "time": 2, "before": {"<script>": "1"}}'], "line 2: expected an event"),
    ],
)
def test_events_when_they_are_something_else_then_says_in_which_line(lines, text):
    with pytest.raises(ConfigurationError, match=text):
        FitSummary.of_events(lines)


def test_event_when_null_is_what_a_field_has_by_default_then_is_not_known_and_else_is_no_number():
    begin = {"event": "worker_begin", "rank": 0, "host": "h", "device": "CPU", "threads": 1, "training_rows": 8,
             "validation_rows": 0, "first_step": None}  # fmt: skip
    assert event_of(begin).first_step is None
    step = {
        "event": "worker_step",
        "rank": 0,
        "epoch": 0,
        "step": 1,
        "steps": 2,
        "logs": {"loss": None},
        "step_s": None,
    }
    assert math.isnan(event_of(step).logs["loss"]) and math.isnan(event_of(step).step_s)


def lightness(color):
    """Returns the relative luminance of a color, as WCAG 2 defines it."""
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_colors_when_a_theme_is_light_or_dark_then_have_the_contrast_that_wcag_asks_for_and_texts_inherit_theirs():
    drawn = {
        report.TRAINING,
        report.VALIDATION,
        *(color for _, color in (*report.PARTS.values(), report._FIRST_STEP)),
        *report._BESIDE.values(),
    }
    # White, and what JupyterLab and Visual Studio Code call dark.
    for background in map(lightness, ("#ffffff", "#111111", "#1e1e1e")):
        pairs = [sorted((lightness(color), background)) for color in drawn]
        assert min((light + 0.05) / (dark + 0.05) for dark, light in pairs) >= 3
    # Of its own, text has a color on a background of its own alone.
    fixed = [line for line in report._STYLE.splitlines() if re.search(r"[ ;]color: #", line)]
    assert [line.split(" {")[0] for line in fixed] == [".elephant-fit .state"] and "background: #" in fixed[0]
    # Beside other parts of a notebook, it is for elephant's own alone.
    rules = re.sub(r"{[^}]*}", "\n", report._STYLE)
    assert {name.strip().split(" ")[0] for name in re.split(r"[,\n]", rules) if name.strip()} == {
        ".elephant-fit",
        ".elephant-card",
        ".elephant-fit.elephant-card",
    }


def large_summary(**more):
    """Returns the summary of a fit of many epochs, with long words."""
    events = [event(rank, epoch, wait_s=1.0 + rank) for epoch in range(24) for rank in range(3)]
    history = {
        f"{prefix}{name}": [1.0 / (epoch + 1) + above for epoch in range(24)]
        for prefix, above in (("", 0.0), ("val_", 0.1))
        for name in ("accuracy", "loss", "top_k_categorical_accuracy", "f1")
    }  # fmt: skip
    host = "ip-10-0-12-7.eu-west-1.compute.internal"
    plan = [{"rank": rank, "host": host, "device": "GPU 0 (NVIDIA A10G)"} for rank in range(3)]
    options = {"checkpointPath": "'s3://bucket/" + "long" * 30 + "'", "validationFraction": "0.1"}
    more = {"history": history, "plan": plan, "options": options, "notes": ["word" * 40], "layers": LAYERS, **more}
    return summary_of(*events, seconds=330.0, **{"starts": [{"rank": 0, "began_s": 5.0, "reading rows": 2.0}], **more})


def read(page):
    """Returns HTML as a tree: what is not well formed, as after a name that holds markup, is an error."""
    return ElementTree.fromstring(page)


def titles_of(tree):
    return ["".join(title.itertext()) for title in tree.iter("summary")]


def test_card_when_there_was_a_fit_then_has_curves_places_params_and_layers_and_folds_what_is_long():
    tree = read(card("KerasModel", large_summary(options={"featuresCol": "'<b>&'"})))
    assert titles_of(tree) == [
        "Advice (1)", "More curves (1)", "Where the time went", "Params (1)", "Layers (2)", "Ranks (3)", "Time line",
        "Notes (1)",
    ]  # fmt: skip
    are_open = {"".join(part.find("summary").itertext()): "open" in part.attrib for part in tree.iter("details")}
    assert are_open["Where the time went"] and are_open["Params (1)"] and not are_open["Ranks (3)"]
    assert next(tree.iter("figcaption")).text == "loss" and len(list(tree.iter(f"{SVG}polyline"))) == 8
    texts = {part.text for part in tree.iter()}
    assert {"<m>", "<script>", "'<b>&'", "50,240", "trained"} <= texts | {tree[1][0].tail.strip()}
    assert list(tree.iter("script")) == []


def test_card_when_there_was_no_fit_then_has_what_there_is():
    alone = FitSummary(model="m", seconds=0.0, history={}, options={"epochs": "3"}, layers=LAYERS[1:])
    tree = read(card("KerasEstimator", alone))
    assert titles_of(tree) == ["Params (1)", "Layers (1)"] and tree.find("div[@class='tiles']") is None
    # Of a model that is trained as a whole that is not said.
    assert [cell.text for cell in tree.iter("th")] == ["layer", "type", "output", "parameters"]
    many = read(card("KerasEstimator", replace(alone, options={}, layers=LAYERS * 101)))
    assert next(many.iter("details")).attrib == {} and len(list(many.iter("tr"))) == 1 + 200 + 1
    assert "and 2 more" in {cell.text for cell in many.iter("td")}
    # As of a model that was loaded: where its ranks were, and nothing of their epochs.
    loaded = read(card("KerasModel", replace(large_summary(), ranks=(), seconds=0.0, starts=())))
    assert "Ranks (3)" in titles_of(loaded) and "Where the time went" not in titles_of(loaded)
    assert [fact[0].text for fact in loaded.find("div[@class='tiles']")] == ["epochs", "ranks", "loss", "val_loss"]


@needs_browser
def test_report_when_opened_in_a_browser_then_is_as_wide_as_a_phone_or_a_screen_and_shows_all_charts():
    text = page(large_summary())
    # The epochs of each rank, how one of them began, and the parts of the fit.
    assert text.count("<rect") == 24 * 3 * 4 + 1 + 4
    frames = [Frame(text, width=400, height=2400), Frame(text, width=1400, height=2400)]
    seen = look_at("report", *frames, *(replace(frame, theme="dark") for frame in frames))
    for frame, one in zip((*frames, *frames), seen, strict=True):
        # A curve for each metric, and the time line.
        assert len(one.measures["drawings"]) == 5 and min(one.measures["drawings"]) > 300, one.measures
        require_readable(one, frame.width)
    assert [one.background > 0.9 for one in seen] == [True, True, False, False]


@needs_browser
def test_card_when_a_notebook_is_light_or_dark_then_can_be_read_in_both_whether_folded_or_not():
    # The notebook decides, not the browser; the last one says nothing of colors.
    themes = [
        "background: #fff; color: #212121",
        "background: #111; color: #e0e0e0",
        "background: #383838; color: #fff",
    ]
    shown = card("KerasModel", large_summary(state="<b>"))
    every = shown.replace("<details>", '<details open="open">')
    frames = [
        Frame(f'<body style="{theme}; font: 13px sans-serif">{one}</body>', width=width, height=2200)
        for theme in themes for one, width in ((shown, 900), (every, 500))
    ]  # fmt: skip
    for frame, one in zip(frames, look_at("card", *frames), strict=True):
        assert min(one.measures["drawings"]) > 200, one.measures
        require_readable(one, frame.width)


def require_readable(seen, width):
    """Raises AssertionError unless texts are as large and clear as WCAG 2 has them, nothing is cut, or wider."""
    found = seen.measures
    assert found["width"] == width and found["needed"] <= width and found["cut"] == [], found
    assert found["contrast"] >= 4.5, found["dimmest"]
    assert found["smallest"] >= 10 and 0.01 < seen.drawn < 0.5, found
