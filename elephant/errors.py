"""Every error that elephant raises, in one tree.

::

    ElephantError
    ├── ConfigurationError (ValueError)     a parameter, or a model, that cannot work
    ├── UnsupportedError (ValueError)       a feature that this version does not have
    ├── UnknownOptionError (TypeError)      a name that is no param, or no argument
    ├── DataError (ValueError)              rows that cannot be trained on
    │   └── SchemaError                     columns that cannot be trained on, seen before any job
    ├── ClusterError (RuntimeError)         the cluster cannot run what was asked for
    ├── TrainingError (RuntimeError)        a fit that had begun and failed
    │   ├── WorkerFailure                   ... because of one rank: rank, host, step and its traceback
    │   ├── ServerFailedError               ... because of a parameter server, which says why
    │   ├── JobCancelledError               ... because somebody cancelled its Spark job
    │   ├── CheckpointError                 ... because a checkpoint could not be written, or read
    │   ├── PreemptedError                  ... because a worker was asked to end, and its state is in a checkpoint
    │   └── RowsMovedError                  ... because ranks have other rows than a checkpoint within an epoch wants
    └── NetworkError (ConnectionError)      between processes of one fit
        ├── AuthenticationError             the other side does not know the job's token
        ├── ProtocolError                   the other side does not speak this protocol
        ├── PeerLostError                   the other side went away: a failure's echo, not its cause
        ├── SupersededError                 a newer attempt of this worker's partition has taken its place
        ├── PositionLost                    a parameter server went back to a snapshot: repeat from .step on
        └── DeadlineExceededError (TimeoutError)

A message says what was expected, what came, and what to do next. Every class
pickles, so that an error crosses process borders with its data. As the message has it all, `brief_errors`
leaves the frames of elephant's own code out of what is shown, and has it end with the address of the section of
``docs/troubleshooting.md`` that says more: the ``topic`` of the error, or of its class.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast

# Before there is no descriptor left to import it with; Windows has none.
with contextlib.suppress(ImportError):
    import resource

# Where the documentation is; mkdocs.yml has it too.
SITE = "https://elephant-spark.github.io/elephant/"
# Of a process that the system, or somebody, has ended: its output says nothing of it.
KILLED = "was killed (signal 9)"
_FEW_LINES, _ERROR_LINES = 3, 9
# Of output, lines that may say why; and what TensorFlow prints where all is well.
_ERROR_LINE = re.compile(r"error|fatal|failed|exception|out of memory|no space left|CUDA_", re.IGNORECASE)
_NO_ERROR = re.compile(r"Unable to register cu|failed call to cuInit|0 errors", re.IGNORECASE)
# Set to anything, it has elephant show every frame of its errors, and Spark's own.
FULL_TRACEBACK = "ELEPHANT_FULL_TRACEBACK"
_INSTALLED = ("<frozen", *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
# Packages whose frames say nothing to users where elephant raises on purpose; Keras' backends are added.
_machinery = {"elephant", "pyspark", "py4j", "keras", "concurrent", "contextlib", "functools", "queue", "threading"}
# Python's own errors that elephant raises as Keras does: what was expected, and what it has received.
_ON_PURPOSE = (TypeError, ValueError, AttributeError, OSError)

Function = TypeVar("Function", bound="Callable[..., Any]")


class ElephantError(Exception):
    """Base of all errors that elephant raises on purpose.

    Args:
        texts: What was expected, what came, and what to do next.
        topic: The section on troubleshooting that says more, as its address names it; empty leaves it to the class.

    Attributes:
        is_shown: Whether it has left elephant for the user's code, and so ends with that section's address; one that is
            quoted in another, or reported to the driver, has none.

    Examples:
        >>> print(SchemaError("labelCol: expected ...", topic="nulls").help_url)
        https://elephant-spark.github.io/elephant/troubleshooting/#nulls
    """

    topic: str = ""
    is_shown: bool = False

    def __init__(self, *texts: object, topic: str = "") -> None:
        super().__init__(*texts)
        if topic:
            self.topic = topic

    @property
    def message(self) -> str:
        """Text of the error, without the address that it ends with where users see it."""
        return super().__str__()

    @property
    def help_url(self) -> str:
        """Address of the section that says what to do about it."""
        return help_url(self.topic)

    def __str__(self) -> str:
        return shown_text(self) if self.is_shown else self.message

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that IPython shows, which looks for a method of this name: without elephant's frames."""
        shell, trace = sys.modules["IPython"].get_ipython(), self.__traceback__
        trace = trace if FULL_TRACEBACK in os.environ else _user_frames(trace)
        return list(shell.InteractiveTB.structured_traceback(type(self), self, trace))


