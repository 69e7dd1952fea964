"""Which of a DataFrame's columns a fit is to use, as the user's params say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import Column

from elephant.data.schema import Field
from elephant.errors import SchemaError

# One column; several that make one vector; or by the name of the input or output.
Columns = str | Sequence[str]
ByName = Mapping[str, Columns]


@dataclass(frozen=True, kw_only=True)
class ColumnChoice:
    """The columns of a DataFrame that a fit is to use.

    Args:
        features: For a model with one input: one column, or several numeric ones that make one vector.
        inputs: Columns by the name of the model's input, instead of features; or a list in the order of the inputs.
        label: For a model with one output; None for one that trains without.
        labels: Columns by the name of the model's output, instead of label; or a list.
        weight: A numeric column, or one by the name of each output, or None.
        validation: A boolean column, or None.
    """

    features: Columns = "features"
    inputs: ByName | Sequence[str] | None = None
    label: str | None = "label"
    labels: ByName | Sequence[str] | None = None
    weight: str | Mapping[str, str] | None = None
    validation: str | None = None


@dataclass(frozen=True)
class Prepared:
    """One prepared column: what it holds, and the Spark expression that makes it."""

    field: Field
    expression: Column


def by_name(
    given: ByName | Sequence[str], names: Sequence[str], param: str, *, required: Sequence[str] | None = None
) -> dict[str, list[str]]:
    """Returns the columns of each input or output, in the order of these.

    Args:
        given: What the param says: a dictionary, or a list in the order of the inputs or outputs.
        names: Of the inputs or outputs that may have columns; none when they are unknown, and any name will do.
        param: The param's name.
        required: Of those that must have some; None requires all.

    Raises:
        SchemaError: One has no column that must have one, or a column is for none of them.

    >>> by_name(["a", "b"], ["image", "words"], "inputCols")
    {'image': ['a'], 'words': ['b']}
    """
    kind = "input" if param == "inputCols" else "output"
    required = names if required is None else required
    if not isinstance(given, Mapping):
        # A list names those that must be there, or all.
        named = next((known for known in (required, names) if len(known) == len(given)), None)
        if not names:
            named = [str(position) for position in range(len(given))]
        if named is None:
            hint = " Several columns that make one vector are featuresCol's." if kind == "input" else ""
            raise SchemaError(
                f"{param}: expected a column for each of the model's {kind}s {', '.join(required)}. "
                f"Received: {len(given)} columns: {', '.join(given)}.{hint}"
            )
        return {name: listed(column) for name, column in zip(named, given, strict=True)}
    missing = [name for name in required if name not in given]
    unknown = [name for name in given if names and name not in names]
    if missing or unknown:
        raise SchemaError(
            f"{param}: expected a column for each of the model's {kind}s {', '.join(required or names)}. "
            f"Received: columns for {', '.join(given)}. "
            + (f"Add one for {missing[0]!r}." if missing else f"The model has no {kind} {unknown[0]!r}.")
        )
    return {name: listed(given[name]) for name in (names or given) if name in given}


def listed(columns: Columns) -> list[str]:
    """Returns column names as a list."""
    return [columns] if isinstance(columns, str) else list(columns)
