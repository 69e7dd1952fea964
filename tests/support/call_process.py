"""A rank's process that only calls a function: ``RankProcess("call", ..., module="call_process")``."""

import os
import pickle
import sys

from pyspark import cloudpickle

from elephant.rank.__main__ import end, main
from elephant.rank.program import Program
from elephant.task.process import RankProcess


class Call(Program):
    subject = "The function"

    def prepare(self):
        pass

    def start(self, job, block, on_dismissed):
        return pickle.dumps(job())


def calling(function, **options):
    """Returns the process that calls a function, which has all that it waits for."""
    path = os.pathsep.join([os.path.dirname(os.path.abspath(__file__)), *filter(None, sys.path)])
    process = RankProcess("call", {**os.environ, "PYTHONPATH": path}, module="call_process", **options)
    for block in (cloudpickle.dumps(function), b"{}", b""):
        process.send(block)
    return process


if __name__ == "__main__":
    end(main({"call": Call()}))
