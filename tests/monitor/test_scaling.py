"""What more workers bring: numbers of made-up fits against sums done here, advice by its reasons, and the page."""

import re

import pytest
from tables import every_case

from elephant.monitor.advice import advice_on_runs
from elephant.monitor.report import PARTS
from elephant.monitor.scaling import TITLES, ScalingRun, as_json, efficiencies, page, table_rows
from elephant.monitor.summary import FitSummary


def part(epoch, rank, seconds, *, rows=80, exchange_s=0.0):
    times = {"compute_s": seconds - exchange_s, "exchange_s": exchange_s, "others_s": 0.0, "input_s": 0.0}
    rate = rows / seconds
    return {
        "epoch": epoch,
        "rank": rank,
        "rows": rows,
        "rows_per_s": rate,
        "seconds": seconds,
        "bytes_sent": 1000,
    } | times


def test_run_when_made_of_a_fit_then_has_medians_without_the_first_epoch():
    # Two ranks, 10 steps of 8 rows each; the first epoch, with tracing, is slow.
    took = [9.0, 2.0, 4.0, 2.5]
    ranks = [
        part(epoch, rank, s, exchange_s=s / 4 if epoch else 0.0) for epoch, s in enumerate(took) for rank in (0, 1)
    ]
    plan = [{"rank": 0, "host": "a"}, {"rank": 1, "host": "b"}]
    summary = FitSummary(model="m", seconds=25.0, history={}, plan=plan, ranks=ranks)
    run = ScalingRun.of(summary, workers=2, batch_size=8, steps=10)
    assert run.rates == [80.0, 40.0, 64.0]
    assert (run.rows_per_s, run.spread, run.step_s) == (64.0, 0.625, 0.25)
    assert run.shares == {"compute_s": 0.75, "exchange_s": 0.25, "others_s": 0.0, "input_s": 0.0}
    assert (run.startup_s, run.bytes_per_step, run.hosts) == (25.0 - 4 * 2.5, 100.0, 2)


def run_of(workers, rate, *, exchange=0.0, others=0.0, input=0.0, hosts=1, batch_size=32, rates=None):
    shares = dict(zip(PARTS, (1 - exchange - others - input, exchange, others, input), strict=True))
    return ScalingRun(
        workers=workers, batch_size=batch_size, rates=rates or [rate], shares=shares, bytes_per_step=1e6, hosts=hosts
    )


FAILED = ScalingRun(workers=8, batch_size=32, error="numWorkers=8: expected 8 task slots. Received: 4.")
HALF = {"exchange": 0.5}


def test_efficiency_when_the_run_of_one_worker_failed_then_is_that_over_the_smallest_measured():
    failed = ScalingRun(workers=1, batch_size=32, error="lost")
    assert efficiencies([run_of(4, 300.0), failed, run_of(2, 200.0)]) == {2: 1.0, 4: 0.75}


@every_case(
    ("runs", "options", "texts"),
    [
        ([], {}, []),
        ([FAILED], {}, []),
        ([run_of(1, 100.0)], {}, []),
        # More workers: likely, no more, too many already.
        ([run_of(1, 100.0), run_of(4, 380.0), FAILED], {}, ["More workers are likely to pay off: 4 reach 95%"]),
        ([run_of(1, 100.0), run_of(2, 150.0)], {}, ["Computing a step takes 1.3 times as long with 2 workers"]),
        (
            [run_of(1, 100.0), run_of(2, 190.0), run_of(4, 200.0, others=0.5)],
            {},
            ["Use 2 workers: 4 train 5% more rows per second (200 after 190)", "4 workers wait for slower ones 50%"],
        ),
        ([run_of(1, 100.0), run_of(2, 80.0, others=0.6)], {}, ["Use 1 worker: 2 train 20% fewer", "2 workers wait"]),
        # Of divided batches a step is shorter, which says nothing of cores.
        ([run_of(1, 100.0), run_of(2, 130.0, batch_size=16)], {}, []),
        # A step is half exchange: with twice the rows it takes 3/2 as long; without 7/8 of exchanges 9/16.
        (
            [run_of(2, 100.0, **HALF)],
            {},
            ["Exchanging takes 50% of a step of 2 workers, however many rows the step has: batchSize=64 would train up "
             "to 33% more", "frequency=8 exchanges weights every 8 steps: up to 78% more"],
        ),
        # 64 rows in 0.64 s, of which 0.32 s are for 1 MB.
        (
            [run_of(2, 100.0, hosts=2, **HALF)],
            {},
            ["Exchanging takes 50%", "compression='bfloat16' halves the 1.0 MB that a "
             "worker sends in a step, at 3 MB/s: up to 33% more", "frequency=8"],
        ),
        ([run_of(2, 100.0, hosts=2, **HALF)], {"compression": "int8"}, ["Exchanging takes 50%", "frequency=8"]),
        ([run_of(2, 100.0, **HALF)], {"frequency": 4}, ["Exchanging takes 50%"]),
        (
            [run_of(2, 100.0, **HALF)],
            {"mode": "asynchronous"},
            ["Exchanging takes 50%", "backgroundExchange=True", "frequency=8"],
        ),
        ([run_of(1, 100.0, input=0.2)], {}, ["Steps wait for their rows 20% of the time"]),
        ([run_of(1, 0, rates=[90.0, 100.0, 120.0])], {}, ["Rates with 1 worker differ by 30% from epoch to epoch"]),
    ],
)  # fmt: skip
def test_advice_when_something_stands_out_then_names_it_with_its_numbers(runs, options, texts):
    found = advice_on_runs(runs, options)
    assert len(found) == len(texts), found
    for text, beginning in zip(found, texts, strict=True):
        assert text.startswith(beginning), text


def test_page_when_a_run_failed_then_has_the_others_and_the_reason_as_text():
    runs = [run_of(1, 100.0), run_of(4, 380.0, exchange=0.1), ScalingRun(workers=8, batch_size=32, error="<lost>")]
    shown = page(runs, advice_on_runs(runs, {}), {"model": "<m:build>"})
    assert "8 workers: &lt;lost&gt;" in shown and "&lt;m:build&gt;" in shown
    assert shown.count("<svg") == 2 and "http" not in re.sub(r'xmlns="[^"]*"', "", shown)
    assert [len(row) for row in table_rows(runs)] == [len(TITLES)] * 2
    assert [one.get("efficiency") for one in as_json(runs)] == [1.0, pytest.approx(0.95), None]


def test_page_when_all_runs_failed_then_has_their_reasons():
    assert "8 workers: numWorkers=8" in page([FAILED], [], {})
