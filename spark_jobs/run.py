"""Run a Python file on N workers, connected with each other, as a job for ``spark-submit``.

::

    spark-submit --master spark://HOST:7077 spark_jobs/run.py train_loop.py --num-workers 4 -- --epochs 3

``--help`` lists the options, docs/run.md what the file can do. Exits with 0 when every rank has ended well.
"""

import sys

from elephant.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
