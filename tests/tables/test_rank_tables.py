"""Ranks that share tables, as threads of this process over loopback."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from elephant.errors import DeadlineExceededError, NetworkError, PeerLostError
from elephant.net import stream, tls
from elephant.net.deadline import Deadline
from elephant.net.frames import Message
from elephant.net.stream import Listener, connect
from elephant.net.tls import new_token
from elephant.tables.part_server import HELLO, PUSH, STEP, tables_context
from elephant.tables.rank_tables import LocalTables, RankTables
from elephant.tables.table import ROWS, TableSpec

TOKEN, RUN = b"t" * 16, "run"
SPECS = [
    TableSpec(num_rows=40, width=3, rule="adagrad", learning_rate=0.1, seed=1),
    TableSpec(num_rows=11, width=2, rule="lazy_adam", learning_rate=0.1, seed=2),
    # Each is of the form of one above, and is stacked with it.
    TableSpec(num_rows=7, width=3, rule="adagrad", learning_rate=0.1, seed=3),
    TableSpec(num_rows=5, width=2, rule="lazy_adam", learning_rate=0.1, seed=4),
]

NONE, NO_ROWS = np.empty(0, np.int64), np.empty((0, 2), np.float32)


def opened(world, wait_s=20.0, specs=SPECS, token=TOKEN):
    ranks = [
        RankTables(
            specs,
            [{} for _ in specs],
            rank=rank,
            world_size=world,
            listener=Listener.bind("127.0.0.1"),
            token=token,
            run_id=RUN,
            wait_s=wait_s,
        )
        for rank in range(world)
    ]
    for tables in ranks:
        tables.connect([one.address for one in ranks])
        tables.share = lambda: 1 / world
    return ranks


def together(ranks, work):
    """Has each rank do its work at the same time; returns what it returned, or raised."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        waiting = [pool.submit(work, tables, rank) for rank, tables in enumerate(ranks)]
        return [one.exception(60) or one.result() for one in waiting]


def steps_of(rank, count=6):
    """Ids and gradients of each table in each step.

    One rank has none in the first steps of the second table, and every other step has no gradients of the last one.
    """
    random = np.random.default_rng(rank)
    for step in range(count):
        yield [
            (ids := random.integers(0, spec.num_rows, 0 if table == 1 and step < 2 and rank else 9),
             random.normal(size=(len(ids), spec.width)).astype(np.float32))
            for table, spec in enumerate(SPECS[: 4 - step % 2])
        ]  # fmt: skip


def trained(tables, rank):
    """Takes the steps: tables are looked up twice in a step, and their gradients come in the other order."""
    for step in steps_of(rank):
        tables.look_up([(table, ids[:4]) for table, (ids, _) in enumerate(step)])
        for table, (ids, _) in enumerate(step):
            tables.look_up([(table, ids[4:])])
        for table, (ids, gradients) in reversed([*enumerate(step)]):
            tables.push([(table, ids[4:], gradients[4:])])
        tables.push([(table, ids[:4], gradients[:4]) for table, (ids, gradients) in enumerate(step)])
    tables.flush()


def ended(tables, rank):
    tables.leave()
    tables.close()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_tables_when_several_ranks_update_them_then_equal_one_process_on_all_rows_and_have_the_same_bits_again(world):
    runs = []
    for _ in range(2):
        ranks = opened(world)
        together(ranks, trained)
        runs.append([ranks[0].whole(table, name) for table, spec in enumerate(SPECS) for name in (ROWS, *spec.slots)])
        assert together(ranks, ended) == [None] * world
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, other)
    each = [LocalTables([spec]) for spec in SPECS]
    for step in zip(*map(steps_of, range(world)), strict=True):
        for table in range(len(step[0])):
            ids, gradients = (np.concatenate([own[table][place] for own in step]) for place in range(2))
            each[table].push([(0, ids, gradients / np.float32(world))])
            each[table].flush()
    expected = [local.whole(0, name) for local, spec in zip(each, SPECS, strict=True) for name in (ROWS, *spec.slots)]
    for found, one in zip(runs[0], expected, strict=True):
        np.testing.assert_allclose(found, one, atol=1e-5)


