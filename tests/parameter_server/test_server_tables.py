"""Rows of tables at real server processes: looked up, pushed exactly once, kept in files, and asked for wrongly."""

import os
import signal
import threading

import numpy as np
import pytest
from leaks import nothing_left_behind as nothing_left_behind
from servers import receive, until

from elephant.errors import CheckpointError, PositionLost, ProtocolError
from elephant.parameter_server.layout import Layout
from elephant.parameter_server.protocol import (
    HEADER_BYTES,
    TEXT_BYTES,
    RequestHeader,
    RequestKind,
    Status,
    decode_header,
    decode_text,
)
from elephant.parameter_server.tables import LEFT, MARKED, WRITTEN, TablesWanted
from elephant.tables.stack import Groups, TableContribution, stacks_of
from elephant.tables.stored import StoredTable, TablePlaces
from elephant.tables.table import ROWS, TableSpec

ADD = {"name": "add"}
# Two of one form, which are stacked, and one of another.
SPECS = [
    TableSpec(num_rows=23, width=3, rule="sgd", learning_rate=1.0, seed=1, draw="constant", drawn=(0.0,)),
    TableSpec(num_rows=10, width=2, rule="sgd", learning_rate=1.0, seed=2, draw="constant", drawn=(0.0,)),
    TableSpec(num_rows=8, width=3, rule="sgd", learning_rate=1.0, seed=3, draw="constant", drawn=(0.0,)),
]
LAYOUT = Layout([("kernel", (100,))], SPECS)
SENT = TablesWanted(places=[None] * len(SPECS))


def contribution_of(parts, step):
    """Returns whole numbers as gradients of some rows of all tables, and the same as a sum over each whole table."""
    random, totals = np.random.default_rng(step), [np.zeros((spec.num_rows, spec.width)) for spec in SPECS]
    numbers, gradients = [], []
    for stack in stacks_of(SPECS, parts):
        own, given = [], []
        for table, spec in zip(stack.tables, stack.specs, strict=True):
            ids = random.choice(spec.num_rows, 4, replace=False)
            values = random.integers(-9, 10, (4, spec.width)).astype("float32")
            totals[table][ids] += values
            own.append(stack.first_of(table) + ids)
            given.append(values)
        groups = Groups.of(np.concatenate(own))
        numbers.append(groups.numbers)
        gradients.append(groups.sums(np.concatenate(given)))
    return TableContribution(tuple(range(len(SPECS))), numbers, gradients), totals


def rows_of(worker, parts):
    """Looks all rows of all tables up; returns them by table."""
    stacks, found = stacks_of(SPECS, parts), {}
    wanted = [
        np.concatenate([stack.first_of(table) + np.arange(SPECS[table].num_rows) for table in stack.tables])
        for stack in stacks
    ]
    for stack, rows in zip(stacks, worker.look_up(wanted), strict=True):
        ends = np.cumsum([spec.num_rows for spec in stack.specs])[:-1]
        found |= dict(zip(stack.tables, np.split(rows, ends), strict=True))
    return [found[table] for table in range(len(SPECS))]


@pytest.mark.parametrize("parts", [1, 3])
def test_rows_when_pushed_with_updates_then_are_looked_up_and_fetched_as_their_sum(serve, parts):
    serving = serve(LAYOUT, count=parts, rule=ADD)
    worker, out, expected = serving.worker(), LAYOUT.zeros(), 0
    for step in range(1, 6):
        contribution, totals = contribution_of(parts, step)
        # A step without rows is one, too.
        worker.push_pull(LAYOUT.zeros() + 1, out, step=2 * step - 1, contribution=contribution)
        worker.push_pull(LAYOUT.zeros() + 1, out, step=2 * step)
        expected = [total + more for total, more in zip(expected or [0] * 3, totals, strict=True)]
    assert (out == 10).all()
    for found, own, total in zip(rows_of(worker, parts), serving.control().fetch(SENT).tables, expected, strict=True):
        np.testing.assert_array_equal(found, -total)
        np.testing.assert_array_equal(own[ROWS], -total)


def test_servers_killed_while_workers_push_rows_then_every_row_counts_exactly_once(serve):
    parts, steps = 2, 40
    serving = serve(LAYOUT, count=parts, rule=ADD, num_partitions=2, snapshot_updates=7)
    errors = []

    def push(partition):
        try:
            worker, out, step = serving.worker(partition), LAYOUT.zeros(), 0
            while step < steps:
                try:
                    contribution, _ = contribution_of(parts, 1000 * partition + step)
                    worker.push_pull(LAYOUT.zeros() + 1, out, step=step + 1, contribution=contribution)
                    rows_of(worker, parts)
                    step += 1
                except PositionLost as lost:
                    step = lost.step
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=push, args=(partition,), daemon=True) for partition in range(2)]
    for thread in threads:
        thread.start()
    for number in range(3):
        process = serving.processes[number % parts]
        until(lambda number=number: serving.control().statistics()["updates"] >= 8 * (number + 1), "pushes")
        before = process.restarts
        os.kill(process.process_id, signal.SIGKILL)
        until(lambda process=process, before=before: process.restarts > before, "a restart")
    for thread in threads:
        thread.join(120)
    assert not errors and not any(thread.is_alive() for thread in threads)
    fetched = serving.control().fetch(SENT)
    assert (fetched.values == 2 * steps).all()
    totals = [contribution_of(parts, 1000 * partition + step)[1] for partition in range(2) for step in range(steps)]
    for table, own in enumerate(fetched.tables):
        np.testing.assert_array_equal(own[ROWS], -np.sum([one[table] for one in totals], axis=0))


