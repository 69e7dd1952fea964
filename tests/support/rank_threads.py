"""Ranks as threads of this process, connected as those of a run are."""

import threading

from elephant.collective import form_collective
from elephant.net import Listener

TOKEN = b"0123456789abcdef-right"


def outcomes_of_threads(world_size, function, *, token=TOKEN, **options):
    """Calls ``function(communicator)`` on every rank, each in a thread; returns results and errors by rank.

    ``options`` are those of `form_collective`.
    """
    listeners = [Listener.bind("127.0.0.1") for _ in range(world_size)]
    addresses = [listener.address for listener in listeners]
    outcomes = [None] * world_size

    def live(rank):
        try:
            with form_collective(rank, addresses, listeners[rank], token, "run", 30.0, **options) as communicator:
                outcomes[rank] = function(communicator)
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=live, args=(rank,), name=f"test-rank-{rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    for listener in listeners:
        listener.close()
    return outcomes


def run_threads(world_size, function, *, timeout_s=60.0):
    """Does the same, and raises the first error."""
    outcomes = outcomes_of_threads(world_size, function, operation_timeout_s=timeout_s)
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if errors:
        raise next((error for error in errors if not isinstance(error, ConnectionError)), errors[0])
    return outcomes