def help_url(topic: str) -> str:
    """Returns the address of a section of the page on troubleshooting; without one, that of the page.

    >>> help_url("no-java")
    'https://elephant-spark.github.io/elephant/troubleshooting/#no-java'
    """
    return f"{SITE}troubleshooting/" + (f"#{topic}" if topic else "")


class ConfigurationError(ElephantError, ValueError):
    """A parameter has a value, or a model a form, that cannot work."""

    topic = "params-and-options"


class UnsupportedError(ElephantError, ValueError):
    """Something that elephant knows by name and does not offer in this version."""

    topic = "params-and-options"


class UnknownOptionError(ElephantError, TypeError):
    """A param, or an argument by name, that there is not; the message lists those that there are."""

    topic = "params-and-options"


class DataError(ElephantError, ValueError):
    """Rows that cannot be trained on: nulls, ragged arrays, a wrong width, no rows."""

    topic = "columns-and-rows"


class SchemaError(DataError):
    """Columns that cannot be trained on, found from the schema alone."""


class ClusterError(ElephantError, RuntimeError):
    """The Spark application lacks what the fit needs, such as task slots."""

    topic = "the-cluster"


class TrainingError(ElephantError, RuntimeError):
    """A fit that had begun did not end well.

    Attributes:
        retryable: Whether the same fit may succeed when it is started again: it failed of a lost executor, say.
        is_counted: Whether a loss that led to it was counted as a restart already.
    """

    topic = "while-it-trains"
    retryable: bool = False
    is_counted: bool = False


class WorkerFailure(TrainingError):  # noqa: N818  (what happened to one rank)
    """One rank failed.

    Args:
        summary: The failure in one line, such as ``ValueError: no such layer``.
        rank: The rank that failed first.
        host: The host that it ran on.
        executor: Spark's id of the executor there; empty when unknown.
        step: The step of the fit that it was in, counted from one over all epochs, or the first of those that it took
            by one call; None before the first or unknown.
        traceback: The worker's own traceback, or an empty string.
        log_tail: The last lines that its training process printed; the message has the last few of them where a
            traceback says more.
        topic: As of every error; without one, what to do where the user's own code raised it.
    """

    topic = "an-error-in-your-own-code"

    def __init__(
        self,
        summary: str,
        *,
        rank: int,
        host: str,
        executor: str = "",
        step: int | None = None,
        traceback: str = "",
        log_tail: str = "",
        topic: str = "",
    ) -> None:
        self.summary = summary
        self.rank = rank
        self.host = host
        self.executor = executor
        self.step = step
        self.traceback = traceback
        self.log_tail = log_tail
        place = f"rank {rank} on {host}" + (f" (executor {executor})" if executor else "")
        parts = [f"{place} failed{'' if step is None else f' in step {step}'}: {summary}"]
        if traceback:
            trace = traceback.rstrip()
            # Keras' texts are pages, and end the traceback again.
            if "\n" in summary and trace.endswith(summary):
                # With its line, which may begin with the module of the error.
                trace = trace.removesuffix(summary).rpartition("\n")[0].rstrip()
            parts.append(f"Traceback of rank {rank}:\n{trace}")
        if log_tail:
            parts.append(_end_of_output(log_tail, rank, of_little_use=bool(traceback) or KILLED in summary))
        super().__init__("\n\n".join(parts), topic=topic)

    def __reduce__(self) -> tuple[Any, ...]:
        about = {name: getattr(self, name) for name in ("rank", "host", "executor", "step", "traceback", "log_tail")}
        return (_rebuild_worker_failure, (self.summary, about), vars(self))


