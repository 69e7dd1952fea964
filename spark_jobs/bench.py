"""Measure what more workers bring to your own model and rows, as a job for ``spark-submit``.

::

    spark-submit --master spark://HOST:7077 --py-files digits_model.py spark_jobs/bench.py \
        --model digits_model:build --data table.parquet --workers 1,2,4

``--help`` lists the arguments, docs/performance.md what is measured. Exits with 0 when every run was measured, and with
1 when one failed.
"""

import sys

from elephant.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
