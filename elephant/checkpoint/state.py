"""State of a fit in a checkpoint, its manifest, and what it must agree in with the fit that goes on from it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from elephant.config import FitConfig
from elephant.errors import ConfigurationError
from elephant.storage.folder import DAMAGES, DamagedError, sealed, unsealed

# The first format has the model's variables by their places, model/0, model/1 and so on, and no names in its facts.
FORMAT = 2
_READABLE = (1, FORMAT)
_NAME = re.compile(r"^epoch-(\d{8})(?:\.step-(\d{8}))?\.([0-9a-f]{16})\.(json|(?:state|frozen|result)\.npz)$")

# Others may change: workers, epochs, the size of batches, where rows are kept, how they travel.
_FIXED = (
    "mode",
    "aggregation",
    "seed",
    "shuffle",
    "validation_fraction",
    "frequency",
    "steps_per_epoch",
    "learning_rate",
    "scale_learning_rate",
    "bucket_by_length",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class FitState:
    """A fit at the end of an epoch, or after some steps of the next one.

    >>> arrays = {"model/dense/bias": np.ones(2), "model/dense/kernel": np.zeros(3), "part/0/0": np.zeros(1)}
    >>> names = ["model/dense/kernel", "model/dense/bias"]
    >>> state = FitState(epochs=2, arrays=arrays, facts={"variables": names})
    >>> [array.tolist() for array in state.variables]
    [[0.0, 0.0, 0.0], [1.0, 1.0]]
    """

    epochs: int
    # of the epoch that has begun; of workers at their own pace, those of all of them together
    step: int = 0
    # one number per epoch and metric, over all workers, of all of them
    history: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    # by path, see `elephant.modeling.variable_paths`; what has no path is called kind/0, kind/1 and so on
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)  # what is no array, as JSON values

    @property
    def variable_names(self) -> list[str]:
        """The names of the model's weights and of its optimizer's variables, in `read_variables`' order."""
        return list(self.facts.get("variables") or self._places("model"))

    @property
    def variables(self) -> list[np.ndarray]:
        """The model's weights and its optimizer's variables, in `read_variables`' order."""
        return [self.arrays[name] for name in self.variable_names]

    @property
    def frozen(self) -> dict[str, np.ndarray]:
        """The weights that are as they were in the first state of the fit, such as those of a frozen base, by name."""
        return {name: self.arrays[name] for name in self.facts.get("frozen", ())}

    def group(self, kind: str) -> list[np.ndarray]:
        """Returns the arrays of a kind, in order; none when there are none."""
        return [self.arrays[name] for name in self._places(kind)]

    def _places(self, kind: str) -> Iterator[str]:
        return itertools.takewhile(self.arrays.__contains__, (f"{kind}/{place}" for place in itertools.count()))

    def without_arrays(self) -> FitState:
        """Returns a copy without the arrays, for workers that only need to know where it is."""
        return replace(self, arrays={})


def place_in_words(epochs: int, step: int, unit: str = "epoch") -> str:
    """Returns where a state is, for the user.

    >>> place_in_words(3, 0), place_in_words(3, 12)
    ('epoch 3', 'epoch 3 and 12 steps')
    """
    return f"{unit} {epochs}" + (f" and {step} step{'s' * (step != 1)}" if step else "")


