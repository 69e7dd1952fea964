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
    return results + use_groups(collective, rank)


def use_groups(collective, rank):
    """Messages round a ring, and an alltoall, in a group of the four ranks in another order."""
    group = collective.new_group([3, 1, 0, 2])
    results = []
    for count in (10, 1_000_000):
        group.send([np.full(count, rank, np.float32)], (group.rank + 1) % 4)
        results.append(float(group.recv((group.rank - 1) % 4)[0].mean()))
        parts = [np.full((count, 1), 10.0 * rank + other, np.float32) for other in group.ranks]
        results.append([float(part.mean()) for part in group.alltoall(parts)])
    return results


def exchange_without_end(collective, rank):
    group = collective.new_group([3, 1, 0, 2])
    while True:
        group.alltoall([np.ones((100_000, 1), np.float32)] * 4)


def wait_in_groups(collective, rank):
    """Ranks 0 and 1 reduce in a group without end; 2 waits for a message of 3, and 3 for 2 in another group."""
    first, second = collective.new_group([0, 1]), collective.new_group([3, 2])
    if rank < 2:
        reduce_without_end(first, rank)
    elif rank == 2:
        collective.recv(3)
    else:
        second.barrier()


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
            bytes.fromhex(orders["token"]),
            "run",
            60.0,
            operation_timeout_s=orders["timeout_s"],
            transport=orders["transport"],
        )
    tell("formed")
    # One that begins earlier could fail, and tell another that still forms.
    sys.stdin.readline()
    try:
        with collective:
            result = globals()[orders["scenario"]](collective, rank)
        tell({"error": None, "result": result})
    except Exception as error:
        tell({"error": type(error).__name__, "text": str(error), "at": time.time()})


if __name__ == "__main__":
    main()
