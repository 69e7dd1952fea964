"""A submitted job: its command line and YAML file, its run, its exit code, and its report."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from elephant.cluster.session import require_master
from elephant.cluster.spark_job import SparkWords
from elephant.cluster.spark_private import start_gateway
from elephant.errors import (
    ClusterError,
    ConfigurationError,
    ElephantError,
    JobCancelledError,
    NetworkError,
    TrainingError,
    UnsupportedError,
    did_you_mean,
    first_line,
    first_paragraph,
    text_of,
)
from elephant.jobs.inputs import require_code
from elephant.jobs.settings import ALTERNATIVES, SETTINGS, Setting, settings_of
from elephant.options import key_of, remedy_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PLACE = "the arguments"
DONE = 0
FAILED = 1
WRONG_ARGUMENTS = 2
TRY_AGAIN = 3
INTERRUPTED = 130
_PYTHON_ERROR = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Failure): .*", re.MULTILINE)
# Those of two words, which are no words of a sentence; not what is quoted, such as a column's name.
_PARAMS_OF_WORDS = "|".join(setting.name for setting in SETTINGS if setting.name != setting.name.lower())
_PARAM = re.compile(rf"(?<![\w'\"./=-])({_PARAMS_OF_WORDS})\b(?!['\"(]|\.\w)(=None|)")
_JAVA_FRAME = "\n\tat "
_JAVA_CAUSE = re.compile(r"^Caused by: (.*)", re.MULTILINE)


def code_of(error: BaseException) -> int:
    """Returns the exit code of a job that ends with an error.

    >>> code_of(ConfigurationError("epochs: expected ...")), code_of(ClusterError("numWorkers=4: ..."))
    (2, 3)
    """
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, (ConfigurationError, UnsupportedError)):
        return WRONG_ARGUMENTS
    if isinstance(error, (ClusterError, NetworkError)) or _is_retryable(error):
        return TRY_AGAIN
    return FAILED


def _is_retryable(error: BaseException) -> bool:
    if isinstance(error, TrainingError) and not isinstance(error, JobCancelledError):
        return error.retryable
    return bool(SparkWords.EXECUTOR_LOST.search(error) or SparkWords.APPLICATION_GONE.search(error))


def line_of(error: BaseException) -> str:
    """Returns an error as one line: first paragraph of elephant's own, what a Python worker raised, or Java's cause."""
    text = text_of(error)
    if not isinstance(error, (ElephantError, FileExistsError)):
        if raised := _PYTHON_ERROR.findall(text):
            text = raised[-1]
        elif _JAVA_FRAME in text:
            text = ": ".join([first_line(error), *_JAVA_CAUSE.findall(text)[-1:]])
        else:
            text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return first_paragraph(text)


def shown_line(error: BaseException) -> str:
    """Returns `line_of` an error as users see it: elephant's own with arguments, and the address of what says more.

    >>> shown_line(ClusterError("numWorkers=4: expected 4. Lower numWorkers to 2."))[:55]
    '--num-workers=4: expected 4. Lower --num-workers to 2. '
    """
    if not isinstance(error, ElephantError):
        return line_of(error)
    return f"{_PARAM.sub(_flag, line_of(error))} See {error.help_url}"


def _flag(param: re.Match[str]) -> str:
    """Returns a param, perhaps with None, as a job's arguments have it."""
    return f"--{key_of(param[1])}" + (" ''" if param[2] == "=None" else param[2])


def json_line(result: Any) -> str:
    """Returns a result as one line of JSON, in which numbers that are not finite are null.

    >>> json_line({"loss": [0.5, float("nan")]})
    '{"loss": [0.5, null]}'
    """
    return json.dumps(_finite(result))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class JobKind:
    """One of the jobs."""

    name: str  # as it is called: "train"
    description: str
    # raises ConfigurationError for settings that do not go together; called before Spark starts
    check: Callable[[Mapping[str, Any]], None]
    work: Callable[[SparkSession, Mapping[str, Any]], Any]  # does it, and returns the result that is printed as JSON


def submit(job: JobKind, words: Sequence[str]) -> int:
    """Runs a job and returns its exit code; the last line on standard output is its result as JSON."""
    script = f"{job.name}.py"
    try:
        settings = read_settings(script, job.description, settings_of(job.name), words)
        leave_out_warnings()
        job.check(settings)
        _import_code(settings)
        result = _run(job, settings)
    except (Exception, KeyboardInterrupt) as error:
        if not isinstance(error, (ElephantError, FileExistsError, KeyboardInterrupt)):
            # Nobody meant this one to happen: where it did is worth the lines.
            traceback.print_exc()
        sys.stderr.write(f"{script}: {shown_line(error)}\n")
        return code_of(error)
    sys.stdout.write(json_line(result) + "\n")
    sys.stdout.flush()
    return DONE


