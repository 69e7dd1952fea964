"""`predict_udf`: a trained model as a function of columns, for SQL and DataFrames."""

from __future__ import annotations

import functools
import os
import tempfile
import uuid
from pathlib import Path
from typing import Any

import keras
from pyspark.sql import functions as F  # noqa: N812  (the name that every user of Spark knows)

from elephant.errors import ConfigurationError, UnsupportedError, brief_errors
from elephant.modeling.model_info import InputInfo, ModelInfo
from elephant.modeling.model_spec import Servable
from elephant.spark.column_selection import element_type
from elephant.spark.hadoop_files import read_model_bytes
from elephant.spark.model import KerasModel
from elephant.spark.model_cache import PackedModel
from elephant.spark.params import optional
from elephant.spark.predict_task import Argument, Arguments, predict_arguments, predict_series, raw_columns
from elephant.spark.transform import as_arrow_udf, checked_batch_size, packed, struct_of
from elephant.spark.trust import code_of_file, is_trusted, require_trust

_FILES = (".keras", ".h5")


@brief_errors
def predict_udf(model: KerasModel | keras.Model | str | os.PathLike[str], *, inferenceBatchSize: int = 1024) -> Any:
    """Returns a Spark UDF that gives what the model gives.

    Its arguments are columns, in the order of the model's inputs: arrays of numbers, nested to any depth; ml vectors;
    numbers, several of which make one vector for a model with one input; strings for string inputs; binary tensors.
    It returns a double where the model gives one number, else an ``array<float>``, laid flat; of several outputs a
    struct of these, by the outputs' names.

    Args:
        model: A fitted `KerasModel`; a `keras.Model`, compiled or not; or the path of a ``.keras`` or ``.h5`` file, or
            of a saved `KerasModel`, in which no code runs unless ``spark.elephant.trustSavedModels`` is set.
        inferenceBatchSize: Rows that go through the model at a time.

    Raises:
        ConfigurationError: It is none of these, or cannot be sent to executors.
        UnsupportedError: It was fitted with a preprocessing function.

    Example:
        >>> df.select(elephant.predict_udf(fitted)("features"))  # doctest: +SKIP
        >>> spark.udf.register("score", elephant.predict_udf("digits.keras"))  # doctest: +SKIP
        >>> spark.sql("SELECT id, score(pixels) FROM digits")  # doctest: +SKIP
    """
    facts, pack = _facts_and_model(model)
    columns = tuple(raw_columns(facts.outputs))
    kind = columns[0].spark_type if len(columns) == 1 else struct_of(columns)
    arguments = Arguments(tuple(_argument(known) for known in facts.inputs) or _unknown(facts), facts.x)
    task = (pack, arguments, facts.y, checked_batch_size(inferenceBatchSize), columns)
    if hasattr(F, "arrow_udf"):
        return as_arrow_udf(functools.partial(predict_arguments, *task), kind)
    make: Any = F.pandas_udf
    return make(functools.partial(predict_series, *task), kind, F.PandasUDFType.SCALAR_ITER)


def _facts_and_model(model: Any) -> tuple[ModelInfo, PackedModel]:
    if isinstance(model, (str, os.PathLike)):
        path = os.fspath(model)
        model = _opened(path) if path.endswith(_FILES) else KerasModel.load(path)
    if isinstance(model, KerasModel):
        if optional(model, model.preprocessing) is not None:
            raise UnsupportedError(
                "predict_udf: expected a model without a preprocessing function, which needs the names of its "
                "columns. Received: one with it. Use transform, or a UDF of fitted.model on what the function makes."
            )
        return model.source.facts, model.packed()
    if isinstance(model, keras.Model):
        return ModelInfo.of(model), packed(Servable.of_model(model), model_id=uuid.uuid4().hex)
    raise ConfigurationError(
        "model: expected a KerasModel, a keras.Model or a path. "
        f"Received: {type(model).__module__}.{type(model).__qualname__}."
    )


def _opened(path: str) -> keras.Model:
    content = read_model_bytes(path)
    if content is None:
        raise ConfigurationError(f"model: expected the path of a saved model. Received: {path!r}, where there is none.")
    suffix, safe_mode = Path(path).suffix, not is_trusted(None)
    if safe_mode:
        require_trust(f"model: {path}", code_of_file(content, suffix))
    with tempfile.TemporaryDirectory(prefix="elephant-load-") as folder:
        copy = Path(folder) / f"model{suffix}"
        copy.write_bytes(content)
        try:
            # Without what it was compiled with: its losses may not be here, and are not needed.
            return keras.saving.load_model(copy, compile=False, safe_mode=safe_mode)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"model: Keras cannot open {path}: {error}") from error


def _argument(known: InputInfo) -> Argument:
    return Argument(known.name, element_type(known.dtype), known.shape, known.sparse)


def _unknown(facts: ModelInfo) -> tuple[Argument, ...]:
    """Returns the one argument of a model whose inputs are unknown."""
    return (Argument("input", facts.dtype),)
