"""Outputs of jobs: whole or not there, whatever was there before, on the file system of a real JVM."""

import contextlib
import re

import pytest

from elephant.errors import ConfigurationError, DataError
from elephant.jobs.inputs import read_frame
from elephant.jobs.output import Output
from elephant.jobs.training import keeping_job, require_trusted_job, resume, resumed_job
from elephant.options import key_of

pytestmark = pytest.mark.spark


def write(output, content="new"):
    """Writes an output of two files, as a job does; returns whether it did."""
    if output.is_saved():
        return False
    with output.staged() as path:
        folder = local(path)
        (folder / "metadata").mkdir(parents=True)
        (folder / "metadata" / "part-00000").write_text(content)
        (folder / "_SUCCESS").write_text("of Spark's own")
    return True


def local(path):
    from pathlib import Path

    assert path.startswith("file:")
    return Path(re.sub("^file:/*", "/", path))


def content_of(folder):
    return (folder / "metadata" / "part-00000").read_text()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_output_when_written_then_is_whole_and_nothing_lies_beside_it(spark, tmp_path):
    output = Output(spark, str(tmp_path / "out"), "errorifexists")
    assert not output.is_finished
    assert write(output)
    assert output.is_finished
    assert content_of(tmp_path / "out") == "new"
    assert (tmp_path / "out" / "_SUCCESS").read_text() == ""
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("there", ["whole", "half"])
def test_output_when_something_is_there_then_errorifexists_refuses_it_before_the_work(spark, tmp_path, there):
    write(Output(spark, str(tmp_path / "out"), "errorifexists"), "old")
    if there == "half":
        (tmp_path / "out" / "_SUCCESS").unlink()
    state = {"whole": "which is whole.*overwrite or ignore", "half": "without the _SUCCESS.*overwrite"}[there]
    with pytest.raises(FileExistsError, match=f"output: expected a path where there is nothing.*{state}"):
        Output(spark, str(tmp_path / "out"), "errorifexists").is_saved()
    assert content_of(tmp_path / "out") == "old"


def test_output_when_whole_then_ignore_keeps_it_and_overwrite_replaces_it(spark, tmp_path):
    path = str(tmp_path / "out")
    write(Output(spark, path, "errorifexists"), "old")
    assert not write(Output(spark, path, "ignore"), "new")
    assert content_of(tmp_path / "out") == "old"
    (tmp_path / "out" / "of the old one").touch()
    assert write(Output(spark, path, "overwrite"), "new")
    assert content_of(tmp_path / "out") == "new"
    assert "of the old one" not in names(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_output_when_half_is_there_then_ignore_does_not_take_it_for_whole(spark, tmp_path):
    (tmp_path / "out" / "metadata").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="without the _SUCCESS"):
        Output(spark, str(tmp_path / "out"), "ignore").is_saved()


def test_output_when_the_work_fails_then_what_was_there_stays(spark, tmp_path):
    path = str(tmp_path / "out")
    write(Output(spark, path, "errorifexists"), "old")
    with pytest.raises(ZeroDivisionError), Output(spark, path, "overwrite").staged() as staged:
        (local(staged) / "metadata").mkdir(parents=True)
        raise ZeroDivisionError
    assert content_of(tmp_path / "out") == "old"
    assert Output(spark, path, "ignore").is_finished
    assert names(tmp_path) == ["out"]


def test_output_when_another_run_ends_first_then_its_output_stays(spark, tmp_path):
    path = str(tmp_path / "out")
    output = Output(spark, path, "errorifexists")
    with pytest.raises(FileExistsError, match="which is whole"), output.staged() as staged:
        (local(staged) / "metadata").mkdir(parents=True)
        write(Output(spark, path, "errorifexists"), "of the other run")
    assert content_of(tmp_path / "out") == "of the other run"
    assert names(tmp_path) == ["out"]


def test_output_when_a_file_then_needs_no_mark(spark, tmp_path):
    output = Output(spark, str(tmp_path / "metrics.json"), "ignore", is_folder=False)
    with output.staged() as path:
        local(path).write_text("{}")
    assert output.is_saved()
    assert names(tmp_path) == ["metrics.json"]


def test_output_when_a_folder_is_where_its_file_goes_then_stays(spark, tmp_path):
    (tmp_path / "fitted").mkdir()
    with pytest.raises(FileExistsError, match="output: expected the path of a file. Received: .*which is a folder"):
        Output(spark, str(tmp_path / "fitted"), "overwrite", is_folder=False).is_saved()


def test_output_when_nothing_can_be_written_there_then_is_refused_before_the_work(spark, tmp_path):
    Output(spark, str(tmp_path / "new" / "out"), "overwrite").require_writable()
    assert names(tmp_path / "new") == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="output: expected a path that can be written to. Received: .*out"):
        Output(spark, str(tmp_path / "file" / "out"), "overwrite").require_writable()


