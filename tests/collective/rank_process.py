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


def use_everything(collective, rank):
    """Every operation once, large and small, and what this rank knows of the others."""
    results = [collective.local_rank, collective.local_world_size, collective.crosses_hosts]
    for count in (1000, 1_000_000):
        array = np.full(count, rank + 1.0, np.float32)
        results += [float(collective.allreduce(array, op).mean()) for op in ("sum", "mean", "max")]
        results.append([float(part.mean()) for part in collective.allgather(array[: count - rank])])
        results.append(float(collective.broadcast(array, root=1)[-1]))
        results.append(float(collective.reduce_scatter(array)[-1]))
    return results


def reduce_after_a_rest(collective, rank):
    time.sleep(1.0 if rank == 1 else 0.0)
    return float(collective.allreduce(np.ones(1_000_000, np.float32))[0])


def main():
    orders = json.loads(sys.stdin.readline())
    rank = orders["rank"]
    with Listener.bind(orders["host"]) as listener:
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
            result = globals()[orders["scenario"]](collective, rank)
        tell({"error": None, "result": result})
    except Exception as error:
        tell({"error": type(error).__name__, "text": str(error), "at": time.time()})


if __name__ == "__main__":
    main()
