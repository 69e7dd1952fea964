"""Several jobs in one driver, each as its script in ``spark_jobs`` runs it: ``several_jobs.py FILE [--together]``.

The file holds a JSON list of ``[name, words]``. Each of them is an application of its own, or all are one together.
The last line on standard output is, for each of them, its exit code and what it has printed.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from elephant.jobs.inference import EVALUATION, PREDICTION
from elephant.jobs.submission import submit
from elephant.jobs.training import RESUMING, TRAINING

JOBS = {job.name: job for job in (TRAINING, RESUMING, EVALUATION, PREDICTION)}


def run(name, words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = submit(JOBS[name], words)
    return [code, out.getvalue(), err.getvalue()]


@contextlib.contextmanager
def one_session():
    """Keeps the session of the first job for the next ones."""
    stop = SparkSession.stop
    SparkSession.stop = lambda session: None
    try:
        yield
    finally:
        if (session := SparkSession.getActiveSession()) is not None:
            stop(session)


if __name__ == "__main__":
    with one_session() if sys.argv[2:] == ["--together"] else contextlib.nullcontext():
        ended = [run(name, words) for name, words in json.loads(Path(sys.argv[1]).read_text())]
    sys.stdout.write(f"\n{json.dumps(ended)}\n")