def _end_of_output(log_tail: str, rank: int, *, of_little_use: bool) -> str:
    """Returns the part of a message with the last lines of a process.

    Where something else says more, these are a few, below earlier ones that look like errors: those of libraries tell
    causes, and other lines follow them.
    """
    lines = log_tail.rstrip().splitlines()
    if not of_little_use or len(lines) <= _FEW_LINES:
        return "\n".join([f"Last lines of rank {rank}'s training process:", *lines])
    earlier = [line for line in lines[:-_FEW_LINES] if _ERROR_LINE.search(line) and not _NO_ERROR.search(line)]
    shown = [*earlier[-_ERROR_LINES:], *lines[-_FEW_LINES:]]
    return "\n".join([f"Last lines of rank {rank}'s training process (more in log_tail):", *shown])


def _rebuild_worker_failure(summary: str, about: dict[str, Any]) -> WorkerFailure:
    return WorkerFailure(summary, **about)


class ServerFailedError(TrainingError):
    """A parameter server has given the fit up; the message says why."""

    topic = "a-parameter-server-that-failed"


class JobCancelledError(TrainingError):
    """The Spark job was cancelled: by its group or tag, in Spark's web pages, or with the whole session."""

    topic = "a-fit-that-was-cancelled"


class CheckpointError(TrainingError):
    """A checkpoint could not be written or read; the message says what is still there."""

    topic = "checkpoints"


class PreemptedError(TrainingError):
    """A worker was asked to end (SIGTERM), and has left with the fit's state in a checkpoint.

    A fit with ``maxRestarts`` goes on from there, and counts no restart.
    """

    topic = "a-fit-that-was-cancelled"


class RowsMovedError(TrainingError):
    """Ranks have other rows than those that a checkpoint within an epoch was made with.

    `elephant.spark.fit.train` goes on from the end of an epoch then, so that no user sees it.
    """


class NetworkError(ElephantError, ConnectionError):
    """A connection between two processes of one fit does not work."""

    topic = "connections-between-workers"


class AuthenticationError(NetworkError):
    """The other side did not prove that it knows the job's token."""


class ProtocolError(NetworkError):
    """Bytes that are not this protocol, or ranks that ask for different things."""


class PeerLostError(NetworkError):
    """The other side closed the connection or died."""


class SupersededError(NetworkError):
    """A newer attempt of the same partition has connected: this one is to end, and has nothing more to say."""


