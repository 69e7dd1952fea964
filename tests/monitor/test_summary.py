"""Summary of a fit, from what its ranks have told of their epochs: sums, advice, and the report in a browser."""

import re
import shutil
import subprocess
from xml.etree import ElementTree

import pytest

from elephant.monitor.events import RankEpoch, from_message, to_message
from elephant.monitor.report import timeline_svg
from elephant.monitor.summary import FitSummary, rank_times

SVG = "{http://www.w3.org/2000/svg}"


def event(rank, epoch=0, *, rows=100, seconds=10.0, wait_s=1.0, input_s=0.5):
    return RankEpoch(
        rank=rank, epoch=epoch, rows=rows, seconds=seconds, training_s=8.0, wait_s=wait_s, input_s=input_s,
        bytes_sent=1_000_000,
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
    # At their own pace, workers wait for servers alone.
    first, second = rank_times([event(0, wait_s=4.0), event(1, wait_s=1.0)], together=False)
    assert (first["exchange_s"], first["others_s"]) == (4.0, 0.0)


def test_by_rank_when_there_are_epochs_then_adds_them_up():
    summary = summary_of(event(0, 0), event(1, 0), event(0, 1, rows=300), event(1, 1))
    first, second = summary.by_rank
    assert (first["rank"], first["rows"], first["seconds"], first["bytes_sent"]) == (0, 400, 20.0, 2_000_000)
    assert (first["rows_per_s"], second["rows_per_s"]) == (25.0, 12.5)
    assert repr(summary) == "FitSummary(2 epochs, 30.0 s, 2 ranks, 38 rows/s)"


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        (summary_of(event(0), event(1)), []),
        (summary_of(), []),
        (summary_of(event(0), event(1, wait_s=9.0), event(0, 1), event(1, 1)), []),
        (summary_of(event(0), event(0, 1, wait_s=5.0), event(1, 1), event(0, 2), event(1, 2, wait_s=5.0)), []),
        (summary_of(event(0), event(1, wait_s=5.0)), ["Rank 0 on h0 is .* others wait for it 40% .* Look at"]),
        (summary_of(event(0, rows=200), event(1, wait_s=5.0)), ["Rank 0 on h0 .* repartition the DataFrame"]),
        (summary_of(event(0, wait_s=4.0), event(1, wait_s=4.0)), ["Exchanging takes 40% of the time. .*frequency=k"]),
        (summary_of(event(0, input_s=3.0)), ["Steps wait for their rows 30% of the time. .*cachePreprocessing"]),
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
    for left_open in ("<!DOCTYPE html>", '<meta charset="utf-8">', "<br>", "&nbsp;"):
        text = text.replace(left_open, "")
    ElementTree.fromstring(text)


def browser():
    names = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
    return next(filter(None, map(shutil.which, names)), None)


@pytest.mark.skipif(browser() is None, reason="there is no Chromium")
def test_report_when_opened_in_a_browser_then_shows_a_bar_for_every_part_of_every_rank(tmp_path):
    path = summary_of(event(0), event(1)).report(tmp_path / "fit.html")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run([browser(), *flags, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("<rect") == 8 and "<h2>Time line</h2>" in done.stdout