def leave_out_warnings() -> None:
    """Has frameworks log errors alone on the driver, as on the workers, unless the environment says otherwise."""
    # Here, because it imports numpy, and help is to be had without.
    from elephant.backends import log_levels

    for name, value in log_levels("2").items():
        os.environ.setdefault(name, value)


def _import_code(settings: Mapping[str, Any]) -> None:
    """Sees that code which settings name is there; its modules may be the first to import a framework."""
    from elephant.monitor.log_stream import quiet_imports

    with quiet_imports():
        require_code(settings)


def _run(job: JobKind, settings: Mapping[str, Any]) -> Any:
    session = _session(job.name)
    try:
        return job.work(session, settings)
    finally:
        _stop(session)


def _stop(session: SparkSession) -> None:
    try:
        session.stop()
    except Exception as error:
        # A JVM that is gone. What the work came to stands: a result that is whole, or the error that ended it.
        sys.stderr.write(f"the Spark session did not stop: {line_of(error)}\n")


def _session(name: str) -> SparkSession:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    try:
        _require_master()
        return SparkSession.builder.appName(f"elephant {name}").getOrCreate()
    except (PySparkException, Py4JError, RuntimeError) as error:
        raise ClusterError(
            f"expected a Spark session. Received: {line_of(error)} See whether the master runs, and what the settings "
            "of spark-submit ask of it."
        ) from error


def _require_master() -> None:
    """Raises ConfigurationError where the master that Spark's settings name is misspelled; no context is started."""
    from pyspark import SparkConf

    # A client of Spark Connect has no master.
    if not {"SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"} & os.environ.keys():
        start_gateway()
        require_master(SparkConf().get("spark.master") or "")


def read_yaml(path: str, settings: Sequence[Setting]) -> dict[str, Any]:
    """Returns the settings in a YAML file, checked, by their names.

    Raises:
        ConfigurationError: There is no such file; it is no YAML map; a key is unknown, or a value of another kind.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise ConfigurationError(
            f"--config: expected a YAML file on the driver's machine. Received: {path!r}: {error.strerror}."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"--config: expected text in UTF-8. Received: {path!r}: {error}.", topic="jobs-of-spark-submit"
        ) from error
    return checked(_parsed(path, text), settings, path)


def _parsed(path: str, text: str) -> Mapping[Any, Any]:
    try:
        import yaml
    except ImportError as error:
        raise ConfigurationError(
            "--config: expected PyYAML on the driver. Received: none. pip install 'elephant-spark[jobs]', "
            "or pass arguments instead."
        ) from error
    try:
        twice = _named_twice(yaml.compose(text, Loader=yaml.SafeLoader))
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(
            f"--config: expected YAML. Received: {path!r}: {' '.join(str(error).split())}"
        ) from error
    if twice:
        # YAML forbids it, and its reader takes the last one without a word.
        raise ConfigurationError(f"--config: expected each name once. Received: {path!r}: {' and '.join(twice)}.")
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigurationError(
            f"--config: expected a map, with lines such as 'epochs: 10'. Received: {path!r} with a "
            f"{type(content).__name__}."
        )
    return content


def _named_twice(node: Any) -> list[str]:
    """Returns which keys of a YAML map come again, with their lines; of maps in it too."""
    if getattr(node, "id", "") != "mapping":
        return []
    found, lines = [], dict[str, int]()
    for key, value in node.value:
        line = key.start_mark.line + 1
        if str(key.value) in lines:
            found.append(f"{key.value!r} in line {lines[key.value]} and in line {line}")
        lines.setdefault(str(key.value), line)
        found += _named_twice(value)
    return found


def checked(content: Mapping[Any, Any], settings: Sequence[Setting], place: str) -> dict[str, Any]:
    """Returns settings by their names, from values by their keys.

    Raises:
        ConfigurationError: A key is unknown, or a value of another kind.
    """
    known = {setting.key: setting for setting in settings}
    given: dict[str, Any] = {}
    for key, value in content.items():
        if key not in known:
            raise ConfigurationError(unknown(str(key), list(known), place), topic="jobs-of-spark-submit")
        given[known[key].name] = _value(known[key], value, place)
    return given


def _value(setting: Setting, value: Any, place: str) -> Any:
    try:
        return setting.kind.read(value)
    except ElephantError:
        raise
    except (TypeError, ValueError) as error:
        expected = setting.kind.written or setting.kind.expected
        raise ConfigurationError(
            f"{setting.key}: expected {expected}. Received: {value!r} in {place}.", topic="jobs-of-spark-submit"
        ) from error


def unknown(key: str, known: Sequence[str], place: str) -> str:
    """Returns the error text for a key that a job does not know, with the one that comes nearest."""
    wanted = key_of(key.lstrip("-"))
    hint = remedy_for(f"--{wanted}") or did_you_mean(wanted, known) or f" Known: {', '.join(sorted(known))}."
    return f"{key}: expected the name of a setting. Received: an unknown one in {place}.{hint}"


def saved_settings(settings: Mapping[str, Any]) -> bytes:
    """Returns a job's settings as they are kept beside its checkpoints."""
    return json.dumps({key_of(name): value for name, value in settings.items()}, indent=2).encode()


