"""Errors cross process borders whole, and show their readers nothing of elephant's own code."""

import functools
import pickle
import sys
import traceback
import types
from pathlib import Path

import pytest
from tables import every_case

from elephant import errors
from elephant.driver.coordinator_policy import as_error
from elephant.monitor.events import RankFailure
from elephant.rank import __main__ as program
from elephant.task.process import exit_text
from elephant.task.task import RankProcessError


def test_worker_error_when_pickled_then_keeps_its_data():
    error = errors.WorkerFailure("ValueError: no", rank=3, host="h", traceback="File x", log_tail="last")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.rank, copy.host, copy.traceback, copy.log_tail) == (3, "h", "File x", "last")
    assert str(copy) == str(error)
    assert str(error).startswith("rank 3 on h failed: ValueError: no")


def test_worker_error_when_its_text_is_a_page_then_the_traceback_does_not_end_in_it_again():
    page = "ValueError: in Scale.call()\n\nno attribute 'scal'"
    error = errors.WorkerFailure(page, rank=3, host="h", traceback=f"File x\n    self.scal\nbuiltins.{page}\n")
    assert str(error).count("no attribute") == 1 and str(error).endswith("File x\n    self.scal")
    assert error.traceback.endswith(f"{page}\n")


def test_worker_error_when_a_traceback_or_a_kill_says_more_then_shows_errors_and_the_last_three_lines_of_its_output():
    output = "\n".join(map(str, range(30)))
    for about in ({"summary": "ValueError: no", "traceback": "File x"}, {"summary": exit_text(-9)}):
        error = errors.WorkerFailure(**about, rank=3, host="h", log_tail=output)
        assert str(error).endswith("training process (more in log_tail):\n27\n28\n29") and error.log_tail == output
    # The cause that a library has printed stands above them.
    causes = [f"E0000 blas.cc:{line}] failed to create handle: CUDA_ERROR_OUT_OF_MEMORY" for line in range(11)]
    noise = ["E0000 fft.cc:1] Unable to register cuFFT factory", "I0000 all is well"]
    printed = "\n".join([*causes, *noise, "27", "28", "29"])
    error = errors.WorkerFailure("InternalError: no", rank=3, host="h", traceback="File x", log_tail=printed)
    assert str(error).splitlines()[-12:] == [*causes[2:], "27", "28", "29"]
    crash = errors.WorkerFailure(exit_text(-11), rank=3, host="h", log_tail=output)
    assert str(crash).endswith(f"training process:\n{output}")


GRAPH_ERROR = f"""Graph execution error:

Detected at node compile_loss/mse/sub defined at (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main

  File "{errors.__file__}", line 666, in <module>
    main()

  File "/home/me/train.py", line 3, in call
    return x @ y

  File "/venv/lib/python3.11/site-packages/keras/src/backend/tensorflow/trainer.py", line 81, in train_step
    gradients = tape.gradient(loss, trainable_weights)

  File "/venv/lib/python3.11/site-packages/our_layers/keras/scale.py", line 5, in call
    return x * self.scale

  File "/opt/dist-packages/tensorflow/python/framework/ops.py", line 9, in wrapped
    return run()

Incompatible shapes: [16] vs. [16,3]"""


def test_worker_error_when_tensorflow_says_where_a_node_was_made_then_shows_the_user_s_frames_alone():
    with pytest.raises(ValueError, match="Graph") as raised:
        raise ValueError(GRAPH_ERROR)
    failure = program.failure_of(raised.value)
    lines = [line for line in failure.message.splitlines() if line]
    assert lines == [
        "Graph execution error:",
        "Detected at node compile_loss/mse/sub defined at (most recent call last):",
        '  File "/home/me/train.py", line 3, in call',
        "    return x @ y",
        '  File "/venv/lib/python3.11/site-packages/our_layers/keras/scale.py", line 5, in call',
        "    return x * self.scale",
        "Incompatible shapes: [16] vs. [16,3]",
    ]
    assert str(as_error(failure)).count("Incompatible") == 1


def test_rank_process_error_when_pickled_then_keeps_its_failure():
    error = RankProcessError(RankFailure(kind="K", message="m", traceback="t", log_tail="l"))
    assert pickle.loads(pickle.dumps(error)).failure == error.failure