def test_tables_when_keys_are_worn_then_connections_are_made_again_and_each_gradient_counts_once(monkeypatch):
    """With a limit of one byte, before every request."""
    world, steps, dialled, dial = 3, 12, [], stream.dial
    monkeypatch.setattr(tls, "RENEW_BYTES", 1)
    monkeypatch.setattr(stream, "dial", lambda *args, **options: dialled.append(args) or dial(*args, **options))
    spec = TableSpec(num_rows=40, width=3, rule="sgd", learning_rate=0.5, seed=1)
    ranks = opened(world, specs=[spec], token=new_token(encryption=True))
    random = np.random.default_rng(0)
    ids = random.integers(0, 40, (steps, world, 25))
    gradients = random.normal(size=(steps, world, 25, 3)).astype(np.float32)
    rows = [ranks[0].whole(0, ROWS)]
    for step in range(steps):
        rows.append(rows[-1].copy())
        np.subtract.at(rows[-1], ids[step].reshape(-1), 0.5 * gradients[step].reshape(-1, 3) / world)

    def trained(tables, rank):
        for step in range(steps):
            (found,) = tables.look_up([(0, ids[step, rank])])
            np.testing.assert_allclose(found, rows[step][ids[step, rank]], atol=1e-5)
            tables.push([(0, ids[step, rank], gradients[step, rank])])
            if step % 3 == 2:
                # A push that nobody answers.
                tables.flush()

    assert together(ranks, trained) == [None] * world
    np.testing.assert_allclose(ranks[0].whole(0, ROWS), rows[-1], atol=1e-5)
    assert together(ranks, ended) == [None] * world
    # Each rank, to each other, for each step.
    assert len(dialled) > world * (world - 1) * steps


def test_rows_when_looked_up_out_of_a_step_then_one_rank_waits_for_no_other_and_changes_nothing():
    ranks = opened(2)
    before = ranks[0].whole(0, ROWS)
    ranks[0].share = lambda: None
    for _ in range(3):
        (found,) = ranks[0].look_up([(0, np.array([3, 0, 3]))])
        ranks[0].push([(0, np.array([3, 0, 3]), np.ones((3, 3), np.float32))])
    np.testing.assert_array_equal(found, before[[3, 0, 3]])
    np.testing.assert_array_equal(ranks[1].whole(0, ROWS), before)
    assert together(ranks, ended) == [None, None]


def test_rank_without_rows_when_others_have_some_then_contributes_nothing_and_holds_nobody_up():
    ranks = opened(2)
    ranks[0].share, ranks[1].share = lambda: 1.0, lambda: 0.0
    ids, gradients = np.arange(4), np.ones((4, 3), np.float32)

    def step(tables, rank):
        tables.look_up([(0, ids)])
        tables.push([(0, ids, gradients * (np.nan if rank else 1))])
        tables.flush()

    together(ranks, step)
    local = LocalTables(SPECS)
    local.push([(0, ids, gradients)])
    np.testing.assert_array_equal(ranks[1].whole(0, ROWS), local.whole(0, ROWS))
    together(ranks, ended)


def test_rank_when_another_is_gone_in_a_step_then_has_an_error_in_seconds():
    ranks = opened(2)

    def work(tables, rank):
        tables.push([(0, np.array([1]), np.ones((1, 3), np.float32))])
        if rank:
            tables.close()
            return None
        return tables.look_up([(0, np.array([1, 2]))])

    began = time.monotonic()
    error, _ = together(ranks, work)
    assert isinstance(error, PeerLostError) and ranks[0].error is error and time.monotonic() - began < 10
    ranks[0].close()


def test_rank_when_another_is_silent_then_has_an_error_at_the_deadline():
    ranks = opened(2, wait_s=0.5)
    ranks[0].push([(0, np.array([1]), np.ones((1, 3), np.float32))])
    with pytest.raises((DeadlineExceededError, PeerLostError), match="gradients of tables|rank 1's part"):
        ranks[0].look_up([(0, np.array([1, 2]))])
    for tables in ranks:
        tables.close()


