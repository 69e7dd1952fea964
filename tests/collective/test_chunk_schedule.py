from elephant.collective.links import ChunkSchedule


def views(*parts):
    return [memoryview(bytearray(part)) for part in parts]


def test_forwarded_pieces_wait_for_those_that_come_in():
    leaving, complete = [], []
    outgoing, incoming = views(b"ab", b"cd", b"ef"), views(b"..", b"..")
    flow = ChunkSchedule(outgoing, incoming, free=1, lag=1, on_leaving=leaving.append, on_arrived=complete.append)
    assert flow.may_send and leaving == []
    assert bytes(flow.next_out()) == b"ab" and leaving == [0]
    flow.sent(1)
    assert bytes(flow.next_out()) == b"b" and flow.may_send and leaving == [0]
    flow.sent(1)
    assert not flow.may_send
    assert not flow.received(1)
    assert not flow.may_send and complete == []
    assert flow.received(1)
    assert flow.may_send and complete == [0]
    flow.next_out()
    flow.sent(2)
    assert flow.received(2)
    assert flow.into is None and not flow.all_sent and not flow.over
    flow.sent(2)
    assert flow.over and complete == [0, 1] and leaving == [0, 1, 2]


def test_a_flow_without_pieces_is_over():
    flow = ChunkSchedule([], [], free=0, lag=0)
    assert flow.over and not flow.may_send
