"""The params of modes with a parameter server."""

from __future__ import annotations

from pyspark.ml.param import Param, Params, TypeConverters

from elephant.config import AsynchronousOptions
from elephant.spark.accessors import optional, with_accessors


@with_accessors
class ServerParams(Params):
    """What modes with a parameter server are asked to do besides."""

    algorithm = Param(
        Params._dummy(),
        "algorithm",
        "asynchronous modes: what workers push: 'downpour', 'adag', 'dynsgd', 'aeasgd', 'eamsgd' or 'sum'",
        typeConverter=TypeConverters.toString,
    )
    elasticity = Param(
        Params._dummy(),
        "elasticity",
        "asynchronous modes: moving rate of 'aeasgd' and 'eamsgd', in (0, 1); not set means 0.9 / numWorkers",
        typeConverter=TypeConverters.toFloat,
    )
    maxStaleness = Param(
        Params._dummy(),
        "maxStaleness",
        "asynchronous modes: steps that a worker may be ahead of the slowest live one (>= 0); not set means no limit",
        typeConverter=TypeConverters.toInt,
    )
    backgroundExchange = Param(
        Params._dummy(),
        "backgroundExchange",
        "asynchronous modes: whether a worker computes a step while the exchange of the last one goes on",
        typeConverter=TypeConverters.toBoolean,
    )
    parameterServers = Param(
        Params._dummy(),
        "parameterServers",
        "asynchronous modes: processes that the weights are divided over (>= 1)",
        typeConverter=TypeConverters.toInt,
    )
    serverPlacement = Param(
        Params._dummy(),
        "serverPlacement",
        "asynchronous modes: where parameter servers run: 'driver' or 'executors'",
        typeConverter=TypeConverters.toString,
    )
    port = Param(
        Params._dummy(),
        "port",
        "asynchronous modes: the first parameter server's port, the others take the next ones; 0 takes free ones",
        typeConverter=TypeConverters.toInt,
    )
    snapshotSeconds = Param(
        Params._dummy(),
        "snapshotSeconds",
        "asynchronous modes: seconds between two snapshots of a parameter server; 0 makes none by time",
        typeConverter=TypeConverters.toFloat,
    )
    snapshotUpdates = Param(
        Params._dummy(),
        "snapshotUpdates",
        "asynchronous modes: updates between two snapshots of a parameter server; 0 makes none by count",
        typeConverter=TypeConverters.toInt,
    )
    maxRefusedUpdates = Param(
        Params._dummy(),
        "maxRefusedUpdates",
        "asynchronous modes: updates with NaN or infinity that are refused before the fit is given up",
        typeConverter=TypeConverters.toInt,
    )

    def __init__(self) -> None:
        super().__init__()
        default = AsynchronousOptions()
        self._setDefault(
            algorithm=default.algorithm,
            backgroundExchange=default.background_exchange,
            parameterServers=default.parameter_servers,
            serverPlacement=default.server_placement,
            port=default.port,
            snapshotSeconds=default.snapshot_seconds,
            snapshotUpdates=default.snapshot_updates,
            maxRefusedUpdates=default.max_refused_updates,
        )

    def asynchronous_options(self) -> AsynchronousOptions:
        """Returns the options, checked; raises ConfigurationError."""
        return AsynchronousOptions(
            algorithm=self.getOrDefault(self.algorithm),
            elasticity=optional(self, self.elasticity),
            max_staleness=optional(self, self.maxStaleness),
            background_exchange=self.getOrDefault(self.backgroundExchange),
            parameter_servers=self.getOrDefault(self.parameterServers),
            server_placement=self.getOrDefault(self.serverPlacement),
            port=self.getOrDefault(self.port),
            snapshot_seconds=self.getOrDefault(self.snapshotSeconds),
            snapshot_updates=self.getOrDefault(self.snapshotUpdates),
            max_refused_updates=self.getOrDefault(self.maxRefusedUpdates),
        )
