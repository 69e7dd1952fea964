"""Hundreds of strangers of eight kinds at each port of a fit: nobody gets in, and nothing changes but their count."""

import os
import threading
import time
from collections import Counter

import keras
import numpy as np
import psutil
import pytest
from counting_model import counted, counting_data, counting_model
from leaks import open_descriptors
from servers import LAYOUT, Serving, until, whole_numbers
from strangers import KINDS, Strangers, listening_addresses

from elephant.net.deadline import Deadline
from elephant.net.frames import Message
from elephant.net.server import Server
from elephant.net.stream import Listener, connect
from elephant.testing import fit_local

TOKEN = b"0123456789abcdef-right"
COUNT = 25 * len(KINDS)


def descriptors_of(process_id):
    return psutil.Process(process_id).num_fds()


def test_server_when_strangers_of_all_kinds_come_then_serves_whom_it_knows_and_holds_no_more_than_it_may():
    served, most = [], 0
    before = len(open_descriptors())

    def answer(stream):
        message = stream.receive(Deadline(20, "a test"))
        served.append(message.kind)
        stream.send(Message(kind="answer"), Deadline(20, "a test"))

    listener = Listener.bind("127.0.0.1", max_pending=16, handshake_timeout_s=1.0)
    with Server(listener, TOKEN, "run", answer) as server:
        with Strangers([server.address], COUNT, threads=2) as strangers:
            while strangers.total < COUNT:
                with connect(server.address, TOKEN, "run", Deadline(20, "a test")) as stream:
                    stream.send(Message(kind="question"), Deadline(20, "a test"))
                    assert stream.receive(Deadline(20, "a test")).kind == "answer"
                most = max(most, len(listener._admissions.descriptors))
        until(lambda: not listener._admissions.descriptors, "the end of the last handshake")
        turned_away = sum(listener.turned_away.values())
        until(lambda: len(open_descriptors()) <= before + 4, "the descriptors of strangers")
    assert served and set(served) == {"question"} and most <= 16
    assert strangers.made == Counter(dict.fromkeys(KINDS, COUNT // len(KINDS)))
    assert turned_away >= COUNT // 2


def test_parameter_server_when_strangers_of_all_kinds_come_then_has_what_was_pushed_and_no_more_descriptors():
    serving = Serving(rule={"name": "add"})
    try:
        process_id, expected = serving.process.process_id, LAYOUT.zeros()
        worker = serving.worker()
        worker.push(LAYOUT.zeros(), step=1)
        before = descriptors_of(process_id)
        with Strangers(serving.addresses, COUNT, threads=2) as strangers:
            step = 1
            while strangers.total < COUNT or step < 4:
                step += 1
                update = whole_numbers(LAYOUT, step)
                worker.push(update, step=step)
                expected += update
        until(lambda: descriptors_of(process_id) <= before, "the descriptors of strangers")
        np.testing.assert_array_equal(serving.control().fetch().values, expected)
        assert serving.process.restarts == 0
    finally:
        serving.close()


class Holding(keras.callbacks.Callback):
    """Keeps the first step until a file is there, so that strangers come while the ranks train."""

    def __init__(self, folder):
        super().__init__()
        self.folder = str(folder)

    def on_train_batch_end(self, batch, logs=None):
        import os

        open(f"{self.folder}/{os.getpid()}", "w").close()
        end = time.monotonic() + 60
        while not os.path.exists(f"{self.folder}/go") and time.monotonic() < end:
            time.sleep(0.01)


@pytest.mark.usefixtures("by_value", "warm_ranks")
def test_fit_when_strangers_of_all_kinds_come_to_each_port_then_has_its_weights_and_no_more_descriptors(tmp_path):
    columns, outcome = counting_data(64), []
    # This process may listen for other tests, such as for a Spark session.
    before, others = len(open_descriptors()), set(listening_addresses([os.getpid()]))

    def attack():
        until(lambda: len(list(tmp_path.iterdir())) == 2, "two ranks that train", 120)
        ranks = [int(path.name) for path in tmp_path.iterdir()]
        addresses = sorted(set(listening_addresses([os.getpid(), *ranks])) - others)
        held = {rank: descriptors_of(rank) for rank in ranks}
        with Strangers(addresses, COUNT) as strangers:
            strangers.wait()
        until(lambda: all(descriptors_of(rank) <= held[rank] for rank in ranks), "the descriptors of strangers")
        outcome.append((len(addresses), strangers.made))

    def attack_and_go():
        try:
            attack()
        finally:
            (tmp_path / "go").touch()

    attacking = threading.Thread(target=attack_and_go, name="test-attack")
    attacking.start()
    history, model = fit_local(
        counting_model(), columns["features"], columns["label"], batch_size=8, epochs=2, callbacks=[Holding(tmp_path)]
    )
    attacking.join(120)
    # Of the channel, and of each rank.
    [(listeners, made)] = outcome
    assert listeners >= 3 and sum(made.values()) == listeners * COUNT
    assert len(history["loss"]) == 2
    np.testing.assert_array_equal(model.get_weights()[0][:, 0], counted(columns, batch_size=16, epochs=2))
    until(lambda: len(open_descriptors()) <= before + 2, "the descriptors of the fit")
