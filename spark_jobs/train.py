"""Train a Keras model on Spark executors, as a job for ``spark-submit``.

::

    spark-submit spark_jobs/train.py --data table.parquet --model model.keras --output fitted --num-workers 2

The last line on standard output is the history as JSON.
``--help`` lists the arguments, README.md the exit codes.
"""

import sys

from elephant.jobs.submission import submit
from elephant.jobs.training import TRAINING

if __name__ == "__main__":
    sys.exit(submit(TRAINING, sys.argv[1:]))
