"""The channel between ranks and driver: events arrive whole, silence is noticed, dismissal ends a rank."""

import functools
import secrets
import socket
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from leaks import no_descriptor_free
from tables import every_case

import elephant.monitor.channel
from elephant.checkpoint.state import FitState
from elephant.config import Timeouts
from elephant.data.schema import RowSpec, TensorSpec
from elephant.errors import AuthenticationError, ClusterError, NetworkError, PeerLostError, ProtocolError
from elephant.monitor.channel import Channel, ChannelClient
from elephant.monitor.events import (
    CallbacksDone,
    CallbacksDue,
    EpochEnded,
    EpochPart,
    Finished,
    RankFailure,
    RankGone,
    RankSilent,
    Started,
    StateArrays,
    StateSaved,
    StepEnded,
    TrainingFinished,
    from_message,
    to_message,
)
from elephant.net import stream, tls
from elephant.net.deadline import Deadline
from elephant.net.frames import Message
from elephant.net.stream import connect
from elephant.net.tls import new_token

TOKEN = secrets.token_bytes(32)


@pytest.fixture
def channel():
    with Channel(bind_host="127.0.0.1", token=TOKEN, run_id="run", timeouts=Timeouts(heartbeat_s=2.0)) as opened:
        yield opened
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("elephant")]


def client_of(channel, rank=0, token=TOKEN, **options):
    timeouts = options.pop("timeouts", Timeouts(connect_s=5, heartbeat_s=2.0))
    address = ("127.0.0.1", channel.port)
    return ChannelClient(address, token=token, run_id="run", rank=rank, timeouts=timeouts, **options)


