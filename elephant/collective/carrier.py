"""Moving the pieces of a flow: in from one rank and out to another at the same time.

One loop serves both directions, so that a rank which cannot send for the moment goes on
receiving: a ring of ranks that all send first cannot stand still. For long flows a
second thread sends: it copies out, and encodes, while this one copies in and adds.
"""

from __future__ import annotations

from elephant.collective.flow import Flow
from elephant.collective.group import Pair
from elephant.collective.operation import Operation
from elephant.collective.sender import Sender
from elephant.errors import DeadlineExceededError


class Carrier:
    """Runs flows over one pair of connections.

    Args:
        pair: The connections; not owned.
        name: Of the thread.
    """

    def __init__(self, pair: Pair, name: str) -> None:
        self._pair = pair
        self._sender = Sender(pair.target, name)

    def run(self, flow: Flow, operation: Operation, *, threaded: bool) -> None:
        """Sends and receives all pieces of a flow.

        Args:
            flow: The pieces.
            operation: What this rank is in.
            threaded: Whether the thread sends, which costs a tenth of a millisecond to begin with.

        Raises:
            NetworkError: A rank failed, is gone, or did not arrive in time.
        """
        if threaded:
            self._run_with_sender(flow, operation)
        else:
            self._run_alone(flow, operation)

    def close(self) -> None:
        """Joins the thread; ends the connections first, which ends what it is in."""
        self._pair.shut_down()
        self._sender.stop()

    def _run_alone(self, flow: Flow, operation: Operation) -> None:
        pair = self._pair
        while not flow.over:
            sent = pair.send(flow.next_out(), operation) if flow.may_send else None
            if sent:
                flow.sent(sent)
            received = pair.receive(flow.into, operation) if flow.into is not None else 0
            if received:
                flow.received(received)
            if not sent and not received:
                pair.wait(operation, reading=flow.into is not None, writing=sent is not None)

    def _run_with_sender(self, flow: Flow, operation: Operation) -> None:
        pair, sender = self._pair, self._sender
        sender.begin(flow, operation.deadline)
        sending = True
        while sending or flow.into is not None:
            count = pair.receive(flow.into, operation) if flow.into is not None else 0
            if count:
                if flow.received(count):
                    sender.piece_arrived()
            elif sending and sender.done:
                self._finish_sending(operation)
                sending = False
            else:
                reading, descriptor = flow.into is not None, sender.fileno() if sending else None
                pair.wait(operation, reading=reading, writing=False, descriptor=descriptor)

    def _finish_sending(self, operation: Operation) -> None:
        try:
            self._sender.finish()
        except DeadlineExceededError:
            raise self._pair.watch.absence(operation) from None
        except OSError:
            self._pair.watch.reason(self._pair.target_rank, operation)
