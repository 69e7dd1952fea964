from elephant.collective.flow import Flow


def views(*parts):
    return [memoryview(bytearray(part)) for part in parts]


def test_forwarded_pieces_wait_for_those_that_come_in():
    complete = []
    outgoing, incoming = views(b"ab", b"cd", b"ef"), views(b"..", b"..")
    flow = Flow(outgoing, incoming, free=1, lag=1, on_piece=complete.append)
    assert flow.may_send
    flow.sent(1)
    assert bytes(flow.out) == b"b" and flow.may_send
    flow.sent(1)
    assert not flow.may_send
    flow.received(1)
    assert not flow.may_send and complete == []
    flow.received(1)
    assert flow.may_send and complete == [0]
    flow.sent(2)
    flow.received(2)
    flow.sent(2)
    assert flow.over and complete == [0, 1]


def test_a_flow_without_pieces_is_over():
    assert Flow([], [], free=0, lag=0, on_piece=lambda index: None).over
