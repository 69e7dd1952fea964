"""Elephant trains one Keras 3 model across Apache Spark executors, from a DataFrame or an RDD.

Importing it is light: Spark and Keras are imported when a name that needs them is first used. TensorFlow's start-up
lines are left out then, unless ``TF_CPP_MIN_LOG_LEVEL=0`` asks for all.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elephant import collective
    from elephant.driver.run import distributed, run
    from elephant.modeling.distributed_optimizer import DistributedOptimizer, broadcast_variables
    from elephant.modeling.layers.feature_embeddings import ShardedEmbeddings
    from elephant.modeling.layers.sharded_embedding import ShardedEmbedding
    from elephant.monitor.listeners import FitListener
    from elephant.spark.adapt import adapt
    from elephant.spark.estimator import KerasEstimator
    from elephant.spark.file_formats import Files
    from elephant.spark.model import KerasModel
    from elephant.spark.rdd.mllib import SparkMLlibModel, load_spark_model
    from elephant.spark.rdd.model import SparkModel
    from elephant.spark.tuning.reading_ahead import prepared
    from elephant.spark.tuning.search import search
    from elephant.spark.udf import predict_udf
    from elephant.training.images import decode_images
    from elephant.training.warmup import LearningRateWarmup

__version__ = "0.1.0"

__all__ = [
    "DistributedOptimizer",
    "Files",
    "FitListener",
    "KerasEstimator",
    "KerasModel",
    "LearningRateWarmup",
    "ShardedEmbedding",
    "ShardedEmbeddings",
    "SparkMLlibModel",
    "SparkModel",
    "__version__",
    "adapt",
    "broadcast_variables",
    "collective",
    "decode_images",
    "distributed",
    "load_spark_model",
    "predict_udf",
    "prepared",
    "run",
    "search",
]

_HOME = {
    "DistributedOptimizer": "elephant.modeling.distributed_optimizer",
    "Files": "elephant.spark.file_formats",
    "FitListener": "elephant.monitor.listeners",
    "KerasEstimator": "elephant.spark.estimator",
    "KerasModel": "elephant.spark.model",
    "LearningRateWarmup": "elephant.training.warmup",
    "ShardedEmbedding": "elephant.modeling.layers.sharded_embedding",
    "ShardedEmbeddings": "elephant.modeling.layers.feature_embeddings",
    "SparkMLlibModel": "elephant.spark.rdd.mllib",
    "SparkModel": "elephant.spark.rdd.model",
    "adapt": "elephant.spark.adapt",
    "broadcast_variables": "elephant.modeling.distributed_optimizer",
    "decode_images": "elephant.training.images",
    "distributed": "elephant.driver.run",
    "load_spark_model": "elephant.spark.rdd.mllib",
    "predict_udf": "elephant.spark.udf",
    "prepared": "elephant.spark.tuning.reading_ahead",
    "run": "elephant.driver.run",
    "search": "elephant.spark.tuning.search",
}
_OF_SPARK = ("pyspark", "py4j")


if not TYPE_CHECKING:
    # Type checkers would take any name for one of the package, and completion what is imported above for its own.

    def __getattr__(name: str) -> object:
        import importlib

        if name in _HOME:
            from elephant.monitor.log_stream import quiet_imports

            try:
                with quiet_imports():
                    found = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
                return found
            except ModuleNotFoundError as error:
                from elephant.errors import help_url

                missing = str(error.name).split(".")[0]
                extra = "spark" if missing in _OF_SPARK else missing
                if extra == missing and missing not in importlib.import_module("elephant.backends").BACKENDS:
                    raise
                raise ModuleNotFoundError(
                    f"elephant.{name}: expected {missing} to be installed. Received: {error}. Run pip install "
                    f"'elephant-spark[{extra}]', or pip install 'elephant-spark[local]', which brings Spark, "
                    f"TensorFlow and a Java runtime.\nSee {help_url('no-spark-or-backend-on-the-driver')}",
                    name=error.name,
                ) from None
        if name == "collective":
            return importlib.import_module("elephant.collective")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
