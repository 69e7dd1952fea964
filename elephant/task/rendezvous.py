"""The one exchange of a run before its ranks are connected: what every rank tells all others before the first step.

The driver's channel makes it (`elephant.monitor.channel`). Where executors do not reach the driver, it is
Spark's ``allGather``, which costs about a second, and in which a rank that waits while another one's task
fails takes its executor down. So there is one per run, and a rank that has failed says so inside it.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from elephant import __version__
from elephant.cluster.session import minor
from elephant.errors import ENDED, ClusterError, DataError, PeerLostError, ProtocolError, user_error
from elephant.monitor.events import RankFailure
from elephant.net.frames import require, shown
from elephant.task.gpu_devices import Device

_OF_IMPORTS = ("ImportError", "ModuleNotFoundError")
# Of a report, as JSON has them.
_FIELDS = {
    "rank": int,
    "run_id": str,
    "name": str,
    "host": str,
    "port": int,
    "num_rows": int,
    "num_marked": int,
    "row_shapes": dict[str, list[int]],
    "versions": dict[str, str],
    "coordinator_ports": list[int],
    "executor": str,
    "assigned": dict[str, Any] | None,
    "shareable": list[dict[str, Any]],
    "failure": dict[str, Any] | None,
}


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Report of one rank to the others.

    Args:
        rank: Its number.
        run_id: The run it belongs to.
        name: Its host, as Spark calls it.
        host: Its address, as its host resolves the name.
        port: Its listener's port.
        num_rows: Rows it holds.
        num_marked: Rows that the indicator column marks for validation.
        row_shapes: Natural shape of a row of each array column, by role.
        versions: Of Python and of the libraries that must be the same everywhere.
        coordinator_ports: Ports beside it, for all ranks: the channel's, then those of parameter servers. Only rank 0
            has any.
        executor: Spark's id of its executor, or nothing.
        assigned: The device that Spark gave it, or None.
        shareable: Those of its host, where Spark gave it none.
        failure: What it has failed of so far, or None.
    """

    rank: int
    run_id: str
    name: str
    host: str
    port: int
    num_rows: int = 0
    num_marked: int = 0
    row_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    coordinator_ports: list[int] = field(default_factory=list)
    executor: str = ""
    assigned: Device | None = None
    shareable: tuple[Device, ...] = ()
    failure: RankFailure | None = None

    def to_text(self) -> str:
        """Returns the form that Spark exchanges."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> RankReport:
        """Reads the form of `to_text`; raises ProtocolError for anything else."""
        try:
            fields = json.loads(text)
            require(fields, _FIELDS, "a rank's report")
            return cls._of(fields)
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"expected a rank's report. Received: {shown(text)} ({error}).") from error

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> RankReport:
        fields["row_shapes"] = {role: tuple(shape) for role, shape in fields["row_shapes"].items()}
        fields["assigned"] = None if fields["assigned"] is None else Device(**fields["assigned"])
        fields["shareable"] = tuple(Device(**device) for device in fields["shareable"])
        fields["failure"] = None if fields["failure"] is None else RankFailure(**fields["failure"])
        return cls(**fields)


def installed_versions() -> dict[str, str]:
    """Returns the versions that driver and ranks must share, without importing what they are of."""
    try:
        keras = importlib.metadata.version("keras")
    except importlib.metadata.PackageNotFoundError:
        keras = "missing"
    return {"python": minor(platform.python_version()), "elephant": __version__, "keras": keras}


def agree(reports: Sequence[RankReport], *, driver_versions: dict[str, str]) -> None:
    """Checks that the ranks can work together.

    Args:
        driver_versions: What of `installed_versions` the driver demands of all.

    Raises:
        ElephantError: A rank has failed: its own error.
        ClusterError: Versions differ, or a host's address is of no use to other hosts.
    """
    _refuse_failed(reports)
    for report in reports:
        refuse_other_versions(report.versions, driver_versions=driver_versions, host=report.name, rank=report.rank)
    _refuse_loopback_between_hosts(reports)


def agreed_row_shapes(reports: Sequence[RankReport]) -> dict[str, tuple[int, ...]]:
    """Checks that the ranks hold rows to train on together.

    Returns:
        Natural shape of a row of each array column, by role.

    Raises:
        DataError: Shapes differ, or there are no rows.
    """
    if sum(report.num_rows for report in reports) == 0:
        raise no_rows()
    if sum(report.num_rows - report.num_marked for report in reports) == 0:
        raise DataError(
            "expected rows to train on. Received: rows that are all marked for validation.", topic="no-rows"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for report in reports:
        for role, shape in report.row_shapes.items():
            if shapes.setdefault(role, tuple(shape)) != tuple(shape):
                raise DataError(
                    f"{role}: expected rows of one shape. "
                    f"Received: {_described(shapes[role])} in one partition, {_described(shape)} in another.",
                    topic="rows-of-another-width",
                )
    return shapes


def _described(shape: Sequence[int]) -> str:
    return f"{shape[0]} values per row" if len(shape) == 1 else f"rows of shape {tuple(shape)}"


def no_rows() -> DataError:
    """Returns the error of a fit on nothing."""
    return DataError("fit: expected rows to train on. Received: a DataFrame without rows.", topic="no-rows")


def _refuse_failed(reports: Sequence[RankReport]) -> None:
    for report in reports:
        if report.failure is not None:
            failure, place = report.failure, f"(rank {report.rank})"
            text = f"{failure.traceback or failure.message} {place}"
            if failure.kind == ENDED:
                raise PeerLostError(f"another rank's process ended before the ranks had met: {text}")
            topic = "other-packages-on-the-executors" if failure.kind in _OF_IMPORTS else ""
            raise user_error(failure.kind, f"{failure.message} {place}", failure.topic) or ClusterError(
                text, topic=topic
            )


def refuse_other_versions(
    versions: Mapping[str, str], *, driver_versions: Mapping[str, str], host: str, rank: int
) -> None:
    """Raises ClusterError unless a rank has the driver's versions.

    Args:
        versions: What `installed_versions` says there.
    """
    received = {name: versions.get(name, "missing") for name in driver_versions}
    if received != driver_versions:
        raise ClusterError(
            f"expected the driver's versions {driver_versions} on every executor. "
            f"Received: {received} on {host} (rank {rank}). "
            "Ship one environment to all of them (spark.archives, or PYSPARK_PYTHON).",
            topic="other-packages-on-the-executors",
        )


def _refuse_loopback_between_hosts(reports: Sequence[RankReport]) -> None:
    if len({report.name for report in reports}) == 1:
        return
    for report in reports:
        if ipaddress.ip_address(report.host).is_loopback:
            raise ClusterError(
                f"expected {report.name} to resolve, on that host, to an address that other hosts reach. "
                f"Received: {report.host} (rank {report.rank}). Set SPARK_LOCAL_IP on the executors, or mend "
                "/etc/hosts.",
                topic="addresses",
            )
