"""Evaluate a trained model on a table, as a job for ``spark-submit``.

::

    spark-submit spark_jobs/evaluate.py --data test.parquet --model fitted

The last line on standard output is the loss and the metrics as JSON.
``--help`` lists the arguments, README.md the exit codes.
"""

import sys

from elephant.jobs.inference import EVALUATION
from elephant.jobs.submission import submit

if __name__ == "__main__":
    sys.exit(submit(EVALUATION, sys.argv[1:]))
