"""Each private name of PySpark that the package uses is there, in the installed version, as its entry expects it.

A test that fails is named like its entry in `elephant/cluster/spark_private.py`. No JVM runs: what an object gets from
one is looked up in the code that sets it. The tests of `tests/spark` use all entries on real sessions.
"""

import contextlib
import importlib
import inspect
import json
import re
import subprocess
from types import SimpleNamespace

import pyspark
import pytest
from pyspark import RDD, SparkContext
from pyspark.ml import tuning
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.util import MLWriter
from pyspark.sql import types

import elephant.cluster.spark_private as private
from elephant.cluster.row_source import SINCE_4

CHECKS = {}
CLASSIC = "pyspark.sql.classic.dataframe" if SINCE_4 else "pyspark.sql.dataframe"


def check(function):
    CHECKS[function.__name__] = function
    return function


def sets(kind, name):
    """Returns whether a class' constructor, or what it calls, sets an attribute."""
    return re.search(rf"self\.{name}(: [^=]+)? = ", inspect.getsource(kind)) is not None


class Stage(Params):
    size = Param(Params._dummy(), "size", "", typeConverter=TypeConverters.toInt)


@check
def context_of():
    assert sets(pyspark.sql.SparkSession, "_sc")
    assert private.context_of(SimpleNamespace(_sc="context")) == "context"


@check
def java_context():
    assert sets(SparkContext, "_jsc")
    assert private.java_context(SimpleNamespace(_jsc=None)) is None


@check
def jvm_of():
    assert "_jvm" in vars(SparkContext)
    assert private.jvm_of(SimpleNamespace(_jvm="jvm")) == "jvm"


@check
def active_context():
    assert "_active_spark_context" in vars(SparkContext)
    assert private.active_context() is SparkContext._active_spark_context


@check
def start_gateway():
    parameters = inspect.signature(SparkContext._ensure_initialized).parameters.values()
    assert all(one.default is None for one in parameters)


@check
def gateway_process():
    from pyspark import java_gateway

    assert "_gateway" in vars(SparkContext) and "gateway.proc = proc" in inspect.getsource(java_gateway.launch_gateway)
    found = private.gateway_process()
    assert found is None or isinstance(found, subprocess.Popen)


@check
def gateway_of():
    from py4j.clientserver import ClientServer

    gateway = ClientServer.__new__(ClientServer)
    assert "_gateway" in vars(SparkContext) and private.gateway_of(SimpleNamespace(_gateway=gateway)) is gateway


@check
def settings_in_json():
    classic = importlib.import_module("pyspark.sql.conf")
    assert sets(getattr(classic, "RuntimeConfig", None) or classic.RuntimeConf, "_jconf")
    mapper = SimpleNamespace(writeValueAsString=json.dumps)
    jvm = SimpleNamespace(
        com=SimpleNamespace(
            fasterxml=SimpleNamespace(jackson=SimpleNamespace(databind=SimpleNamespace(ObjectMapper=lambda: mapper)))
        )
    )
    session = SimpleNamespace(conf=SimpleNamespace(_jconf=SimpleNamespace(getAllAsJava=lambda: {"spark.a": "b"})))
    assert json.loads(private.settings_in_json(session, SimpleNamespace(_jvm=jvm))) == {"spark.a": "b"}


@check
def connect_client():
    # TensorFlow brings grpc, and not the rest of what a client needs.
    pytest.importorskip("grpc_status")
    from pyspark.sql.connect.session import SparkSession

    assert isinstance(getattr(SparkSession, "client", None), property) or sets(SparkSession, "_client")
    assert private.connect_client(SimpleNamespace(_client="client")) == "client"


@check
def query_execution():
    frame = importlib.import_module(CLASSIC).DataFrame
    assert sets(frame, "_jdf") and "_jdf.queryExecution()" in inspect.getsource(frame)


@check
def explained():
    pytest.importorskip("grpc_status")
    from pyspark.sql.connect.dataframe import DataFrame

    assert "mode" in inspect.signature(DataFrame._explain_string).parameters


@check
def arrow_batches():
    if not SINCE_4:
        from pyspark.sql import DataFrame

        assert callable(DataFrame._collect_as_arrow)


@check
def parsed_type():
    # The text itself is parsed in the JVM.
    assert list(inspect.signature(types._parse_datatype_string).parameters) == ["s"]


@check
def parts_of_rdd():
    java, context = SimpleNamespace(id=lambda: 1), SimpleNamespace()
    assert private.parts_of_rdd(RDD(java, context, "deserializer")) == (java, context, "deserializer")


