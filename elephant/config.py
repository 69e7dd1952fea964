"""The options of one fit, as frozen values that are checked once, where they are made.

Their fields are the options of `elephant.options`, with its defaults: the table alone declares one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Any

from elephant.algorithms import ALGORITHMS, GOSSIP_ALGORITHMS, Algorithm, parts_of
from elephant.errors import ConfigurationError, UnsupportedError
from elephant.kinds import integer
from elephant.options import OPTION, Scope, options_of, settle
from elephant.timeouts import Timeouts

__all__ = ["AsynchronousOptions", "FitConfig", "Timeouts"]
_BUCKET_BYTES = "ELEPHANT_BUCKET_BYTES"


def _names(scope: Scope) -> list[str]:
    """Returns the options of a scope that are plain values: those whose values have a class are fields of their own."""
    return [option.name for option in options_of(scope) if option.name != "timeouts"]


if TYPE_CHECKING:

    class _Options:
        def __getattr__(self, name: str) -> Any: ...

    class _OptionsOfFit(_Options): ...

    class _OptionsOfServers(_Options): ...

else:

    def _options(name: str, scope: Scope) -> type:
        """Returns a class with a field for each option of a scope."""
        declared = [(own, OPTION[own].type, field(default=OPTION[own].default)) for own in _names(scope)]
        return make_dataclass(name, declared, frozen=True, kw_only=True)

    _OptionsOfFit = _options("_OptionsOfFit", Scope.FIT)
    _OptionsOfServers = _options("_OptionsOfServers", Scope.SERVERS)


@dataclass(frozen=True, kw_only=True)
class AsynchronousOptions(_OptionsOfServers):
    """Options of modes with a parameter server: those of `elephant.options` that have this scope.

    Raises:
        ConfigurationError: A value is out of its range, or two of them exclude each other.
    """

    if TYPE_CHECKING:

        def __init__(self, **options: Any) -> None: ...

    def __post_init__(self) -> None:
        settle(self, Scope.SERVERS, _names(Scope.SERVERS))

    @property
    def algorithm_type(self) -> type[Algorithm]:
        """The algorithm that ``algorithm`` names."""
        return ALGORITHMS[parts_of(self.algorithm)[0]]

    @property
    def elasticity(self) -> float | None:
        """Share of the way that workers and servers move towards each other; None where ``algorithm`` does not say."""
        return parts_of(self.algorithm)[1]


def _bucket_bytes() -> int | None:
    given = os.environ.get(_BUCKET_BYTES)
    try:
        return None if given is None else integer(0).read(given)
    except ValueError as error:
        raise ConfigurationError(f"{_BUCKET_BYTES}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class FitConfig(_OptionsOfFit):
    """Options of one fit: those of `elephant.options` that have this scope, and what they say of waits and servers.

    Args:
        timeouts: Limits of its waits.
        asynchronous: Options of modes with a parameter server.
        bucket_bytes: Bytes of gradients that travel together while the next ones are computed, of which 0 sends all
            together; None measures the network and chooses. The variable ``ELEPHANT_BUCKET_BYTES`` of the driver's
            environment has it.
        elastic: The fewest and the most workers, where ``num_workers`` was a pair; that is then the number of now. None
            of a fit whose number of workers does not change.

    Raises:
        ConfigurationError: A value is out of its range, or two of them exclude each other.

    Examples:
        >>> config = FitConfig(num_workers=(2, 8))
        >>> smaller = config.changed(num_workers=3)
        >>> smaller.num_ranks, smaller.elastic, smaller.batches_per_step
        (3, (2, 8), 8)
    """

    timeouts: Timeouts = field(default_factory=Timeouts)
    asynchronous: AsynchronousOptions = field(default_factory=AsynchronousOptions)
    bucket_bytes: int | None = field(default_factory=_bucket_bytes)
    elastic: tuple[int, int] | None = None

    if TYPE_CHECKING:

        def __init__(self, **options: Any) -> None: ...

    def __post_init__(self) -> None:
        workers = OPTION["num_workers"].value_of(self.num_workers)
        if isinstance(workers, tuple):
            object.__setattr__(self, "elastic", workers)
            object.__setattr__(self, "num_workers", workers[1])
        settle(self, Scope.FIT, _names(Scope.FIT))
        if self.mode == "synchronous" or self.gossips:
            self._refuse_options_of_servers()
        self._refuse_algorithm_of_other_modes()
        if not self.is_synchronous:
            self._refuse_options_of_ranks()

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> FitConfig:
        """Returns the options of a fit from values by the names of options; None leaves the default.

        Examples:
            >>> FitConfig.of({"mode": "hogwild", "port": 4000, "seed": None}).asynchronous.port
            4000
        """
        values = {name: value for name, value in given.items() if value is not None}
        of_servers = {name: values.pop(name) for name in list(values) if OPTION[name].scope is Scope.SERVERS}
        timeouts = Timeouts.of(values.pop("timeouts", {}))
        return cls(**values, timeouts=timeouts, asynchronous=AsynchronousOptions(**of_servers))

    @property
    def keeps_states(self) -> bool:
        """True if a fit with these options can go on from states of before: in a folder, or in the driver's memory.

        Where no rank has a whole model, it is for a folder alone that one is put together.
        """
        is_whole = self.pipeline_stages is None and self.distribution is None
        goes_on = self.max_restarts > 0 or self.elastic is not None
        return self.checkpoint_path is not None or (goes_on and is_whole)

    @property
    def forms_generations(self) -> bool:
        """True if ranks begin again within their Spark job after a loss, each with a whole model."""
        is_whole = self.pipeline_stages is None and self.distribution is None
        return self.is_synchronous and (self.max_restarts > 0 or self.elastic is not None) and is_whole

    def changed(self, **options: Any) -> FitConfig:
        """Returns the same options but for some."""
        return FitConfig(**{**vars(self), **options})

    def _refuse_options_of_servers(self) -> None:
        for option in options_of(Scope.SERVERS):
            value = getattr(self.asynchronous, option.name)
            allowed = (option.in_rounds and self.trains_in_rounds) or (self.gossips and option.name == "algorithm")
            if value != option.default and not allowed:
                have = "have a parameter server"
                if self.trains_in_rounds:
                    have = "have workers that go at their own pace"
                raise ConfigurationError(
                    f"{option.name}: expected mode='asynchronous' or 'hogwild', which {have}. "
                    f"Received: {option.name}={value!r} with {self.way}. Change the mode, or leave "
                    f"{option.name} out."
                )

    def _refuse_algorithm_of_other_modes(self) -> None:
        given, default = self.asynchronous.algorithm, OPTION["algorithm"].default
        if (given in GOSSIP_ALGORITHMS) != self.gossips and given != default:
            expected = " or ".join(map(repr, GOSSIP_ALGORITHMS)) if self.gossips else "mode='gossip'"
            raise ConfigurationError(
                f"algorithm: expected {expected}. Received: algorithm={given!r} with {self.way}. Change the mode, or "
                "leave algorithm out."
            )

    def _refuse_options_of_ranks(self) -> None:
        for option in options_of(Scope.FIT):
            excluded = option.ranks_only and not (option.in_rounds and self.trains_in_rounds)
            if excluded and getattr(self, option.name) != option.default:
                raise ConfigurationError(
                    f"{option.name}: expected {self.way_of_ranks}. Received: {self.way}, in which there is "
                    f"{option.ranks_only}. Leave {option.name} out."
                )

    @property
    def num_ranks(self) -> int:
        """Processes that train: one of each GPU of a worker."""
        return self.num_workers * self.gpus_per_worker

    @property
    def rank_batch_size(self) -> int:
        """Rows of a rank's step: the ranks of a worker share its batch, and those of a model in stages take one."""
        return self.batch_size // self.gpus_per_worker if self.pipeline_stages is None else self.batch_size

    @property
    def num_stages(self) -> int:
        """Parts of the model that are on ranks of their own."""
        stages = self.pipeline_stages
        return stages if isinstance(stages, int) else 1 if stages is None else len(stages) + 1

    @property
    def num_replicas(self) -> int:
        """Copies of the model, each on as many ranks as it has stages."""
        return self.num_ranks // self.num_stages

    @property
    def ranks_per_batch(self) -> int:
        """Ranks that share the ``batch_size`` rows of a step: those of a worker, or those of a model in stages."""
        return self.gpus_per_worker if self.pipeline_stages is None else self.num_stages

    @property
    def batches_per_step(self) -> int:
        """Number of times that ``batch_size`` rows make a synchronous step."""
        return self.batches_of(self.num_ranks)

    def batches_of(self, num_ranks: int) -> int:
        """Returns how many times ``batch_size`` rows make a step of so many ranks, or of an elastic fit's most."""
        return num_ranks // self.ranks_per_batch if self.elastic is None else self.elastic[1]

    @property
    def is_synchronous(self) -> bool:
        """True if ranks exchange with each other, and not with a parameter server."""
        return self.mode == "synchronous" and self.aggregation == "allreduce"

    @property
    def trains_in_rounds(self) -> bool:
        """True if workers take every step together, by way of a parameter server that averages their gradients."""
        return self.mode == "synchronous" and self.aggregation == "server"

    @property
    def gossips(self) -> bool:
        """True if workers go at their own pace and average their weights in pairs, without a server."""
        return self.mode == "gossip"

    @property
    def gossip_algorithm(self) -> str:
        """The algorithm of gossip, by its name in `elephant.gossip.weights`."""
        given = str(self.asynchronous.algorithm)
        return given if given in GOSSIP_ALGORITHMS else GOSSIP_ALGORITHMS[0]

    @property
    def takes_steps_together(self) -> bool:
        """True if all workers take every step together, and so run at the same time."""
        return self.mode == "synchronous"

    @property
    def waits_for_all(self) -> bool:
        """True if all workers take every step together, and have the same to do in it."""
        return self.takes_steps_together and self.pipeline_stages is None

    @property
    def way(self) -> str:
        """The options that say how workers train together, as the user writes them."""
        return "aggregation='server'" if self.trains_in_rounds else f"mode={self.mode!r}"

    @property
    def way_of_ranks(self) -> str:
        """The option to write in its place for ranks that exchange with each other."""
        return "aggregation='allreduce'" if self.trains_in_rounds else "mode='synchronous'"

    @property
    def averages_gradients(self) -> bool:
        """True if ranks exchange gradients at every step, and not weights now and then."""
        return self.frequency == "batch"

    @property
    def pushes_gradients(self) -> bool:
        """True if a parameter server's optimizer applies every step's gradient; otherwise workers push differences."""
        if self.gossips:
            return False
        return bool(self.frequency == "batch" and self.asynchronous.algorithm_type.pushes_gradients)

    def new_algorithm(self) -> Algorithm:
        """Returns the algorithm, which tells what the workers of an asynchronous fit push at the end of a window."""
        return self.asynchronous.algorithm_type(self.num_ranks, self.asynchronous.elasticity)

    def check_background_exchange(self) -> None:
        """Raises UnsupportedError where workers exchange in the background, and push no gradients."""
        if self.asynchronous.background_exchange and not self.pushes_gradients:
            pushing = [name for name, algorithm in ALGORITHMS.items() if algorithm.pushes_gradients]
            raise UnsupportedError(
                "background_exchange: expected workers that push gradients, which is frequency='batch' with the "
                f"algorithm {', '.join(pushing[:-1])} or {pushing[-1]}. Received: frequency={self.frequency!r} with "
                f"the algorithm {self.asynchronous.algorithm}, which exchanges seldom enough. Leave "
                "background_exchange out."
            )
