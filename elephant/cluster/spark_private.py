"""Private names of PySpark: all that this package uses stand here, an entry each.

An entry says the version in which its name was last seen, as what, and why no public name does. A test of each entry
(`tests/cluster/test_spark_private.py`) names it where a release of PySpark has changed it. What is behind a Java object
that an entry returns is Spark's own, in Scala, and has no underscore.

PySpark is imported when an entry needs it, not with this module.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from pyspark import RDD, SparkContext
    from pyspark.ml.param import Param, Params
    from pyspark.ml.util import MLWriter
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType


# Sessions, contexts and their JVM.


def context_of(session: SparkSession) -> Any:
    """Returns a classic session's `pyspark.SparkContext`.

    Seen in PySpark 4.3.0 as `SparkSession._sc`; the public `sparkContext` is refused by some platforms.
    """
    return session._sc


def java_context(context: Any) -> Any:
    """Returns the `JavaSparkContext` of a context, whose ``sc()`` is Scala's; None of one that was stopped.

    Seen in PySpark 4.3.0 as `SparkContext._jsc`; executors, their tasks and Hadoop's settings are in no public name.
    """
    return context._jsc


def jvm_of(context: Any) -> Any:
    """Returns the view of a context's JVM, by which Java's classes are named.

    Seen in PySpark 4.3.0 as `SparkContext._jvm`; Hadoop's file systems are in no public name.
    """
    return context._jvm


def active_context() -> SparkContext | None:
    """Returns the context of this process, or None.

    Seen in PySpark 4.3.0 as `SparkContext._active_spark_context`; the public `getOrCreate` would make one.
    """
    from pyspark import SparkContext

    return SparkContext._active_spark_context


def start_gateway() -> None:
    """Connects this process with a JVM, and starts one where there is none yet; there is no context afterwards.

    Seen in PySpark 4.3.0 as `SparkContext._ensure_initialized`; public names know Spark's settings after a start alone.
    """
    from pyspark import SparkContext

    SparkContext._ensure_initialized()


def gateway_process() -> Any:
    """Returns the process of the JVM that PySpark has started, a `subprocess.Popen`; None where it started none.

    Seen in PySpark 4.3.0 as `SparkContext._gateway.proc`; nothing public ends the JVM.
    """
    from pyspark import SparkContext

    return getattr(SparkContext._gateway, "proc", None)


def gateway_of(context: Any) -> Any:
    """Returns the connection of a context with its JVM.

    Seen in PySpark 4.3.0 as `SparkContext._gateway`; nothing public says whether each thread has one of the JVM's.
    """
    return context._gateway


def settings_in_json(session: SparkSession, context: Any) -> str:
    """Returns Spark SQL's settings of a classic session, from PySpark 4.0 on.

    Seen in PySpark 4.3.0 as `RuntimeConfig._jconf`; the public `getAll` asks the JVM for each of them.
    """
    mapper = jvm_of(context).com.fasterxml.jackson.databind.ObjectMapper()
    return str(mapper.writeValueAsString(session.conf._jconf.getAllAsJava()))


def connect_client(session: SparkSession) -> Any:
    """Returns the client of a Spark Connect session, or None.

    Seen in PySpark 4.3.0 as `SparkSession._client`; the public `client` is not in every version.
    """
    return getattr(session, "client", None) or getattr(session, "_client", None)


# Rows.


def query_execution(frame: DataFrame) -> Any:
    """Returns how Spark's optimizer sees a classic frame, in Scala's `QueryExecution`.

    Seen in PySpark 4.3.0 as `DataFrame._jdf`; the public `explain` prints a plan, and has no number of partitions.
    """
    return frame._jdf.queryExecution()


def explained(frame: Any) -> str:
    """Returns the physical plan of a frame of Spark Connect.

    Seen in PySpark 4.3.0 as `DataFrame._explain_string`; the public `explain` prints it.
    """
    return str(frame._explain_string(mode="simple"))


def arrow_batches(frame: Any) -> list[Any]:
    """Returns a frame's rows as `pyarrow.RecordBatch`, in PySpark 3.5.

    Seen in PySpark 3.5.0 as `DataFrame._collect_as_arrow`; the public `toArrow` came with 4.0.
    """
    batches: list[Any] = frame._collect_as_arrow()
    return batches


def parsed_type(text: str) -> DataType:
    """Returns the type, or the schema, that a DDL text such as ``"a int, b array<float>"`` names.

    Seen in PySpark 4.3.0 as `pyspark.sql.types._parse_datatype_string`; public ones are newer than 3.5.
    """
    from pyspark.sql.types import _parse_datatype_string

    return _parse_datatype_string(text)


def parts_of_rdd(rdd: RDD[Any]) -> tuple[Any, Any, Any]:
    """Returns the arguments of a constructor that makes an RDD like another.

    Seen in PySpark 4.3.0 as `RDD._jrdd` and `RDD._jrdd_deserializer`; a subclass is made of these alone.
    """
    return rdd._jrdd, rdd.ctx, rdd._jrdd_deserializer


# Params and saved stages of Spark ML.


def unowned_parent() -> Params:
    """Returns the parent of a param that is declared in a class.

    Seen in PySpark 4.3.0 as `Params._dummy`; Spark's own stages declare theirs with it.
    """
    from pyspark.ml.param import Params

    return Params._dummy()


def set_params(instance: Params, **values: Any) -> None:
    """Sets params by name, each checked and converted, but for None.

    Seen in PySpark 4.3.0 as `Params._set`; the public `set` takes one, by its object.
    """
    instance._set(**values)


def set_param_values(instance: Params) -> Mapping[Param[Any], Any]:
    """Returns the params that were set, in the order in which they were, with their values.

    Seen in PySpark 4.3.0 as `Params._paramMap`; the public `extractParamMap` has the defaults too.
    """
    values: Mapping[Param[Any], Any] = instance._paramMap
    return values


def copy_params(instance: Params, to: Any) -> Any:
    """Copies the params of an instance to another one that has them, and returns it.

    Seen in PySpark 4.3.0 as `Params._copyValues`; Spark's own estimators call it of their models.
    """
    return instance._copyValues(to)


def reset_uid(instance: Params, uid: str) -> None:
    """Gives an instance, and its params, another uid.

    Seen in PySpark 4.3.0 as `Params._resetUid`; the public `uid` would leave the params with the old one.
    """
    instance._resetUid(uid)


def metadata_text(instance: Params, context: Any, extra: Mapping[str, Any], params: Mapping[str, Any]) -> str:
    """Returns the metadata of a stage, in JSON, as Spark's own stages are saved with them.

    Seen in PySpark 4.3.0 as `DefaultParamsWriter._get_metadata_to_save`; the public `saveMetadata` writes them anew.
    """
    from pyspark.ml.util import DefaultParamsWriter

    return DefaultParamsWriter._get_metadata_to_save(instance, context, dict(extra), dict(params))


def clear_for_overwrite(writer: MLWriter, path: str) -> None:
    """Removes what is at a path, as ``overwrite()`` of a writer has it.

    Seen in PySpark 4.3.0 as `MLWriter._handleOverwrite`, which `MLWriter.save` calls: a writer may override it.
    """
    from pyspark.ml.util import MLWriter

    MLWriter._handleOverwrite(writer, path)


def fold_asked_for() -> int | None:
    """Returns the number of the fold, from zero, for which a `CrossValidator` calls ``fitMultiple`` here; else None.

    Seen in PySpark 4.3.0 as `tuning._parallelFitTasks`, which a `CrossValidator` calls with the number in its local
    ``i``; that is told to nobody, and who counts calls cannot know where another validator's begin.
    """
    from pyspark.ml import tuning

    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not tuning._parallelFitTasks.__code__:
        frame = frame.f_back
    names = {} if frame is None or frame.f_back is None else frame.f_back.f_locals
    number = names.get("i") if isinstance(names.get("self"), tuning.CrossValidator) else None
    return number if isinstance(number, int) else None


# Scala's values.


def pair_of(entry: Any) -> tuple[Any, Any]:
    """Returns both parts of a Scala `Tuple2`.

    Seen in PySpark 4.3.0 as `Tuple2._1` and `Tuple2._2` of Scala, which are public there.
    """
    return entry._1(), entry._2()
