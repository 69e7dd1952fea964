"""`predict_udf`: a trained model, or a function of the user's, as a function of columns, for SQL and DataFrames."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import os
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
from pyspark import cloudpickle
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import functions as F  # noqa: N812  (the name that every user of Spark knows)
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import DataType, StructField, StructType

from elephant.cluster.spark_private import parsed_type
from elephant.data.casting import lists_of, prepared_column
from elephant.data.ragged import Values
from elephant.data.schema import FEATURES, DataSchema, role_of
from elephant.data.to_numpy import is_list, to_values
from elephant.errors import ConfigurationError, DataError, SchemaError, brief_errors
from elephant.modeling.archive_inspection import UNREADABLE, code_of_file
from elephant.modeling.model_info import InputInfo, ModelInfo
from elephant.modeling.model_spec import Servable
from elephant.rank.input.user_batches import as_array, user_array
from elephant.spark.columns.column_selection import ColumnSelection, element_type, input_columns, target_inputs
from elephant.spark.columns.column_types import raw_field, raw_input_schema
from elephant.spark.columns.spark_types import spark_type
from elephant.spark.hadoop_files import read_model_bytes
from elephant.spark.model import KerasModel, preload_keras
from elephant.spark.params import input_selection, optional
from elephant.spark.saving.trust import is_trusted, require_trust
from elephant.spark.transform import (
    as_arrow_udf,
    checked_batch_size,
    packed,
    packed_content,
    require_predicting,
    struct_of,
)
from elephant.task.model_batches import ROWS_OF_FUNCTION, PackedFunction, pickled
from elephant.task.model_cache import PackedModel
from elephant.task.predict_task import (
    VECTOR_TYPE,
    Argument,
    Arguments,
    Prediction,
    joined,
    on_series,
    output_arrays,
    predict_arguments,
    predict_chunks,
    predict_packed,
    prepared_groups,
    raw_columns,
)

_FILES = (".keras", ".h5")


@brief_errors
def predict_udf(
    model: KerasModel | keras.Model | str | os.PathLike[str] | Callable[[], Any],
    *,
    returnType: DataType | str | None = None,
    batchSize: int | None = None,
    inferenceBatchSize: int | None = None,
) -> Any:
    """Returns a Spark UDF that gives what the model gives.

    Its arguments are columns, in the order of the model's inputs, which is that of their sorted names where they are a
    dictionary: arrays of numbers, nested to any depth; ml vectors; numbers, several of which make one vector for a
    model with one input; strings for string inputs; binary tensors.
    Of a model with ``preprocessing`` they are the columns of its ``featuresCol``, in their order.
    Without returnType it returns a double where the model gives one number, else an ``array<float>``, laid flat; of
    several outputs a struct of these, by the outputs' names.

    Args:
        model: A fitted `KerasModel`; a `keras.Model`, compiled or not; the path of a ``.keras`` or ``.h5`` file, or
            of a saved `KerasModel`, in which no code runs unless ``spark.elephant.trustSavedModels`` is set; or a
            function without arguments that loads a model where it predicts, once in each Python worker: a
            `keras.Model`, or a function from arrays (rows, ...), one of each column, to an array, or for a struct a
            dictionary of arrays, a tuple of them, or a list of one dictionary for each row.
        returnType: What the UDF returns, as a Spark type or in its words, such as ``"array<float>"`` or
            ``"struct<kind: array<float>, price: double>"``; None leaves that to the model, and is for models that
            are here.
        batchSize: Rows that go through the model at a time; None takes inferenceBatchSize.
        inferenceBatchSize: The same, by the name that it has elsewhere; None takes 1024, and with a `keras.Model`
            more where rows are small, and fewer where they are large.

    Raises:
        ConfigurationError: It is none of these, or cannot be sent to executors; or a returnType is missing.

    Examples:
        >>> df.select(elephant.predict_udf(fitted)("features"))  # doctest: +SKIP
        >>> spark.udf.register("score", elephant.predict_udf("digits.keras"))  # doctest: +SKIP
        >>> spark.sql("SELECT id, score(pixels) FROM digits")  # doctest: +SKIP
        >>> load = lambda: keras.saving.load_model("/models/digits.keras")  # doctest: +SKIP
        >>> elephant.predict_udf(load, returnType="array<float>", batchSize=512)  # doctest: +SKIP
    """
    size = checked_batch_size(*((inferenceBatchSize,) if batchSize is None else (batchSize, "batchSize")))
    preload_keras()
    served = _served(model)
    if served.info is not None:
        require_predicting(served.info)
    info, columns = served.info, tuple(raw_columns(served.info.outputs)) if served.info is not None else ()
    if returnType is not None:
        kind = parsed_type(returnType) if isinstance(returnType, str) else returnType
    elif info is not None:
        kind = spark_type(columns[0].arrow_type) if len(columns) == 1 else struct_of(columns)
    else:
        raise ConfigurationError(
            "returnType: expected the type that the UDF returns, because executors alone load the model. "
            "Received: none. Give it, such as returnType='array<float>'."
        )
    function: Callable[[Iterable[Any]], Iterator[pa.Array]]
    if info is not None and returnType is None and served.preprocessing is None:
        function = functools.partial(predict_arguments, served.model, _arguments(info), info.y, size, columns)
    else:
        wanted = None if returnType is None else to_arrow_type(kind)
        answers = functools.partial(_answers, info, wanted, size, served.preprocessing)
        function = functools.partial(predict_packed, served.model, cloudpickle.dumps(answers))
    if hasattr(F, "arrow_udf"):
        return as_arrow_udf(function, kind)
    make: Any = F.pandas_udf
    return make(functools.partial(on_series, function), kind, F.PandasUDFType.SCALAR_ITER)


@dataclass(frozen=True)
class _Served:
    """A model of the user's in the form that travels.

    Args:
        model: The model, or what loads it.
        info: What it takes and gives; None where executors alone load it.
        preprocessing: The function that makes of columns what it takes, and which columns, or None.
    """

    model: PackedModel
    info: ModelInfo | None
    preprocessing: tuple[PackedFunction, ColumnSelection] | None = None


def _served(model: Any) -> _Served:
    if isinstance(model, (str, os.PathLike)):
        path = os.fspath(model)
        model = _opened(path) if path.endswith(_FILES) else KerasModel.load(path)
    if isinstance(model, KerasModel):
        function, info, selection = optional(model, model.preprocessing), model.source.info, input_selection(model)
        if function is None:
            return _Served(model.packed(), info)
        names = [input_info.name for input_info in info.inputs]
        return _Served(
            model.packed(), info, (PackedFunction.of(function, target_inputs(info, selection), names), selection)
        )
    if isinstance(model, keras.Model):
        return _Served(packed(Servable.of_model(model), model_id=uuid.uuid4().hex), ModelInfo.of(model))
    if callable(model):
        return _Served(_packed_loader(model), None)
    raise ConfigurationError(
        "model: expected a KerasModel, a keras.Model, a path, or a function that loads a model. "
        f"Received: {type(model).__module__}.{type(model).__qualname__}."
    )


@dataclass(frozen=True)
class _Loader:
    """A function of the user's in the place of a model: it builds it where it is used."""

    build: Callable[[], Any]


