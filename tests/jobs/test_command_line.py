"""Arguments and job files: what each kind of setting becomes, who wins, and what is refused in which words."""

import json

import pytest
from tables import every_case

from elephant.errors import ConfigurationError
from elephant.jobs.settings import EVALUATE, PREDICT, SETTINGS, TRAIN, settings_of
from elephant.jobs.submission import layered, read_saved_settings, read_settings, require_one, saved_settings


def read(*words, job=TRAIN):
    return read_settings(f"{job}.py", "A job.", settings_of(job), words)


def in_file(tmp_path, text):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


ARGUMENTS = [
    (["--num-workers", "4"], {"numWorkers": 4}),
    (["--learning-rate", "1e-3"], {"learningRate": 1e-3}),
    (["--shuffle"], {"shuffle": True}),
    (["--no-shuffle"], {"shuffle": False}),
    (["--frequency", "epoch"], {"frequency": "epoch"}),
    (["--frequency", "20"], {"frequency": 20}),
    (["--use-gpu", "auto"], {"useGpu": "auto"}),
    (["--use-gpu", "false"], {"useGpu": False}),
    (["--features-col", "x"], {"featuresCol": "x"}),
    (["--features-col", "x", "--features-col", "y"], {"featuresCol": ["x", "y"]}),
    (
        ["--features-col", "a=x", "--features-col", "b=y", "--features-col", "b=z"],
        {"featuresCol": {"a": "x", "b": ["y", "z"]}},
    ),
    (["--label-col", "a=x", "--label-col", "b=y"], {"labelCol": {"a": "x", "b": "y"}}),
    (["--label-col", ""], {"labelCol": None}),
    (["--label-col", "a", "--label-col", "b"], {"labelCol": ["a", "b"]}),
    (["--weight-col", "w"], {"weightCol": "w"}),
    (["--weight-col", "a=w", "--weight-col", "b=v"], {"weightCol": {"a": "w", "b": "v"}}),
    (["--class-weight", "balanced"], {"classWeight": "balanced"}),
    (["--class-weight", "0=1", "--class-weight", "1=2.5"], {"classWeight": {0: 1.0, 1: 2.5}}),
    (["--callbacks", "mine:stop", "--callbacks", "mine:Log"], {"callbacks": ["mine:stop", "mine:Log"]}),
    (["--custom-objects", "Scale=mine:Scale"], {"customObjects": {"Scale": "mine:Scale"}}),
    (["--read-option", "header=true"], {"readOption": {"header": "true"}}),
    (["--where", "x > 1 AND y = 'a=b'"], {"where": "x > 1 AND y = 'a=b'"}),
    (["--overwrite"], {"saveMode": "overwrite"}),
]


@every_case(("words", "expected"), ARGUMENTS)
def test_arguments_when_read_then_have_the_values_of_their_kinds(words, expected):
    assert read(*words) == expected


def test_file_when_read_then_says_what_arguments_say(tmp_path):
    path = in_file(
        tmp_path,
        """
        data: hdfs:///rows
        read-option: {header: true, sep: ;}
        features-col: [x, y]
        label-col: null
        class-weight: {0: 1, 1: 2.5}
        learning-rate: 1e-3
        shuffle: false
        use-gpu: true
        frequency: 20
        """,
    )
    assert read("--config", str(path)) == {
        "data": "hdfs:///rows",
        "readOption": {"header": "true", "sep": ";"},
        "featuresCol": ["x", "y"],
        "labelCol": None,
        "classWeight": {0: 1.0, 1: 2.5},
        "learningRate": 1e-3,
        "shuffle": False,
        "useGpu": True,
        "frequency": 20,
    }


def test_arguments_when_the_file_says_otherwise_then_win(tmp_path):
    path = in_file(tmp_path, "data: /rows\nepochs: 3\nseed: 7\n")
    assert read("--epochs", "5", "--table", "rows", "--config", str(path)) == {"epochs": 5, "seed": 7, "table": "rows"}


def test_layers_when_both_choose_the_same_thing_in_two_ways_then_the_upper_one_stays():
    below = {"data": "/rows", "validationFraction": 0.1, "epochs": 2}
    above = {"table": "rows", "validationIndicatorCol": "v"}
    assert layered(below, above) == {"epochs": 2, **above}