def test_rows_when_a_push_is_stale_then_count_as_its_weights_do(serve):
    serving = serve(LAYOUT, rule=ADD, num_partitions=2, divide_by_staleness=True)
    workers, outs, totals = [serving.worker(partition) for partition in range(2)], [LAYOUT.zeros(), LAYOUT.zeros()], []
    for worker, out in zip(workers, outs, strict=True):
        worker.pull(out)
    for number, (worker, out) in enumerate(zip(workers, outs, strict=True)):
        contribution, total = contribution_of(1, number)
        totals.append(total)
        worker.push_pull(LAYOUT.zeros() + 1, out, step=1, contribution=contribution)
    # The second one has not seen the first.
    assert (outs[1] == 1.5).all()
    for found, fresh, stale in zip(rows_of(workers[0], 1), *totals, strict=True):
        np.testing.assert_array_equal(found, -(fresh + stale / 2))


def test_rows_when_one_is_not_finite_then_no_server_applies_any_part_of_the_push(serve):
    parts = 3
    serving = serve(LAYOUT, count=parts, rule=ADD)
    worker, out = serving.worker(), LAYOUT.zeros()
    contribution, _ = contribution_of(parts, 1)
    contribution.gradients[0][0, 0] = np.nan
    reply = worker.push_pull(LAYOUT.zeros() + 1, out, step=1, contribution=contribution)
    assert reply.refused and not out.any()
    assert not any(rows.any() for rows in rows_of(worker, parts))


def test_tables_when_they_have_a_path_then_are_written_there_part_by_part_and_left_alone_meanwhile(serve, tmp_path):
    parts = 2
    serving = serve(LAYOUT, count=parts, rule=ADD)
    worker, control = serving.worker(), serving.control()
    places = TablePlaces(paths=[str(tmp_path / "tables"), None, None], fit_name="fit")
    control.require_folders(places)
    assert os.listdir(tmp_path / "tables") == []
    contribution, totals = contribution_of(parts, 4)
    worker.push_pull(LAYOUT.zeros(), LAYOUT.zeros(), step=1, contribution=contribution)
    control.fetch(TablesWanted(places=places.of("now"), action=LEFT))
    assert os.listdir(tmp_path / "tables") == []
    kept = control.keep(TablesWanted(places=places.of("1"), action=WRITTEN))
    assert sorted(os.listdir(tmp_path / "tables")) == [f"fit.1.0.embeddings.{part}-of-2.npy" for part in range(2)]
    stored = StoredTable.from_array(kept.fetched.tables[0][ROWS])
    np.testing.assert_array_equal(stored.opened().part(), -totals[0])
    np.testing.assert_array_equal(kept.fetched.tables[1][ROWS], -totals[1])
    assert kept.ledgers == ({0: (1, 0, 0)}, {0: (1, 0, 0)}) and kept.are_finite


def test_tables_when_their_folder_cannot_be_written_to_then_it_is_an_error_and_the_server_goes_on(serve, tmp_path):
    (tmp_path / "file").write_text("no folder")
    serving = serve(LAYOUT, rule=ADD)
    control, places = serving.control(), TablePlaces(paths=[str(tmp_path / "file" / "t"), None, None], fit_name="fit")
    with pytest.raises(CheckpointError, match=r"ShardedEmbedding\(path=.*expected a folder that every worker"):
        control.require_folders(places)
    with pytest.raises(CheckpointError, match="expected a folder"):
        control.keep(TablesWanted(places=places.of("1"), action=WRITTEN))
    assert control.statistics()["updates"] == 0
    serving.worker().push_pull(LAYOUT.zeros() + 1, LAYOUT.zeros(), step=1)
    assert control.statistics()["updates"] == 1


# One row of the first stack, whose rows have 23 + 8 numbers, and none of the second.
COUNTS = np.array([1, 0], "<u4").tobytes()
WRONG = {
    "counts that are more than was announced": (np.array([2**31, 0], "<u4").tobytes() + bytes(4), "bytes of rows"),
    "too short": (bytes(4), "Expected rows of 2 stacks"),
    "a row that there is not": (COUNTS + np.array([31], "<u4").tobytes(), "Expected numbers of rows of part 0"),
    "rows in no order": (
        np.array([2, 0], "<u4").tobytes() + np.array([5, 4], "<u4").tobytes(),
        "Expected numbers of rows of part 0",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_lookup_that_is_not_legal_then_is_refused_and_others_go_on(serve, case):
    serving = serve(LAYOUT, rule=ADD)
    payload, expected = WRONG[case]
    sock = serving.registered(attempt=5)
    header = RequestHeader(kind=RequestKind.LOOKUP, attempt=5, payload_bytes=len(payload))
    sock.sendall(header.to_bytes() + payload)
    reply = decode_header(receive(sock, HEADER_BYTES))
    assert reply.status is Status.ERROR and expected in decode_text(receive(sock, TEXT_BYTES))
    assert len(rows_of(serving.worker(attempt=6), 1)) == 3


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"places": [], "action": "left"}', b'{"places": [null], "action": 1}'])
def test_request_for_tables_that_is_not_legal_then_is_a_protocol_error(data):
    with pytest.raises(ProtocolError, match="request for tables|places of 3 tables"):
        TablesWanted.from_bytes(data, SPECS)


def test_request_for_tables_when_it_travels_then_is_the_same():
    places = TablePlaces(paths=["/tables", None, None], fit_name="fit").of("1")
    wanted = TablesWanted(places=places, action=MARKED)
    assert TablesWanted.from_bytes(wanted.to_bytes(), SPECS) == wanted