@pytest.mark.parametrize(
    ("kind", "fields", "arrays"),
    [
        ("Nothing", {"round": 1, "tables": []}, ()),
        (HELLO, {"rank": 2}, ()),
        (STEP, {"table": 0, "round": 0}, (np.arange(2), NONE)),
        (STEP, {"round": 0, "tables": []}, (np.arange(0, 4, 2),)),
        (STEP, {"round": 0, "tables": []}, (np.array([1]), NONE)),
        (STEP, {"round": 0, "tables": []}, (np.array([4, 2]), NONE)),
        (STEP, {"round": 0, "tables": []}, (np.array([2, 2]), NONE)),
        (STEP, {"round": 0, "tables": []}, (np.array([48]), NONE)),
        (STEP, {"round": 0, "tables": []}, (NONE, np.array([18]))),
        (STEP, {"round": 0, "tables": []}, (np.array([-2]), NONE)),
        (STEP, {"round": 0, "tables": []}, (np.array([0.5]), NONE)),
        (PUSH, {"round": 5, "tables": [0]}, (np.array([2]), NONE, np.ones((1, 3), np.float32), NO_ROWS)),
        (PUSH, {"round": 1, "tables": [0, 4]}, (np.array([2]), NONE, np.ones((1, 3), np.float32), NO_ROWS)),
        (PUSH, {"round": 1, "tables": [0]}, (np.array([2]), NONE, np.ones((1, 2), np.float32), NO_ROWS)),
        (PUSH, {"round": 1, "tables": [0]}, (np.array([2]), NONE, np.ones((1, 3)), NO_ROWS)),
        (PUSH, {"round": 1, "tables": [1]}, (np.array([2]), NONE, np.ones((1, 3), np.float32), NO_ROWS)),
        (PUSH, {"round": 1, "tables": [0, 1]}, (np.array([2]), NONE, np.ones((1, 3), np.float32), NO_ROWS)),
        ("Read", {"table": 0, "round": 0, "name": "none", "first": 0, "count": 1}, ()),
        ("Read", {"table": 4, "round": 0, "name": ROWS, "first": 0, "count": 1}, ()),
        ("Read", {"table": 0, "round": 0}, ()),
    ],
)
def test_server_when_it_gets_what_no_rank_sends_then_ends_that_connection_and_the_table_stays(kind, fields, arrays):
    ranks = opened(2)
    # The first one waits for the round's other contribution.
    ranks[0].push([(0, np.array([2]), np.ones((1, 3), np.float32))])
    ranks[0].flush()
    before = ranks[0]._server._stack_parts[0].parts[0].arrays[ROWS].copy()
    with connect(ranks[0].address, TOKEN, tables_context(RUN), Deadline(5, "connecting")) as stream:
        stream.send(Message(kind=HELLO, fields={"rank": 1}), Deadline(5, "sending"))
        stream.send(Message(kind=kind, fields=fields, arrays=arrays), Deadline(5, "sending"))
        with pytest.raises(NetworkError):
            stream.receive(Deadline(5, "receiving"))
    np.testing.assert_array_equal(ranks[0]._server._stack_parts[0].parts[0].arrays[ROWS], before)
    for tables in ranks:
        tables.close()


def test_server_when_a_stranger_speaks_then_serves_its_ranks_and_leaves_no_thread():
    before = threading.active_count()
    ranks = opened(2)
    with socket.create_connection(ranks[0].address, 5) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        together(ranks, trained)
    with pytest.raises(NetworkError):
        connect(ranks[0].address, b"x" * 16, tables_context(RUN), Deadline(5, "connecting"))
    assert together(ranks, ended) == [None, None]
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() == before


def test_bytes_when_ids_repeat_then_each_row_travels_once():
    ranks = opened(2)
    ids = np.repeat(np.arange(40), 50)

    def step(tables, rank):
        tables.look_up([(0, ids)])
        tables.push([(0, ids, np.ones((len(ids), 3), np.float32))])
        tables.flush()

    together(ranks, step)
    # Of 20 rows of the other's: ids there, rows back, ids and gradients there; and its own rows for the other.
    assert ranks[0].bytes_sent == 20 * 4 + 20 * 12 + 20 * (4 + 12)
    together(ranks, ended)