@every_case("name", [name for name in dir(errors) if name.endswith("Error")])
def test_error_when_pickled_then_keeps_its_text(name):
    kind = getattr(errors, name)
    copy = pickle.loads(pickle.dumps(kind("text")))
    assert type(copy) is kind and str(copy) == "text"
    assert issubclass(kind, errors.ElephantError)


HELP = "See https://elephant-spark.github.io/elephant/troubleshooting/"


def test_error_when_it_reaches_the_user_then_ends_with_one_address_and_quoted_or_reported_with_none():
    @errors.brief_errors
    def check():
        raise errors.DataError("column 'x': a null.", topic="nulls")

    @errors.brief_errors
    def fit():
        try:
            check()
        except errors.DataError as error:
            raise errors.ClusterError(f"rank 1: {errors.short_text(error)}.") from error

    with pytest.raises(errors.DataError) as failure:
        errors.brief_errors(check)()
    assert str(failure.value) == f"column 'x': a null.\n{HELP}#nulls"
    assert failure.value.args == ("column 'x': a null.",) == (errors.text_of(failure.value),)
    copy = pickle.loads(pickle.dumps(failure.value))
    assert str(copy) == str(failure.value)
    with pytest.raises(errors.ClusterError) as failure:
        fit()
    assert str(failure.value) == f"rank 1: DataError: column 'x': a null.\n{HELP}#the-cluster"
    reported = program.failure_of(errors.DataError("a null", topic="nulls"))
    error = as_error(reported)
    assert (str(error), error.topic) == ("a null", "nulls")


@every_case(
    ("kind", "topic"),
    [
        ("ValueError", "an-error-in-your-own-code"),
        (errors.ENDED, "a-process-that-ended"),
        (errors.FROZEN, "a-worker-that-is-silent"),
    ],
)
def test_worker_failure_when_its_process_ended_without_a_word_then_points_to_that(kind, topic):
    copy = pickle.loads(pickle.dumps(as_error(RankFailure(rank=1, host="h", kind=kind, message="no"))))
    assert copy.topic == topic


SPARK = """
def collect():
    raise RuntimeError("at org.apache.spark.Stage")
"""
ELEPHANT = """
def fit(build):
    try:
        build()
    except Exception as error:
        raise WorkerFailure("ValueError: no", rank=1, host="h") from error


def warned():
    warn_user("look here")
"""


def module(name, code):
    """Returns what stands in for a module of a package, by the name that it has."""
    space = {**vars(errors), "__name__": name}
    exec(compile(code, f"/packages/{name}.py", "exec"), space)  # noqa: S102  (names are all that it is about)
    return types.SimpleNamespace(**space)


def failing(build):
    """Returns the error of a fit as its caller gets it."""
    with pytest.raises(errors.WorkerFailure) as failure:
        errors.brief_errors(module("elephant.spark.fit", ELEPHANT).fit)(build)
    return failure.value


def frames(error):
    return [entry.name for entry in traceback.extract_tb(error.__traceback__)]


def test_error_when_a_fit_fails_then_neither_elephant_s_frames_nor_spark_s_error_are_shown(monkeypatch):
    spark = module("pyspark.sql.dataframe", SPARK)
    error = failing(spark.collect)
    assert frames(error) == ["failing", "call"]
    shown = "".join(traceback.format_exception(error))
    assert "org.apache" not in shown and "ELEPHANT_FULL_TRACEBACK=1 shows all frames" in shown
    assert len(shown.splitlines()) <= 10
    assert "org.apache" in str(error.__context__)
    monkeypatch.setenv("ELEPHANT_FULL_TRACEBACK", "1")
    error = failing(spark.collect)
    assert frames(error) == ["failing", "call", "call", "fit"] and frames(error.__cause__) == ["fit", "collect"]


def test_error_when_the_user_s_code_is_behind_it_then_its_frames_are_shown():
    def build():
        raise ValueError("no such layer")

    error = failing(build)
    assert frames(error) == ["failing", "call"] and frames(error.__cause__) == ["build"]


