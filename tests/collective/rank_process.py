"""One rank of a fault test: reads its orders from standard input, tells what happened on standard output."""

import json
import sys
import time

import numpy as np

from elephant.collective import form_collective
from elephant.net import Listener


def tell(value):
    print(json.dumps(value), flush=True)


def reduce_without_end(collective, rank):
    array = np.ones(8_000_000, np.float32)
    while True:
        collective.allreduce_(array)
        array[:] = 1


def reduce_different_shapes(collective, rank):
    collective.allreduce_(np.ones(2_000_000 + (rank == 1), np.float32))


def reduce_different_dtypes(collective, rank):
    collective.allreduce_(np.ones(2_000_000, np.float64 if rank == 1 else np.float32))


def call_different_operations(collective, rank):
    array = np.ones(2_000_000, np.float32)
    collective.broadcast_(array) if rank == 1 else collective.allreduce_(array)


def main():
    orders = json.loads(sys.stdin.readline())
    rank = orders["rank"]
    with Listener.bind("127.0.0.1") as listener:
        tell(listener.address)
        addresses = [tuple(address) for address in json.loads(sys.stdin.readline())]
        collective = form_collective(
            rank,
            addresses,
            listener,
            b"0123456789abcdef",
            "run",
            60.0,
            operation_timeout_s=orders["timeout_s"],
            transport=orders["transport"],
        )
    tell("formed")
    try:
        with collective:
            globals()[orders["scenario"]](collective, rank)
        tell({"error": None})
    except Exception as error:
        tell({"error": type(error).__name__, "text": str(error), "at": time.time()})


if __name__ == "__main__":
    main()