def _packed_loader(make: Callable[[], Any]) -> PackedModel:
    advice = "Have it load the model, and do not keep a model, a SparkSession, a lock or a file in it."
    content = pickled(_Loader(make), "model: the function", advice)
    return packed_content(uuid.uuid4().hex, keras.config.backend(), content)


def _opened(path: str) -> keras.Model:
    content = read_model_bytes(path)
    if content is None:
        raise ConfigurationError(f"model: expected the path of a saved model. Received: {path!r}, where there is none.")
    suffix, safe_mode = Path(path).suffix, not is_trusted(None)
    if safe_mode:
        require_trust(f"model: {path}", code_of_file(content, suffix, is_compiled=False))
    with tempfile.TemporaryDirectory(prefix="elephant-load-") as folder:
        copy = Path(folder) / f"model{suffix}"
        copy.write_bytes(content)
        try:
            # Without what it was compiled with: its losses may not be here, and are not needed.
            return keras.saving.load_model(copy, compile=False, safe_mode=safe_mode)
        except UNREADABLE as error:
            raise ConfigurationError(f"model: Keras cannot open {path}: {error}") from error


def _arguments(info: ModelInfo) -> Arguments:
    # A model whose inputs are unknown has one argument.
    return Arguments(tuple(map(_argument, info.inputs)) or (Argument("input", info.dtype),), info.x)


def _argument(input_info: InputInfo) -> Argument:
    return Argument(input_info.name, element_type(input_info.dtype), input_info.shape, input_info.sparse)