def read_saved_settings(content: bytes, settings: Sequence[Setting], place: str) -> dict[str, Any]:
    """Returns the settings of a job that were kept; raises ConfigurationError when they are none."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{place}: expected a job's settings as JSON. Received: {error}.") from error
    if not isinstance(found, Mapping):
        raise ConfigurationError(
            f"{place}: expected a job's settings as a JSON object. Received: a {type(found).__name__}. Start the job "
            "again with train.py, and its settings."
        )
    return checked(found, settings, place)


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}. See --help.", topic="jobs-of-spark-submit")


def read_settings(name: str, description: str, settings: Sequence[Setting], words: Sequence[str]) -> dict[str, Any]:
    """Returns the values of a job's settings, by name; arguments win over the job file.

    Raises:
        ConfigurationError: An argument, or a line of the file, is unknown or malformed.
        SystemExit: ``--help`` was asked for, and has been printed.
    """
    parser = _parser(name, description, settings)
    options, others = parser.parse_known_args(list(words))
    if others:
        raise ConfigurationError(
            unknown(others[0], [setting.key for setting in settings], _PLACE), topic="jobs-of-spark-submit"
        )
    given = vars(options)
    path = given.pop("config", None)
    arguments = checked(_gathered(given, settings), settings, _PLACE)
    return arguments if path is None else layered(read_yaml(path, settings), arguments)


def layered(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of two layers; the upper one wins, also over what says the same in another way.

    >>> layered({"data": "/rows", "epochs": 3}, {"table": "rows"})
    {'epochs': 3, 'table': 'rows'}
    """
    replaced = {name for names in ALTERNATIVES if any(name in above for name in names) for name in names}
    return {**{name: value for name, value in below.items() if name not in replaced}, **above}


def require_one(settings: Mapping[str, Any], *names: str) -> None:
    """Raises ConfigurationError unless exactly one of the names is set."""
    given = [name for name in names if name in settings]
    if len(given) != 1:
        keys = [f"--{key_of(name)}" for name in names]
        received = f"both {' and '.join(keys)}" if given else "none"
        raise ConfigurationError(
            f"expected {' or '.join(keys)}. Received: {received}. See --help.", topic="jobs-of-spark-submit"
        )


def _parser(name: str, description: str, settings: Sequence[Setting]) -> argparse.ArgumentParser:
    parser = _Parser(prog=name, description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="YAML file with these settings, by their names without dashes")
    for setting in settings:
        _add(parser, setting)
    if any(setting.name == "saveMode" for setting in settings):
        parser.add_argument(
            "--overwrite",
            dest="saveMode",
            action="store_const",
            const="overwrite",
            help="short for --save-mode overwrite",
        )
    return parser


def _add(parser: argparse.ArgumentParser, setting: Setting) -> None:
    flag, text = f"--{setting.key}", setting.help.replace("%", "%%")
    if setting.kind.is_switch:
        parser.add_argument(flag, dest=setting.name, action=argparse.BooleanOptionalAction, help=text)
    elif setting.kind.gather is not None:
        repeated = f"{text}; may be repeated"
        parser.add_argument(flag, dest=setting.name, action="append", metavar="VALUE", help=repeated)
    else:
        parser.add_argument(flag, dest=setting.name, metavar="VALUE", help=text)


def _gathered(given: Mapping[str, Any], settings: Sequence[Setting]) -> dict[str, Any]:
    """Returns the arguments by key, as a file would have them."""
    by_name = {setting.name: setting for setting in settings}
    content: dict[str, Any] = {}
    for name, value in given.items():
        setting = by_name[name]
        try:
            content[setting.key] = value if setting.kind.gather is None else setting.kind.gather(value)
        except ValueError as error:
            expected = setting.kind.written or setting.kind.expected
            raise ConfigurationError(
                f"--{setting.key}: expected {expected}. Received: {value!r} in {_PLACE}."
            ) from error
    return content
