"""Predict with a trained model and write a table, as a job for ``spark-submit``.

::

    spark-submit spark_jobs/predict.py --data rows.parquet --model fitted --output predictions

The last line on standard output is the number of rows and where they are as JSON.
``--help`` lists the arguments, README.md the exit codes.
"""

import sys

from elephant.jobs.inference import PREDICTION
from elephant.jobs.submission import submit

if __name__ == "__main__":
    sys.exit(submit(PREDICTION, sys.argv[1:]))