EVENTS = [
    Started(rank=1, host="h", device="CPU", threads=2, training_rows=3, validation_rows=4),
    StepEnded(rank=0, epoch=1, step=2, steps=3, logs={"loss": float("inf")}),
    EpochEnded(rank=0, epoch=1, logs={"loss": 0.5}),
    RankFailure(rank=2, host="h", kind="ValueError", message="no", traceback="File", log_tail="last"),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_event_when_sent_as_a_frame_then_is_the_same(event):
    assert from_message(to_message(event)) == event


def test_message_when_it_is_no_event_then_is_refused():
    with pytest.raises(ProtocolError, match="expected one of the events"):
        from_message(Message(kind="Unknown"))
    with pytest.raises(ProtocolError, match="expected the fields of EpochEnded"):
        from_message(Message(kind="EpochEnded", fields={"rank": 0, "other": 1}))


@every_case(
    ("sent", "field", "value", "said"),
    [
        (EVENTS[0], "rank", "1", "with rank as int of zero or more. Received: '1'"),
        (EVENTS[0], "training_rows", -1, "with training_rows as int of zero or more. Received: -1"),
        (EVENTS[0], "threads", True, "with threads as int"),
        (EVENTS[0], "devices", "0,1", r"with devices as list\[str\]"),
        (EVENTS[1], "step", 2**63, "with step as int"),
        (EVENTS[1], "logs", {"loss": "low"}, "with logs as .*Mapping"),
        (EVENTS[3], "message", None, "with message as str. Received: None"),
    ],
)
def test_message_when_a_field_is_of_another_type_or_range_then_is_refused(sent, field, value, said):
    message = to_message(sent)
    with pytest.raises(ProtocolError, match=f"expected {message.kind} {said}"):
        from_message(Message(kind=message.kind, fields={**message.fields, field: value}))


def test_message_when_its_arrays_are_not_those_that_it_names_then_is_refused():
    kept = StateSaved(rank=0, epochs=1, history={}, facts={}, names=["a", "b"], arrays=(np.zeros(1),))
    part = EpochPart(rank=0, epoch=0, rows=1, val_rows=0, steps=1, wait_s=0.0, logs={})
    for event in (kept, part):
        with pytest.raises(ProtocolError, match=f"expected {type(event).__name__} with 2 arrays"):
            from_message(to_message(event))


def test_state_when_it_is_large_then_comes_in_parts_and_whole_before_what_a_rank_tells_last(channel):
    shapes = [(700, 1000), (2,), (300, 2000), ()]
    arrays = {f"model/{place}": np.full(shape, place, "float64") for place, shape in enumerate(shapes)}
    with client_of(channel) as client:
        client.keep(FitState(epochs=2, step=7, arrays=arrays, facts={"known": 1}))
        client.result([np.ones(1)], RowSpec(0, (TensorSpec((1,), "float32"),)))
        assert client.is_free
    saved, *parts = iter(functools.partial(channel.next_event, 5.0), Finished(rank=0))
    assert (saved.epochs, saved.step, saved.facts, saved.names) == (2, 7, {"known": 1}, [*arrays])
    parts, last = parts[:-1], parts[-1]
    assert isinstance(last, TrainingFinished) and all(isinstance(part, StateArrays) for part in parts)
    pieces = [piece for part in parts for piece in part.arrays]
    # None is so long that other news would wait for it.
    assert len(parts) > 2 and max(piece.nbytes for piece in pieces) <= 4 << 20
    assert saved.joined(pieces[:-1]) is None
    for whole, array in zip(saved.joined(pieces), arrays.values(), strict=True):
        np.testing.assert_array_equal(whole, array)


def test_channel_when_keys_are_worn_then_states_and_answers_come_whole_over_new_connections(monkeypatch):
    """With a limit of one byte, before every event: a rank sends, beats and is answered meanwhile."""
    dialled, dial, token, epochs = [], stream.dial, new_token(encryption=True), 5
    monkeypatch.setattr(tls, "RENEW_BYTES", 1)
    monkeypatch.setattr(stream, "dial", lambda *args, **options: dialled.append(args) or dial(*args, **options))
    timeouts = Timeouts(connect_s=5, heartbeat_s=1.0)
    values = np.random.default_rng(0).normal(size=(epochs, 400_000))
    due = CallbacksDue(
        rank=0, epoch=0, steps=1, logs={}, stopped=False, learning_rate=None, iterations=0, rows={}, row_shapes={}
    )
    answered = threading.Event()
    with Channel(bind_host="127.0.0.1", token=token, run_id="run", timeouts=timeouts) as channel:

        def told():
            with client_of(channel, token=token, timeouts=timeouts) as client:
                client.send(replace(EVENTS[0], rank=0))
                for epoch in range(epochs):
                    client.keep(FitState(epochs=epoch, arrays={"model/0": values[epoch]}))
                    client.send(replace(due, epoch=epoch, arrays=[values[epoch]]))
                    done = client.await_callbacks(10.0)
                    np.testing.assert_array_equal(done.arrays[0], values[epoch] + 1)
                    client.epoch(epoch, {"loss": float(epoch)})
                answered.set()

        telling = threading.Thread(target=told)
        telling.start()
        events = []
        while not events or not isinstance(events[-1], Finished):
            events.append(channel.next_event(10.0))
            assert events[-1] is not None, events
            if isinstance(events[-1], CallbacksDue):
                channel.answer(CallbacksDone(rank=0, stop=False, logs={}, arrays=[events[-1].arrays[0] + 1]))
        telling.join(20)
    assert answered.is_set()
    assert [event.epoch for event in events if isinstance(event, EpochEnded)] == [*range(epochs)]
    pieces = [piece for event in events if isinstance(event, StateArrays) for piece in event.arrays]
    np.testing.assert_array_equal(np.concatenate(pieces), values.reshape(-1))
    # No connection that went on over another one was taken for a rank that is lost.
    kinds = {type(event).__name__ for event in events}
    assert kinds == {"Started", "StateSaved", "StateArrays", "CallbacksDue", "EpochEnded", "Finished"}
    assert len(dialled) > epochs


def test_state_when_the_driver_has_its_frozen_weights_then_comes_without_them_and_with_those_that_have_changed(channel):
    base = {f"model/{place}": np.full(300_000, place, "float32") for place in range(2)}
    names = []
    with client_of(channel) as client:
        for epochs in (1, 2):
            state = FitState(epochs=epochs, arrays={**base, "model/head": np.ones(3)}, facts={"frozen": [*base]})
            client.keep(state)
        base["model/1"] = base["model/1"] + 1
        client.keep(replace(state, arrays=base))
    events = list(iter(functools.partial(channel.next_event, 5.0), Finished(rank=0)))
    names = [event.names for event in events if isinstance(event, StateSaved)]
    assert names == [["model/0", "model/1", "model/head"], ["model/head"], ["model/1"]]
    sent = sum(piece.nbytes for event in events if isinstance(event, StateArrays) for piece in event.arrays)
    assert sent == 3 * 300_000 * 4 + 2 * 3 * 8


def test_rank_when_it_waits_for_the_receipt_of_a_state_then_takes_none_of_another(channel):
    with client_of(channel) as client:
        client.send(Started(rank=0, host="h", device="CPU", threads=1, training_rows=1, validation_rows=0))
        assert isinstance(channel.next_event(5.0), Started)
        client.keep(FitState(epochs=1, step=4))
        channel.confirm_state(1, 3)
        assert not client.await_receipt(0.3)
        channel.confirm_state(1, 4)
        assert client.await_receipt(20.0)
        channel.ask_for_state()
        deadline = time.monotonic() + 20
        while not client.state_wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client.state_wanted


def test_channel_when_a_rank_sends_what_is_no_event_then_its_connection_ends_and_it_is_that_rank_s_failure(channel):
    deadline = Deadline(10, "talking to the driver")
    with connect(("127.0.0.1", channel.port), TOKEN, "run", deadline) as stream:
        stream.send(to_message(StepEnded(rank=1, epoch=0, step=1, steps=2, logs={})), deadline)
        stream.send(
            Message(kind="StepEnded", fields={"rank": 1, "epoch": 0, "step": "2", "steps": 2, "logs": {}}), deadline
        )
        assert isinstance(channel.next_event(5.0), StepEnded)
        failed = channel.next_event(5.0)
        assert (failed.rank, failed.kind) == (1, "elephant.ProtocolError") and "step as int" in failed.message
        with pytest.raises(NetworkError):
            stream.receive(deadline)


def test_channel_when_a_stranger_comes_then_counts_it(channel):
    with pytest.raises(AuthenticationError):
        client_of(channel, token=secrets.token_bytes(32))
    deadline = time.monotonic() + 5
    while not channel.turned_away and time.monotonic() < deadline:
        time.sleep(0.01)
    assert channel.turned_away == {"127.0.0.1": 1}


def test_client_when_it_closes_then_the_driver_has_heard_everything(channel):
    variables = [np.arange(200_000, dtype="float32"), np.float32(3.5).reshape(()), np.zeros((2, 0), "int64")]
    with client_of(channel) as client:
        for epoch in range(50):
            client.epoch(epoch, {"loss": epoch / 2})
        client.result(variables, RowSpec(0, (TensorSpec((4, 4), "float32"),)))
    heard = [channel.next_event(0.0) for _ in range(51)]
    assert [event.epoch for event in heard[:50]] == list(range(50))
    assert isinstance(heard[50], TrainingFinished) and heard[50].rows["tensors"][0]["shape"] == [4, 4]
    for received, sent in zip(heard[50].arrays, variables, strict=True):
        assert received.shape == sent.shape
        np.testing.assert_array_equal(received, sent)
    # The one event that comes after the answer.
    assert channel.next_event(5.0) == Finished(rank=0)
    assert channel.next_event(0.0) is None


def test_client_when_it_closes_after_a_failure_then_its_rank_has_not_finished(channel):
    # An asynchronous fit whose other workers are done would end without the attempt that takes its place.
    failure = RankFailure(rank=1, host="a", kind="elephant.ProcessEnded", message="its process was killed (signal 9)")
    with client_of(channel, rank=1) as client:
        client.send(failure)
    with client_of(channel) as client:
        client.epoch(0, {"loss": 1.0})
    heard = [channel.next_event(5.0) for _ in range(3)]
    assert [type(event).__name__ for event in heard] == ["RankFailure", "EpochEnded", "Finished"]
    assert heard[2].rank == 0 and channel.next_event(0.2) is None


def test_client_when_it_is_silent_then_the_driver_notices_but_not_when_it_beats(channel):
    with client_of(channel, rank=1) as beating:
        frozen = client_of(channel, rank=2, timeouts=Timeouts(connect_s=5, heartbeat_s=1000.0))
        frozen.epoch(0, {})
        assert isinstance(channel.next_event(5.0), EpochEnded)
        silent = channel.next_event(10.0)
        assert isinstance(silent, RankSilent) and silent.rank == 2
        beating.epoch(0, {})
        assert channel.next_event(5.0).rank == 1
        frozen.__exit__(RuntimeError, None, None)


def test_client_when_it_vanishes_then_the_driver_notices_but_not_when_it_has_said_why(channel):
    failed = RankFailure(rank=1, host="h", kind="ValueError", message="no")
    with client_of(channel, rank=1) as client:
        client.send(failed)
    assert channel.next_event(5.0) == failed
    vanishing = client_of(channel, rank=2)
    vanishing.epoch(0, {})
    assert isinstance(channel.next_event(5.0), EpochEnded)
    vanishing.__exit__(RuntimeError, None, None)
    assert channel.next_event(5.0) == RankGone(rank=2)
    assert channel.next_event(0.0) is None


def test_client_when_dismissed_or_cut_off_then_is_told_at_once(channel):
    told = threading.Event()
    client = client_of(channel, on_dismissed=told.set)
    client.epoch(0, {})
    assert channel.next_event(5.0) is not None
    began = time.monotonic()
    threading.Timer(0.3, client.__exit__, (RuntimeError, None, None)).start()
    channel.dismiss(timeout_s=60.0)
    assert told.wait(30)
    # It waits for the client's end, and no longer: a busy machine takes long, and not so long.
    assert time.monotonic() - began < 30


def test_client_when_the_driver_is_gone_before_it_connects_then_does_not_try_for_as_long_as_it_might(monkeypatch):
    monkeypatch.setattr(elephant.monitor.channel, "_REFUSED_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    with pytest.raises(PeerLostError, match="listens no more"):
        ChannelClient(address, token=TOKEN, run_id="run", rank=0, timeouts=Timeouts(connect_s=120))


def test_driver_when_many_ranks_let_go_one_after_the_other_then_waits_for_them_all(channel):
    clients = [client_of(channel, rank) for rank in range(5)]
    for client in clients:
        client.epoch(0, {})
        assert channel.next_event(5.0) is not None
    began = time.monotonic()
    for number, client in enumerate(clients):
        threading.Timer(0.4 * (number + 1), client.hang_up).start()
    # All need longer than one may.
    channel.dismiss(timeout_s=1.5)
    assert time.monotonic() - began >= 2.0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_client_when_what_it_hears_cannot_be_taken_then_is_told_as_of_the_end(channel, monkeypatch):
    told = threading.Event()
    client = client_of(channel, on_dismissed=told.set)

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(elephant.monitor.channel, "require", fail)
    with pytest.raises(PeerLostError):
        client.meet("all that there are", num_tasks=1)
    assert told.wait(5)
    client.hang_up()


def test_client_when_the_driver_dies_then_is_told():
    told = threading.Event()
    channel = Channel(bind_host="127.0.0.1", token=TOKEN, run_id="run", timeouts=Timeouts(heartbeat_s=2.0))
    client = client_of(channel, on_dismissed=told.set)
    client.epoch(0, {})
    assert channel.next_event(5.0) is not None
    channel.close()
    assert told.wait(5)
    with pytest.raises(NetworkError):
        client.close()


def test_driver_when_it_has_no_memory_for_what_a_rank_sends_then_is_the_one_that_failed(channel, monkeypatch):
    def fails(message):
        raise MemoryError("Unable to allocate 256. MiB")

    monkeypatch.setattr(elephant.monitor.channel, "from_message", fails)
    # Cut off, the rank learns that nobody hears it any more.
    with pytest.raises(NetworkError), client_of(channel, rank=1) as client:
        client.epoch(0, {"loss": 1.0})
        with pytest.raises(ClusterError, match="the driver failed while it received .*MemoryError: Unable to allocate"):
            channel.next_event(5.0)


def test_driver_when_it_has_no_descriptor_left_for_a_rank_then_says_so_in_seconds(channel):
    with socket.socket() as rank, no_descriptor_free():
        rank.connect(("127.0.0.1", channel.port))
        with pytest.raises(ClusterError, match=r"the driver can hear no more ranks\. .*ulimit -n"):
            channel.next_event(30)


def test_frame_when_it_is_no_event_and_of_no_rank_then_is_the_failure_of_no_rank(channel):
    address = ("127.0.0.1", channel.port)
    with connect(address, token=TOKEN, context="run", deadline=Deadline(5.0, "connecting")) as stream:
        stream.send(Message(kind="Nonsense"), Deadline(5.0, "sending"))
        with pytest.raises(ProtocolError, match="127.0.0.1.*, of no rank: .*expected one of the events"):
            channel.next_event(5.0)


def test_stranger_when_it_does_not_know_the_token_then_is_refused(channel):
    with pytest.raises(AuthenticationError):
        client_of(channel, token=secrets.token_bytes(32))