def _answers(
    info: ModelInfo | None,
    kind: pa.DataType | None,
    batch_size: int | None,
    preprocessing: tuple[PackedFunction, ColumnSelection] | None,
    packed_model: PackedModel,
    chunks: Iterable[Sequence[pa.Array]],
) -> Iterator[list[pa.Array]]:
    """Yields the results of a model or a loaded function on each chunk of arguments, in the process that has it.

    Args:
        info: What the model takes and gives; None asks the model, if it is one.
        kind: What the UDF returns; None leaves it to the model's outputs.
    """
    remaining = iter(chunks)
    first = next(remaining, None)
    if first is None:
        return
    given, made = itertools.chain([first], remaining), packed_model.loaded().model
    if not isinstance(made, keras.Model):
        if not callable(made) or kind is None:
            raise ConfigurationError(
                "predict_udf: expected a function that loads a keras.Model or a function on arrays. "
                f"It returned: {type(made).__name__}."
            )
        yield from _function_answers(made, kind, batch_size or ROWS_OF_FUNCTION, given)
        return
    info = info or ModelInfo.of(made)
    groups_of, schema = _grouping(info, preprocessing, first)
    function = None if preprocessing is None else preprocessing[0]
    prediction = Prediction(model=packed_model, schema=schema, outputs=info.y, batch_size=batch_size, function=function)
    for batches in predict_chunks(prediction, prepared_groups(map(groups_of, given), schema)):
        yield [_answer(info, kind, batches)]


def _grouping(
    info: ModelInfo, preprocessing: tuple[PackedFunction, ColumnSelection] | None, first: Sequence[pa.Array]
) -> tuple[Callable[[Sequence[pa.Array]], Sequence[Sequence[pa.Array]]], DataSchema]:
    """Returns how arguments are grouped by the schema's inputs, and the schema, which the first ones tell."""
    if preprocessing is None:
        arguments = _arguments(info)
        return arguments.grouped, arguments.schema(arguments.grouped(first))
    names = input_columns(preprocessing[1])
    if len(first) != len(names):
        raise SchemaError(
            f"predict_udf: expected an argument for each of the columns {', '.join(names)}, which preprocessing "
            f"takes. Received: {len(first)} arguments."
        )
    types = [StructField(name, _spark_type(column.type)) for name, column in zip(names, first, strict=True)]
    schema = raw_input_schema(StructType(types), preprocessing[1])

    def grouped(given: Sequence[pa.Array]) -> Sequence[Sequence[pa.Array]]:
        by_name = dict(zip(names, given, strict=True))
        for name, column in zip(names, given, strict=True):
            if pa.types.is_struct(column.type):
                parts = zip(column.type, column.flatten(), strict=True)
                by_name.update({f"{name}.{part.name}": values for part, values in parts})
        return [[by_name[field.columns[0]]] for field in schema.inputs]

    return grouped, schema


def _spark_type(kind: pa.DataType) -> DataType:
    """Returns the type of an argument's column: ml vectors come as structs."""
    if not pa.types.is_struct(kind):
        return spark_type(kind)
    if [part.name for part in kind] == VECTOR_TYPE.names:
        return VectorUDT()
    return StructType([StructField(part.name, _spark_type(part.type)) for part in kind])


def _answer(info: ModelInfo, kind: pa.DataType | None, batches: Sequence[list[Values]]) -> pa.Array:
    if kind is None:
        columns = raw_columns(info.outputs)
        arrays = output_arrays(columns, batches)
        names = [column.name for column in columns]
        return arrays[0] if len(arrays) == 1 else pa.StructArray.from_arrays(arrays, names)
    if not batches:
        return pa.array([], kind)
    outputs = [joined([batch[place] for batch in batches]) for place in range(len(info.outputs))]
    by_name = dict(zip([output.name for output in info.outputs], outputs, strict=True))
    is_named = pa.types.is_struct(kind) and all(part.name in by_name for part in kind)
    return _column(by_name if is_named else outputs[0] if len(outputs) == 1 else tuple(outputs), kind, len(outputs[0]))