REFUSED = [
    (["--epoch", "3"], r"--epoch: expected the name of a setting.*in the arguments. Did you mean 'epochs'\?"),
    (["--input-cols", "a=x"], r"--input-cols: expected the name .* features-col takes the columns of several inputs"),
    (["--warm-workers", "0"], r"--warm-workers: .* setting of the cluster: spark.elephant.warmWorkers"),
    (["--epochs", "three"], "epochs: expected an integer of at least 1. Received: 'three' in the arguments"),
    (["--epochs", "0"], "epochs: expected an integer of at least 1. Received: '0' in the arguments"),
    (["--mode", "both"], "mode: expected one of synchronous, asynchronous, hogwild, gossip. Received: 'both'"),
    (["--frequency", "weekly"], "frequency: expected batch, epoch or a number of steps. Received: 'weekly'"),
    (["--frequency", ""], "frequency: expected batch, epoch or a number of steps. Received: ''"),
    (["--use-gpu", "maybe"], "use-gpu: expected true, false or auto. Received: 'maybe'"),
    (["--save-mode", "append"], "save-mode: expected one of errorifexists, overwrite, ignore. Received: 'append'"),
    (
        ["--features-col", "a=x", "--features-col", "y"],
        "--features-col: expected a column, .* or pairs such as name=col",
    ),
    (["--preprocessing", "prepare.py"], "preprocessing: expected module:function. Received: 'prepare.py'"),
    (["--epochs"], "argument --epochs: expected one argument. See --help"),
]


@every_case(("words", "message"), REFUSED)
def test_arguments_when_wrong_then_say_what_is_expected(words, message):
    with pytest.raises(ConfigurationError, match=message):
        read(*words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "epoch: 3",
            r"epoch: expected the name of a setting. Received: an unknown one in .*job.yaml. Did you mean 'epochs'",
        ),
        ("numWorkers: 3", "Did you mean 'num-workers'"),
        ("num_workers: 3", "Did you mean 'num-workers'"),
        ("quux: 3", "quux: expected the name of a setting.* Known: aggregation, algorithm, "),
        ("epochs: 2.5", "epochs: expected an integer of at least 1. Received: 2.5 in .*job.yaml"),
        ("epochs: true", "epochs: expected an integer of at least 1. Received: True"),
        ("label-col: yes", "label-col: expected a column, .*, or nothing for none. Received: True"),
        ("shuffle: 1", "shuffle: expected true or false. Received: 1"),
        ("- epochs", "--config: expected a map, with lines such as 'epochs: 10'. Received: .*job.yaml' with a list"),
        ("epochs: [", "--config: expected YAML. Received: .*job.yaml'"),
        (
            "epochs: 3\nseed: 1\nepochs: 5",
            "--config: expected each name once. Received: .*job.yaml': 'epochs' in line 1 and in line 3",
        ),
        ("read-option:\n  sep: x\n  sep: y", "'sep' in line 2 and in line 3"),
    ],
)
def test_file_when_wrong_then_says_what_is_expected(tmp_path, text, message):
    with pytest.raises(ConfigurationError, match=message):
        read("--config", str(in_file(tmp_path, text)))


def test_file_when_not_in_utf_8_then_says_so(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_bytes("data: /tables/zähler".encode("latin-1"))
    with pytest.raises(ConfigurationError, match="--config: expected text in UTF-8. Received: .*job.yaml': .*0xe4"):
        read("--config", str(path))


def test_file_when_it_is_not_there_then_says_so(tmp_path):
    with pytest.raises(
        ConfigurationError, match="--config: expected a YAML file on the driver's machine.*No such file"
    ):
        read("--config", str(tmp_path / "none.yaml"))


def test_file_when_empty_then_says_nothing(tmp_path):
    assert read("--config", str(in_file(tmp_path, "# nothing\n"))) == {}


def test_settings_when_of_another_job_then_are_unknown():
    with pytest.raises(ConfigurationError, match="--epochs: expected the name of a setting"):
        read("--epochs", "3", job=EVALUATE)
    with pytest.raises(ConfigurationError, match="--label-col: expected the name of a setting"):
        read("--label-col", "y", job=PREDICT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"expected --data or --table. Received: none"),
        ({"data": "x", "table": "y"}, "expected --data or --table. Received: both --data and --table"),
    ],
)
def test_alternatives_when_none_or_both_are_given_then_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        require_one(settings, "data", "table")


def test_job_when_kept_and_read_again_then_is_the_same():
    again = [
        read_saved_settings(saved_settings(read(*words)), settings_of(TRAIN), "job.json") for words, _ in ARGUMENTS
    ]
    assert again == [expected for _, expected in ARGUMENTS]


def test_job_when_kept_then_has_the_keys_of_job_files():
    assert json.loads(saved_settings({"numWorkers": 2, "data": "/rows"})) == {"num-workers": 2, "data": "/rows"}


def test_job_when_what_was_kept_is_no_json_then_says_where():
    with pytest.raises(ConfigurationError, match=r"^/c/job.json: expected a job's settings as JSON"):
        read_saved_settings(b"{", settings_of(TRAIN), "/c/job.json")


def test_help_when_asked_for_then_names_every_setting(capsys):
    with pytest.raises(SystemExit) as ended:
        read("--help")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(f"--{setting.key}" in said for setting in SETTINGS if TRAIN in setting.jobs)