class PositionLost(NetworkError):  # noqa: N818  (it says where to go on: what follows is no failure)
    """A parameter server came back from a snapshot that lacks pushes which it had acknowledged.

    Args:
        step: The last step that it has. The worker pulls, and trains and pushes again from the next one on.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(
            f"Expected a parameter server that has all acknowledged pushes. Received: one that was restored, and has "
            f"those up to step {step}. Pull, and repeat from step {step + 1} on."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (PositionLost, (self.step,))


class DeadlineExceededError(NetworkError, TimeoutError):
    """An operation did not end in the time it was given."""


_ABOUT_WHAT_WAS_PASSED = (DataError, SchemaError, ConfigurationError, UnsupportedError, ClusterError)


def kind_of(error: BaseException) -> str:
    """Returns the name by which an error's class crosses process borders; elephant's own have a prefix.

    >>> kind_of(DataError("no rows")), kind_of(KeyError("x"))
    ('elephant.DataError', 'KeyError')
    """
    kind = type(error)
    return f"elephant.{kind.__name__}" if kind.__module__ == __name__ else kind.__name__


def text_of(error: BaseException) -> str:
    """Returns the text of an error, and what to do where this process, or its host, may open no more files.

    >>> text_of(OSError(errno.EMFILE, "Too many open files"))
    '[Errno 24] Too many open files: this process has all ... that it may have. Raise the limit (ulimit -n) where ...
    >>> text_of(OSError(errno.EPERM, "Operation not permitted"))
    '[Errno 1] Operation not permitted'
    """
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"{error}: this process has all {limit} descriptors that it may have. Raise the limit (ulimit -n) where "
            "driver and executors are started; each connection between ranks takes one"
        )
    if code == errno.ENFILE:
        return f"{error}: this host has all descriptors that it may have. Raise fs.file-max there, or end what has them"
    return error.message if isinstance(error, ElephantError) else str(error)


def shown_text(error: BaseException) -> str:
    """Returns the text of an error as users see it: elephant's own end with the address of what says more.

    >>> print(shown_text(DataError("fit: expected rows to train on.", topic="no-rows")))
    fit: expected rows to train on.
    See https://elephant-spark.github.io/elephant/troubleshooting/#no-rows
    """
    return f"{error.message}\nSee {error.help_url}" if isinstance(error, ElephantError) else str(error)


def topic_of(error: BaseException) -> str:
    """Returns the section on troubleshooting that an error points to; empty of one that is not elephant's.

    >>> topic_of(DataError("no rows", topic="no-rows")), topic_of(DataError("no")), topic_of(KeyError("x"))
    ('no-rows', 'columns-and-rows', '')
    """
    return error.topic if isinstance(error, ElephantError) else ""


def user_error(kind: str, message: str, topic: str = "") -> ElephantError | None:
    """Returns the error of the given kind if it is about what the user passed, whichever process met it.

    >>> user_error("elephant.DataError", "no rows")
    DataError('no rows')
    >>> user_error("KeyError", "x") is None
    True
    """
    by_kind = {f"elephant.{error.__name__}": error for error in _ABOUT_WHAT_WAS_PASSED}
    return by_kind[kind](message, topic=topic) if kind in by_kind else None


def expect(holds: bool, name: str, expected: str, received: object) -> None:
    """Raises ConfigurationError unless a parameter is as expected."""
    if not holds:
        raise ConfigurationError(f"{name}: expected {expected}. Received: {received!r}.")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a sentence with the known name that comes nearest, after a space; empty where none is near."""
    close = nearest(name, known)
    return f" Did you mean {close!r}?" if close else ""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns the known name that comes nearest; empty where none is as near as the cutoff, of 1 at most."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), "")


def short_text(error: BaseException, limit: int = 500) -> str:
    """Returns an error as one line, with its class: of a page of Spark's the first paragraph.

    >>> short_text(ValueError("one\\ntwo"))
    'ValueError: one two'
    """
    return f"{type(error).__name__}: {(first_paragraph(text_of(error)) or 'no message')[:limit].rstrip('.')}"


def first_paragraph(text: str) -> str:
    """Returns the first paragraph of a message as one line; what follows is a traceback, or a page of Spark's."""
    return " ".join(text.split("\n\n")[0].split())


def first_line(error: BaseException | str) -> str:
    """Returns the telling line of an error, which in Spark the stack of its JVM follows."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    java = [line for line in lines[1:] if line.startswith(": ")]
    if lines and lines[0].startswith("An error occurred while calling") and java:
        return java[0].removeprefix(": ")
    return lines[0] if lines else type(error).__name__ if isinstance(error, BaseException) else ""


def brief_errors(function: Function) -> Function:
    """Decorates what users call: elephant's errors show the users' frames alone, and end with an address that helps.

    So do those of Python that elephant raises on purpose; of those that Spark raises, the users' frames are left, too.
    Of the errors behind such a one, those without a frame of the user's code are not shown, Spark's with its Java stack
    among them: the message tells what they were about. Each is still the ``__context__`` of the next.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ElephantError as error:
            error.is_shown = True
            if FULL_TRACEBACK not in os.environ:
                _shorten(error)
            raise error  # ELEPHANT_FULL_TRACEBACK=1 shows all frames
        except KeyboardInterrupt as error:
            # Where elephant waited just then says nothing to who has stopped it.
            if FULL_TRACEBACK not in os.environ:
                _shorten(error)
            # A bare one would have Python 3.10 take back what was left out.
            raise error
        except Exception as error:
            source = _source(error)
            if source == "elephant":
                _add_address(error)
            if FULL_TRACEBACK not in os.environ:
                if source:
                    _shorten(error)
                else:
                    # The error may be that of a callback that runs here.
                    error.__traceback__ = _from_user_frame(error.__traceback__)
            raise error  # ELEPHANT_FULL_TRACEBACK=1 shows all frames

    # Editors that follow the types see the function's own, with its overloads.
    return cast("Function", call)


