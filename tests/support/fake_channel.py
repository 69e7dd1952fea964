"""What the workers of a run have told the driver, and the Spark job that they were in, without either."""

from elephant.monitor.events import RankFailure


class Told:
    """A channel that has heard some events already, and turned some connections away."""

    def __init__(self, *events, turned_away=()):
        self.events = list(events)
        self.turned_away = dict(turned_away)
        self.awaited = "nothing"

    def next_event(self, timeout_s):
        return self.events.pop(0) if self.events else None


class Ended:
    """A Spark job that is over."""

    running = False

    def __init__(self, error):
        self.error = error


def failed(rank, kind, message="said"):
    return RankFailure(rank=rank, host=f"h{rank}", kind=kind, message=message)
