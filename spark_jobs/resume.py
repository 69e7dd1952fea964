"""Go on with a fit that was interrupted, as a job for ``spark-submit``.

::

    spark-submit spark_jobs/resume.py --checkpoint-path hdfs:///checkpoints/digits --trusted

The job beside the checkpoints says what is read, replaced and called; what it runs, and what it replaces, needs
``--trusted``.
The last line on standard output is the history as JSON.
``--help`` lists the arguments, README.md the exit codes.
"""

import sys

from elephant.jobs.submission import submit
from elephant.jobs.training import RESUMING

if __name__ == "__main__":
    sys.exit(submit(RESUMING, sys.argv[1:]))