def pass_over(packages: Iterable[str]) -> None:
    """Leaves frames of packages out of what errors show from now on, as those of elephant."""
    _machinery.update(packages)


def _source(error: Exception) -> str:
    """Returns the package that has raised an error on purpose, elephant or pyspark; empty of any other."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    package = "" if trace is None else _package(trace.tb_frame)
    if package == "elephant" and isinstance(error, _ON_PURPOSE) and "Received: " in str(error):
        return package
    return package if package == "pyspark" else ""


def _add_address(error: Exception) -> None:
    """Has an error of Python's own end as elephant's do, once."""
    address = help_url("loading-and-saving" if isinstance(error, OSError) else "params-and-options")
    if address not in str(error):
        error.args = (f"{error}\nSee {address}",)


def _shorten(error: BaseException, seen: tuple[int, ...] = ()) -> bool:
    """Leaves out the frames that are not the user's; returns whether any are left, here or in an error behind."""
    error.__traceback__ = _user_frames(error.__traceback__)
    behind = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    shows_behind = behind is not None and id(behind) not in seen and _shorten(behind, (*seen, id(error)))
    if behind is not None and not shows_behind:
        error.__cause__, error.__context__, error.__suppress_context__ = None, behind, True
    return shows_behind or error.__traceback__ is not None


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without the frames of elephant and of what it is built on."""
    entries, shown = [], None
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    for entry in reversed(entries):
        if not _is_machinery(entry.tb_frame):
            shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shown


def _from_user_frame(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback from its first frame of the user's code on; all of it where there is none."""
    own = trace
    while own is not None and (_is_machinery(own.tb_frame) or own.tb_frame.f_code.co_filename.startswith(_INSTALLED)):
        own = own.tb_next
    return own or trace


def _is_machinery(frame: FrameType) -> bool:
    return _package(frame) in _machinery


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).split(".")[0]


def warn_user(text: str) -> None:
    """Warns of something that concerns the line of the user's code from which elephant was called."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_machinery(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)


# Kinds of failures without an error: a process of a rank has ended, or frozen, and could not say so itself.
ENDED = "elephant.ProcessEnded"
FROZEN = "elephant.ProcessFrozen"
# The coordinator beside rank 0 was killed, has frozen, or ended by itself.
COORDINATOR_LOST = "elephant.CoordinatorLost"
SUPERSEDED = kind_of(SupersededError(""))


def is_retryable(kind: str) -> bool:
    """Returns whether an error is of a kind that another attempt may not meet, of the same task or of the whole fit.

    A process that ended without a word is of such a kind, however it did: libraries end it so where a device fails.

    Args:
        kind: What `kind_of` says of it.

    >>> is_retryable("elephant.PeerLostError"), is_retryable("elephant.DataError"), is_retryable("ConnectionResetError")
    (True, False, False)
    """
    return kind in _RETRYABLE


def _kinds(error: type[NetworkError]) -> set[str]:
    return {f"elephant.{error.__name__}"}.union(*(_kinds(child) for child in error.__subclasses__()))


_PREEMPTED = "elephant.PreemptedError"
_RETRYABLE = frozenset({ENDED, FROZEN, COORDINATOR_LOST, _PREEMPTED, *_kinds(NetworkError)} - {SUPERSEDED})
