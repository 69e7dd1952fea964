"""Applications that tests submit to a cluster of their own by ``spark-submit``, as users do."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from spark_daemons import Daemons, end_with_children, end_with_parent

ROOT = Path(__file__).resolve().parents[2]
# The newest Java that a release of Spark runs on.
MAXIMUM_JAVA = {"3.5": 17}


def find_java():
    """Returns the folder of a Java that runs the Spark that is installed."""
    import pyspark

    from elephant.cluster.local import ensure_java

    return ensure_java(maximum=MAXIMUM_JAVA.get(".".join(pyspark.__version__.split(".")[:2]))).path


def spark_environment(spark, java, folder, variables):
    """Returns the environment of a cluster's processes, with nothing of a cluster that the machine may be set up for.

    Args:
        spark: The folder of Spark (``SPARK_HOME``).
        java: The folder of Java (``JAVA_HOME``).
        folder: Where temporary files go; has folders ``local`` and ``tmp``.
        variables: More of it.
    """
    own = ("SPARK_", "PYSPARK_", "HADOOP_", "YARN_", "HDFS_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return {
        **kept,
        "JAVA_HOME": str(java),
        "SPARK_HOME": str(spark),
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TMPDIR": str(folder / "tmp"),
        **variables,
    }


def properties(settings):
    """Returns settings as a file of properties has them."""
    return "".join(f"{name} {value}\n" for name, value in settings.items())


class SparkApplications(Daemons):
    """Base of a cluster of tests that takes applications.

    Attributes:
        spark: The folder of Spark.
        folder: Where everything of the cluster lies; applications run in it.
    """

    @property
    def environment(self):
        """The environment of an application: ``spark-submit`` and sessions started with it use the cluster."""
        raise NotImplementedError

    def submit(self, script, *arguments, timeout_s=300.0, **options):
        """Runs ``spark-submit`` to its end; returns a `subprocess.CompletedProcess` with text of both outputs.

        Args:
            script: The application.
            arguments: Of the application.
            timeout_s: After which it, and all that it started, is killed.
            options: Of `started`.

        Raises:
            subprocess.TimeoutExpired: It has not ended in time.
        """
        with self.started(script, *arguments, **options) as process:
            out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    @contextlib.contextmanager
    def started(self, script, *arguments, options=(), prefix=(), variables=None):
        """Starts ``spark-submit``; what is left of it when the block ends is killed.

        Args:
            script: The application.
            arguments: Of the application.
            options: Of ``spark-submit``, such as ``("--conf", "spark.task.cpus=1")``.
            prefix: What stands before the command.
            variables: More of its environment.
        """
        process = subprocess.Popen(
            [*prefix, str(self.spark / "bin" / "spark-submit"), *options, str(script), *map(str, arguments)],
            env={**self.environment, **(variables or {})},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=end_with_parent,
        )
        try:
            yield process
        finally:
            end_with_children([process])
            for pipe in (process.stdout, process.stderr):
                pipe.close()