@check
def unowned_parent():
    assert private.unowned_parent().uid == "undefined"


@check
def set_params():
    stage = Stage()
    private.set_params(stage, size=3.0)
    assert stage.getOrDefault("size") == 3
    with pytest.raises(TypeError, match="size"):
        private.set_params(stage, size="many")


@check
def set_param_values():
    stage = Stage()
    stage._setDefault(size=1)
    assert private.set_param_values(stage) == {}
    stage.set(stage.size, 2)
    assert private.set_param_values(stage) == {stage.size: 2}


@check
def copy_params():
    stage, other = Stage(), Stage()
    stage.set(stage.size, 2)
    assert private.copy_params(stage, other) is other and other.getOrDefault("size") == 2


@check
def reset_uid():
    stage = Stage()
    stage.set(stage.size, 2)
    private.reset_uid(stage, "stage_1")
    assert stage.uid == stage.size.parent == "stage_1" and stage.getOrDefault("size") == 2


@check
def metadata_text():
    from pyspark.ml.util import DefaultParamsWriter

    assert list(inspect.signature(DefaultParamsWriter._get_metadata_to_save).parameters) == [
        "instance", "sc", "extraMetadata", "paramMap",
    ]  # fmt: skip
    saved = json.loads(private.metadata_text(Stage(), SimpleNamespace(version="4.3.0"), {"more": 1}, {"size": 2}))
    assert (saved["paramMap"], saved["more"], saved["sparkVersion"]) == ({"size": 2}, 1, "4.3.0")


@check
def clear_for_overwrite():
    assert list(inspect.signature(MLWriter._handleOverwrite).parameters) == ["self", "path"]
    # A writer that overrides it is asked by it.
    assert "self._handleOverwrite(path)" in inspect.getsource(MLWriter.save)


@check
def fold_asked_for():
    told, rows = [], SimpleNamespace(sparkSession=None, cache=lambda: None, unpersist=lambda: None)
    model = SimpleNamespace(transform=lambda *args: None)

    class Validator(tuning.CrossValidator):
        def _kFold(self, dataset):
            return [(rows, rows)] * self.getNumFolds()

    class Fits(Params):
        fails_in = -1

        def fitMultiple(self, dataset, params):
            told.append(private.fold_asked_for())
            if told[-1] == self.fails_in:
                raise ValueError("a fit")
            return iter([(0, model)])

        def fit(self, *args):
            # The last fit, here of a stage that asks for fits itself.
            list(tuning._parallelFitTasks(self, rows, None, None, [{}], False))
            raise ValueError("the last fit")

    fits = Fits()
    metric = SimpleNamespace(evaluate=lambda scored: 1.0, isLargerBetter=lambda: True)
    validator = Validator(estimator=fits, estimatorParamMaps=[{}], evaluator=metric, numFolds=3)
    with pytest.MonkeyPatch.context() as patch:
        # Functions as they are, and since Spark 4 from a session the function that takes them.
        patch.setattr(tuning, "inheritable_thread_target", lambda given: given or (lambda task: task))
        patch.setattr(tuning, "_cache_spark_dataset", contextlib.nullcontext, raising=False)
        for fits.fails_in in (1, -1):
            with pytest.raises(ValueError, match="fit"):
                validator._fit(rows)
    # One that failed counts for no other, and nothing outside of a fold has a number.
    assert told == [0, 1, 0, 1, 2, None]
    assert fits.fitMultiple(rows, [{}]) and told[-1] is None


@check
def pair_of():
    assert private.pair_of(SimpleNamespace(_1=lambda: "gpu", _2=lambda: 2)) == ("gpu", 2)


@pytest.mark.parametrize("entry", CHECKS)
def test_entry_when_pyspark_is_the_installed_version_then_its_private_name_is_as_expected(entry):
    CHECKS[entry]()


def test_entries_when_they_are_walked_then_each_has_a_check_and_says_where_it_was_seen():
    entries = {name: value for name, value in vars(private).items() if inspect.isfunction(value) and name[0] != "_"}
    assert sorted(CHECKS) == sorted(entries)
    pattern = re.compile(r"Seen in PySpark \d\.\d+\.\d+ as `")
    unseen = [name for name, value in entries.items() if not pattern.search(value.__doc__)]
    assert not unseen, f"expected 'Seen in PySpark VERSION as `NAME`; WHY' in the docstrings of {unseen}"