def named(kind: str, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns arrays of a kind by the names that `FitState.group` finds them by.

    >>> named("model", [np.zeros(1)])
    {'model/0': array([0.])}
    """
    return {f"{kind}/{index}": array for index, array in enumerate(arrays)}


def joined(before: Mapping[str, Sequence[Any]], after: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Returns one history of two that follow one another.

    >>> joined({"loss": [3.0]}, {"loss": [2.0], "val_loss": [4.0]})
    {'loss': [3.0, 2.0], 'val_loss': [4.0]}
    """
    return {name: [*before.get(name, []), *after.get(name, [])] for name in {**before, **after}}


def identity_of(config: FitConfig) -> dict[str, Any]:
    """Returns the options that a checkpoint keeps, as JSON values: the fixed ones, and those that make batches."""
    fixed = {name: getattr(config, name) for name in _FIXED}
    # The batches of an elastic fit are those of its most workers, however many there are.
    elastic = {} if config.elastic is None else {"elastic": config.elastic[1]}
    return {
        **fixed,
        **elastic,
        "algorithm": config.asynchronous.algorithm,
        "num_workers": config.num_ranks if config.elastic is None else config.elastic[1],
        "batch_size": config.rank_batch_size,
        # Rows on a disk are drawn in another order than those in memory.
        "cache": config.cache,
    }


def is_saved(done: int, config: FitConfig, *, stopped: bool) -> bool:
    """Returns whether there is to be a checkpoint after so many epochs: every few, and at the end.

    >>> config = FitConfig(epochs=5, checkpoint_path="kept", checkpoint_epochs=2)
    >>> [is_saved(done, config, stopped=False) for done in range(1, 6)]
    [False, True, False, True, True]
    """
    if not config.keeps_states:
        return False
    return stopped or done % config.checkpoint_epochs == 0 or done >= config.epochs


def require_same_fit(kept: Mapping[str, Any], config: FitConfig, url: str) -> None:
    """Raises ConfigurationError when a fit that is to go on has options of another one."""
    # Those of versions that had no other way do not name it.
    kept = {"aggregation": "allreduce", **kept}
    for name, value in identity_of(config).items():
        if name not in ("num_workers", "batch_size", "cache", "elastic") and name in kept and kept[name] != value:
            raise ConfigurationError(
                f"{name}: expected {kept[name]!r}, with which the checkpoints in {url} were made. Received: {value!r}. "
                "Leave it as it was, or give another checkpointPath to a fit that begins anew.",
                topic="checkpoints",
            )


def require_same_optimizers(facts: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises ConfigurationError when the model has other optimizers than the fit that it is to go on with.

    What one remembers means something else to another, and may well be of the same shapes.
    """
    kept = facts.get("optimizer_names", list(names))
    if kept != list(names):
        raise ConfigurationError(
            f"model: expected to be compiled with {', '.join(kept)}, with which the checkpoint was made. "
            f"Received: {', '.join(names)}. Compile it as it was, or give another checkpointPath to a fit that begins "
            "anew.",
            topic="checkpoints",
        )


def changes_of(kept: Mapping[str, Any], config: FitConfig) -> list[str]:
    """Returns a sentence for the user for each option that may differ, and does.

    >>> changes_of({"num_workers": 4, "batch_size": 32}, FitConfig(num_workers=2))
    ['4 workers before, 2 now: batches of all workers, and who has which rows, are others from here on']
    """
    changes = []
    workers = identity_of(config)["num_workers"]
    if kept.get("num_workers", workers) != workers:
        changes.append(
            f"{kept['num_workers']} workers before, {workers} now: batches of all workers, and who has "
            "which rows, are others from here on"
        )
        if config.validation_fraction:
            changes.append(
                "validationFraction draws from each worker's rows: some that were trained on are for validation now, "
                "and the other way round. A validationIndicatorCol keeps them apart"
            )
    if kept.get("batch_size", config.rank_batch_size) != config.rank_batch_size:
        changes.append(f"batches of {kept['batch_size']} rows before, of {config.rank_batch_size} now")
    return changes


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file that belongs to a checkpoint."""

    name: str
    num_bytes: int
    crc: int

    def __post_init__(self) -> None:
        known = isinstance(self.name, str) and is_ours(self.name) and not is_manifest(self.name)
        _require(known, f"expected the name of a checkpoint's arrays. Received: {self.name!r}")
        _require(_is_count(self.num_bytes) and _is_count(self.crc), f"{self.name}: expected a length and a checksum")


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """Description of a checkpoint, with the names of its files.

    >>> stored = StoredFile(name="epoch-00000001.0123456789abcdef.state.npz", num_bytes=3, crc=5)
    >>> manifest = CheckpointManifest(epochs=1, number=4, state=stored)
    >>> CheckpointManifest.from_bytes(manifest.to_bytes()) == manifest
    True
    """

    epochs: int
    number: int  # counts the checkpoints of a folder
    state: StoredFile
    step: int = 0  # of the epoch that has begun
    # weights that are not in the state, which several checkpoints share
    frozen_file: StoredFile | None = None
    # the model's variables at the end of the fit, where they are others than those of the state
    result: StoredFile | None = None
    finished: bool = False  # whether the fit has ended, and has nothing left to do
    history: Mapping[str, Any] = field(default_factory=dict)  # one number per epoch and metric
    facts: Mapping[str, Any] = field(default_factory=dict)  # what else is no array
    finite: bool = True  # whether the model has neither NaN nor infinity

    def __post_init__(self) -> None:
        counts = (self.epochs, self.step, self.number)
        _require(all(map(_is_count, counts)), "epochs, step and number: expected counts")
        _require(all(isinstance(one, bool) for one in (self.finished, self.finite)), "expected booleans")
        _require(isinstance(self.facts, Mapping), "facts: expected an object")
        for fact in ("variables", "frozen"):
            names = self.facts.get(fact, [])
            _require(isinstance(names, list) and all(isinstance(one, str) for one in names), f"{fact}: expected names")
        _require(
            isinstance(self.history, Mapping) and all(isinstance(one, (list, tuple)) for one in self.history.values()),
            "history: expected lists",
        )

    @property
    def place(self) -> tuple[int, int]:
        """Epochs that are done, and steps of the next one."""
        return self.epochs, self.step

    @property
    def age(self) -> tuple[int, int]:
        """Sorts by what is newer: of one epoch the one that came later, which a fit that went back has left."""
        return self.epochs, self.number

    @property
    def files(self) -> list[StoredFile]:
        """Those that belong to it."""
        return [file for file in (self.state, self.frozen_file, self.result) if file is not None]

    def is_done(self, epochs: int | None = None) -> bool:
        """Returns whether nothing is left to train of so many epochs, or of those that its fit was asked for."""
        enough = epochs is None or self.epochs >= epochs or bool(self.facts.get("stopped"))
        return self.finished and enough

    def to_bytes(self) -> bytes:
        """Returns the file's content."""
        body = asdict(self)
        if not self.step:
            # Those before there were any do not know the word.
            del body["step"]
        if self.frozen_file is None:
            del body["frozen_file"]
        return sealed({"format": FORMAT, **body})

    @classmethod
    def from_bytes(cls, content: bytes) -> CheckpointManifest:
        """Reads the form of `to_bytes`.

        Raises:
            DamagedError: The content is not whole, or of a format that this version does not know.
        """
        try:
            body = unsealed(content)
            if (version := body.pop("format")) not in _READABLE:
                later = ", of a later version of elephant" if _is_count(version) and version > FORMAT else ""
                raise DamagedError(f"format {version!r}{later}; this one reads {' and '.join(map(str, _READABLE))}")
            body = {"frozen_file": None, **body}
            for name in ("state", "frozen_file", "result"):
                body[name] = None if body[name] is None else StoredFile(**body[name])
            return cls(**body)
        except DAMAGES as error:
            raise error if isinstance(error, DamagedError) else DamagedError(f"no manifest: {error}") from error


def _require(is_so: bool, expected: str) -> None:
    if not is_so:
        raise DamagedError(expected)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def file_name(epochs: int, step: int, writing: str, kind: str) -> str:
    """Returns the name of a file of a checkpoint.

    >>> file_name(3, 0, "0123456789abcdef", "json"), file_name(3, 12, "0123456789abcdef", "json")
    ('epoch-00000003.0123456789abcdef.json', 'epoch-00000003.step-00000012.0123456789abcdef.json')
    """
    return f"epoch-{epochs:08d}.{f'step-{step:08d}.' if step else ''}{writing}.{kind}"


def is_ours(name: str) -> bool:
    """Returns whether a name is one of `file_name`.

    >>> is_ours("epoch-00000001.0123456789abcdef.json"), is_ours("notes.json")
    (True, False)
    """
    return _NAME.match(name) is not None


def is_manifest(name: str) -> bool:
    """Returns whether a name is that of a manifest."""
    return is_ours(name) and name.endswith(".json")


def place_of(name: str) -> tuple[int, int]:
    """Returns the epochs that a file's name says, and the steps of the next one.

    >>> place_of("epoch-00000003.step-00000012.0123456789abcdef.json")
    (3, 12)
    """
    match = _NAME.match(name)
    if match is None:
        raise ValueError(f"{name!r} is no file of a checkpoint")
    return int(match[1]), int(match[2] or 0)