def _function_answers(
    function: Callable[..., Any], kind: pa.DataType, batch_size: int, chunks: Iterable[Sequence[pa.Array]]
) -> Iterator[list[pa.Array]]:
    """Yields the results of a function on arrays for each chunk."""
    row = 0
    for chunk in chunks:
        stacks = not _takes_all(function, len(chunk))
        fields = [
            raw_field(
                StructField(f"argument {place + 1}", _spark_type(column.type)), role_of(FEATURES, place), "predict_udf"
            )
            for place, column in enumerate(chunk)
        ]
        columns = [prepared_column([column], field, first_row=row) for column, field in zip(chunk, fields, strict=True)]
        parts = []
        for start in range(0, len(columns[0]), batch_size):
            arrays = []
            for column, field in zip(columns, fields, strict=True):
                values, shape = to_values(column.slice(start, batch_size), field, first_row=row + start)
                arrays.append(user_array(field, shape or (), values))
            made = function(np.stack(arrays, axis=1)) if stacks else function(*arrays)
            parts.append(_column(made, kind, len(arrays[0])))
        row += len(columns[0])
        yield [pa.concat_arrays(parts) if parts else pa.array([], kind)]


def _takes_all(function: Callable[..., Any], num_columns: int) -> bool:
    """Returns whether a function can be given each column as an argument of its own; True where nobody knows."""
    try:
        inspect.signature(function).bind(*[None] * num_columns)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _column(made: Any, kind: pa.DataType, num_rows: int) -> pa.Array:
    """Returns the results of a model or a function on some rows as a column of a type."""
    if not pa.types.is_struct(kind):
        if isinstance(made, (tuple, Mapping)):
            raise SchemaError(
                "predict_udf: expected one array, or a struct as returnType for several. "
                f"Received: a {type(made).__name__} of {len(made)}."
            )
        return _values(made, kind, num_rows, "the result")
    names = [part.name for part in kind]
    if isinstance(made, (list, tuple)) and made and all(isinstance(row, Mapping) for row in made):
        made = {name: [row.get(name) for row in made] for name in names}
    elif isinstance(made, (list, tuple)) and len(made) == len(names):
        made = dict(zip(names, made, strict=True))
    elif not isinstance(made, Mapping) and len(names) == 1:
        made = {names[0]: made}
    if not isinstance(made, Mapping) or any(name not in made for name in names):
        received = ", ".join(map(repr, made)) if isinstance(made, Mapping) else type(made).__name__
        raise SchemaError(
            f"predict_udf: expected a dictionary of arrays by the names in returnType, {', '.join(names)}. "
            f"Received: {received}."
        )
    arrays = [_values(made[part.name], part.type, num_rows, repr(part.name)) for part in kind]
    return pa.StructArray.from_arrays(arrays, fields=list(kind))


def _values(made: Any, kind: pa.DataType, num_rows: int, title: str) -> pa.Array:
    array = None if isinstance(made, Mapping) else as_array(made)
    if array is None or array.ndim == 0 or len(array) != num_rows:
        received = "a dictionary" if array is None else f"shape {array.shape}"
        raise DataError(f"predict_udf: expected {title} to have {num_rows} rows. Received: {received}.")
    if array.dtype.kind not in "biufV":
        # Strings, and rows of different lengths.
        is_flat = is_list(kind) and not is_list(kind.value_type)
        rows = [(row.ravel() if is_flat else row).tolist() if isinstance(row, np.ndarray) else row for row in array]
        return pa.array(rows, kind)
    return _nested(array.astype(np.float32) if array.dtype.kind == "V" else array, kind, title)


def _nested(array: np.ndarray, kind: pa.DataType, title: str) -> pa.Array:
    """Returns numbers as a column of them, or of lists, nested as the type is; the innermost ones are laid flat."""
    if not is_list(kind):
        if math.prod(array.shape[1:]) != 1:
            raise SchemaError(
                f"predict_udf: expected {title} to be one value for each row, as returnType says. Received: shape "
                f"{array.shape}. Say returnType='array<float>'."
            )
        return pa.array(array.reshape(-1)).cast(kind)
    nested = is_list(kind.value_type)
    if nested and array.ndim < 3:
        raise SchemaError(
            f"predict_udf: expected {title} to be nested as deep as returnType says. Received: shape {array.shape}. "
            "Say returnType='array<float>'."
        )
    width = array.shape[1] if nested else math.prod(array.shape[1:])
    inner = array.reshape(len(array) * width, *(array.shape[2:] if nested else ()))
    return lists_of(_nested(inner, kind.value_type, title), len(array)).cast(kind)