@pytest.mark.parametrize(
    ("setting", "path", "refused"),
    [
        ("checkpointPath", "out/checkpoints", True),
        ("checkpointPath", "file:{}/out", True),
        ("checkpointPath", "out-checkpoints", False),
        ("data", "out/of/rows", True),
        ("data", "out", False),
        ("model", "out/model.keras", True),
        ("model", "out", False),
        ("model", "module:build", False),
        ("model", "unknown://host/out/model.keras", False),
    ],
)
def test_output_when_it_would_replace_what_the_job_needs_then_is_refused(spark, tmp_path, setting, path, refused):
    output = Output(spark, str(tmp_path / "out"), "overwrite")
    given = path.format(tmp_path) if ":" in path else str(tmp_path / path)
    expected = f"output: expected a folder that does not hold {key_of(setting)}, {given}. Received: {tmp_path / 'out'}"
    with pytest.raises(ConfigurationError, match=expected) if refused else contextlib.nullcontext():
        output.refuse_inside({setting: given})


def test_job_when_its_fit_is_refused_then_the_one_before_stays_beside_the_checkpoints(spark, tmp_path):
    before = {"checkpointPath": str(tmp_path), "data": "rows", "seed": 3}
    with keeping_job(spark, before):
        pass
    with pytest.raises(DataError), keeping_job(spark, {**before, "seed": 4}):
        raise DataError("labelCol: expected a column")
    assert resumed_job(spark, str(tmp_path)) == before
    # A fit that was interrupted goes on as it was told last.
    with pytest.raises(KeyboardInterrupt), keeping_job(spark, {**before, "numWorkers": 2}):
        raise KeyboardInterrupt
    assert resumed_job(spark, str(tmp_path)) == {**before, "numWorkers": 2}


def test_job_when_it_names_code_then_goes_on_where_it_is_trusted_or_named_again(spark, tmp_path):
    place = {"checkpointPath": str(tmp_path)}
    named = {"model": "os:abort", "callbacks": ["os:abort"], "customObjects": {"Net": "net:Net"}}
    with keeping_job(spark, {**place, **named, "data": "rows", "trusted": True}):
        pass
    before = resumed_job(spark, str(tmp_path))
    assert before == {**place, **named, "data": "rows"}
    refused = r"job.json: .*Received: model=os:abort; custom-objects={.*}; callbacks=\['os:abort'\].*--trusted"
    with pytest.raises(ConfigurationError, match=refused):
        resume(spark, place)
    require_trusted_job(spark, before, {**place, "trusted": True})
    require_trusted_job(spark, before, {**place, **named})
    require_trusted_job(spark, {**place, "model": "/models/digits.keras"}, place)
    (tmp_path / "job.json").write_text('{"model": "os:abort", "trusted": true}')
    with pytest.raises(ConfigurationError, match="trusted: expected the name of a setting"):
        resume(spark, place)


@pytest.mark.parametrize(
    ("kept", "given", "refused"),
    [
        ({"saveMode": "overwrite"}, {}, r"output=.*victim; save-mode=overwrite"),
        ({"saveMode": "overwrite"}, {"output": "/mine"}, r"save-mode=overwrite"),
        ({}, {"saveMode": "overwrite"}, r"output=.*victim"),
        ({"where": "java_method('java.lang.System', 'getenv') > ''"}, {}, r"where=java_method.*"),
        ({"format": "org.example.Source"}, {}, r"format=org.example.Source"),
        ({"readOption": {"fs.file.impl": "org.example.Files"}}, {}, r"read-option={'fs.file.impl': .*}"),
        ({}, {}, None),
        ({"saveMode": "overwrite"}, {"output": "/mine", "saveMode": "overwrite"}, None),
        ({"saveMode": "overwrite"}, {"trusted": True}, None),
        ({"saveMode": "ignore", "format": "csv", "readOption": {"header": "true"}}, {}, None),
    ],
)
def test_job_when_it_replaces_something_or_finds_code_then_goes_on_where_it_is_trusted_or_named_again(
    spark, tmp_path, kept, given, refused
):
    place, victim = {"checkpointPath": str(tmp_path)}, tmp_path / "victim"
    before = {**place, "data": "rows", "model": "net.keras", "output": str(victim), **kept}
    victim.mkdir()
    with keeping_job(spark, before):
        pass
    if refused is None:
        require_trusted_job(spark, before, {**place, **given})
        return
    expected = rf"expected a job that names neither code nor what it replaces.*Received: {refused}\..*--trusted"
    with pytest.raises(ConfigurationError, match=expected):
        resume(spark, {**place, **given})
    assert victim.is_dir()


def test_output_when_spark_knows_no_file_system_then_says_so(spark):
    with pytest.raises(ConfigurationError, match="output: expected a path on a file system that Spark knows.*unknown"):
        Output(spark, "unknown://host/out", "ignore")


def test_rows_when_nothing_is_at_their_path_then_are_missed_before_spark_looks_and_else_are_read(spark, tmp_path):
    (tmp_path / "rows.csv").write_text("1,2\n")
    for path in ("rows.csv", "*.csv"):
        frame = read_frame(spark, {"data": str(tmp_path / path), "format": "csv"})
        assert [tuple(row) for row in frame.collect()] == [("1", "2")]
    with pytest.raises(DataError, match=r"^data: expected a path that is there\. Received: '.*/row\.csv'") as found:
        read_frame(spark, {"data": str(tmp_path / "row.csv"), "format": "csv"})
    assert found.value.__cause__ is None