def test_worker_error_when_elephant_s_frames_are_between_the_user_s_then_they_are_left_out_but_not_of_its_own_faults():
    def inner():
        raise ValueError("no such attribute")

    def told(called):
        space = {}
        path = Path(program.__file__).parent / "coupling.py"
        exec(compile("def train_step(called):\n    called()", path, "exec"), space)  # noqa: S102  (a place is all)
        with pytest.raises((TypeError, ValueError)) as failure:
            space["train_step"](called)
        return program.failure_of(failure.value).traceback

    assert "in train_step" not in told(inner) and "in inner" in told(inner)
    assert "in train_step" in told(None)
    on_purpose = told(functools.partial(errors.expect, False, "axis", "a number", "x"))
    assert "in told" in on_purpose and "in train_step" not in on_purpose


def test_error_when_a_callback_of_the_user_raises_it_then_is_shown_from_there_on_and_others_whole():
    def callback():
        int("no number")

    fit = module("elephant.driver.driver_turns", "def fit(callback):\n    callback()")
    with pytest.raises(ValueError, match="no number") as failure:
        errors.brief_errors(fit.fit)(callback)
    # That the error is raised anew, Python 3.10 needs, which else restores the frames.
    assert frames(failure.value)[1:] == ["call", "callback"]
    with pytest.raises(KeyboardInterrupt) as failure:
        errors.brief_errors(fit.fit)(module("elephant.net.stream", "def wait():\n    raise KeyboardInterrupt").wait)
    assert frames(failure.value)[1:] == ["call"]
    with pytest.raises(TypeError) as failure:
        errors.brief_errors(fit.fit)(None)
    assert frames(failure.value)[1:] == ["call", "call", "fit"]


def test_error_when_elephant_raises_one_of_python_then_is_shown_as_elephant_s_own_are_and_a_fault_whole():
    code = "def set_given(value):\n    raise TypeError(f'epochs: expected an integer. Received: {value}.')"
    set_given = errors.brief_errors(module("elephant.spark.params", code).set_given)
    with pytest.raises(TypeError) as failure:
        errors.brief_errors(module("elephant.spark.estimator", "def fit(call):\n    call(3.5)").fit)(set_given)
    assert str(failure.value) == f"epochs: expected an integer. Received: 3.5.\n{HELP}#params-and-options"
    assert frames(failure.value)[1:] == ["call"]
    missing = module(
        "elephant.hadoop", "def load():\n    raise FileNotFoundError('expected a folder. Received: none.')"
    )
    with pytest.raises(FileNotFoundError, match=f"Received: none.\n{HELP}#loading-and-saving$"):
        errors.brief_errors(missing.load)()
    with pytest.raises(RuntimeError, match="Stage$") as spark:
        errors.brief_errors(module("pyspark.sql.dataframe", SPARK).collect)()
    assert frames(spark.value)[1:] == ["call"]
    with pytest.raises(ZeroDivisionError) as fault:
        errors.brief_errors(module("elephant.spark.fit", "def fit():\n    1 / 0").fit)()
    assert frames(fault.value)[1:] == ["call", "call", "fit"]


def test_error_when_it_is_its_own_cause_then_is_shortened_all_the_same():
    def fit():
        error = errors.DataError("no rows")
        raise error from error

    with pytest.raises(errors.DataError) as failure:
        errors.brief_errors(fit)()
    assert frames(failure.value)[-1] == "fit"


def test_error_when_ipython_shows_it_then_no_frame_of_elephant_is_left(monkeypatch):
    def structured_traceback(kind, error, trace):
        return traceback.format_exception(kind, error, trace)

    shell = types.SimpleNamespace(InteractiveTB=types.SimpleNamespace(structured_traceback=structured_traceback))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    lines = failing(module("pyspark.sql.dataframe", SPARK).collect)._render_traceback_()
    assert [line.split(", in ")[1].split("\n")[0] for line in lines if line.startswith("  File")] == ["failing"]
    assert lines[-1].endswith(f"rank 1 on h failed: ValueError: no\n{HELP}#an-error-in-your-own-code\n")


def test_warning_when_elephant_gives_it_then_names_the_user_s_line():
    with pytest.warns(UserWarning, match="look here") as warned:
        module("elephant.spark.fit", ELEPHANT).warned()
    assert warned[0].filename == __file__
