"""Look whether a fit would work on a cluster, and say what to do where it would not, as a job for ``spark-submit``.

::

    spark-submit --master spark://HOST:7077 spark_jobs/doctor.py --workers 4

``--help`` lists the arguments, docs/doctor.md what is looked at. Exits with 0 when a fit would work, and with 1 when it
would fail.
"""

import sys

from elephant.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))
