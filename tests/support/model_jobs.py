"""Jobs for models with any inputs and outputs, and the one process of plain Keras that they are compared with."""

from dataclasses import dataclass

import keras
import numpy as np

from elephant.config import FitConfig
from elephant.data.schema import (
    DENSE,
    FEATURES,
    LABEL,
    RAGGED,
    SCALAR,
    SPARSE,
    TEXT,
    WEIGHT,
    DataSchema,
    Field,
    pack,
    role_of,
    shifted,
)
from elephant.modeling.model_spec import model_source
from elephant.rank.job import TrainingJob


@dataclass
class Sparse:
    """A column of sparse vectors: a matrix (rows, size) of which the zeros are not kept.

    Args:
        matrix: The rows.
        as_tensor: Whether the model takes a sparse tensor.
        shape: What the model makes of one row; None for a vector.
    """

    matrix: np.ndarray
    as_tensor: bool = True
    shape: tuple | None = None

    def __len__(self):
        return len(self.matrix)

    def __getitem__(self, rows):
        return Sparse(self.matrix[rows], self.as_tensor, self.shape)


class Ragged(list):
    """A column of sequences, each of a length of its own."""

    def __getitem__(self, rows):
        if isinstance(rows, slice):
            return Ragged(super().__getitem__(rows))
        return super().__getitem__(rows) if np.ndim(rows) == 0 else Ragged(list.__getitem__(self, row) for row in rows)


def columns_of(nest, base):
    """Returns the nest with positions in place of columns, and fields and columns by position."""
    fields, columns = [], []

    def number(part):
        if isinstance(part, dict):
            return {name: number(value) for name, value in part.items()}
        if isinstance(part, tuple):
            return tuple(number(value) for value in part)
        role = role_of(base, len(fields))
        fields.append(field_of(part, role))
        columns.append((role, part))
        return len(fields) - 1

    return number(nest), tuple(fields), dict(columns)


def field_of(column, role):
    if isinstance(column, Sparse):
        shape = column.shape or column.matrix.shape[1:]
        return Field(role, (role,), str(column.matrix.dtype), SPARSE, shape, column.as_tensor)
    if isinstance(column, Ragged):
        first = np.asarray(column[0])
        return Field(role, (role,), str(first.dtype), RAGGED, (None, *first.shape[1:]))
    if column.dtype == object:
        return Field(role, (role,), "string", TEXT, column.shape[1:])
    return Field(role, (role,), str(column.dtype), DENSE if column.ndim > 1 else SCALAR, column.shape[1:])


def job_of(model, x, y=None, w=None, *, class_weight=None, callbacks=(), targets=None, y_nest=None, **options):
    """Returns the `TrainingJob` of a model, and its columns by role.

    Args:
        model: A compiled model, or a function that returns one.
        x: Columns, nested as the model takes them: numpy arrays (rows, ...), `Ragged` or `Sparse`.
        y: Those of labels; None trains without.
        w: Those of weights, or None.
        class_weight: Weights by class.
        callbacks: The user's.
        targets: For an autoencoder, a nest of positions of inputs.
        y_nest: How labels are nested, where outputs without a loss repeat one.
        options: Of `FitConfig`.
    """
    x_nest, inputs, columns = columns_of(x, FEATURES)
    own_nest, labels, more = columns_of(y, LABEL) if y is not None else (0, (), {})
    y_nest = own_nest if y_nest is None else y_nest
    w_nest, weights, even_more = columns_of(w, WEIGHT) if w is not None else (0, (), {})
    autoencoder = targets is not None
    schema = DataSchema(
        inputs, labels, weights, x=x_nest, y=targets if autoencoder else y_nest, w=w_nest, inputs_as_labels=autoencoder
    )
    job = TrainingJob(model_source(model), tuple(callbacks), FitConfig(**options), schema, class_weight=class_weight)
    return job, {**columns, **more, **even_more}


def rows_of(columns, rows):
    """Returns the columns' rows at the given positions."""
    return {role: column[rows] for role, column in columns.items()}


def split_columns(columns, sizes):
    """Returns the columns' rows as one dictionary per rank."""
    bounds = np.cumsum([0, *sizes])
    return [rows_of(columns, slice(start, stop)) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]


def batches_of(job, columns, sizes):
    """Yields for each step of one epoch the global batch as Keras takes it: the k-th batch of every rank, in order."""
    starts, length = np.cumsum([0, *sizes])[:-1], job.config.batch_size
    for step in range(-(-max(sizes) // length)):
        chosen = [
            start + np.arange(min(step * length, size), min((step + 1) * length, size))
            for start, size in zip(starts, sizes, strict=True)
        ]
        yield as_keras(job.schema, rows_of(columns, np.concatenate(chosen)))


def as_keras(schema, columns):
    """Returns ``(x, y, sample_weight)`` of a batch, with None for what there is not."""
    arrays = [tensor_of(columns[field.role]) for field in schema.batch_fields]
    x, y, w = pack(schema.x, arrays), None, None
    if schema.inputs_as_labels:
        y = pack(schema.y, arrays)
    elif schema.labels:
        y = pack(shifted(schema.y, len(schema.inputs)), arrays)
    if schema.weights:
        w = pack(shifted(schema.w, len(schema.inputs) + len(schema.labels)), arrays)
    return x, y, w


def tensor_of(column):
    if isinstance(column, Sparse):
        rows = column.matrix.reshape(len(column), *(column.shape or column.matrix.shape[1:]))
        if not column.as_tensor or keras.config.backend() != "tensorflow":
            return rows
        import tensorflow as tf

        return tf.sparse.from_dense(rows)
    if isinstance(column, Ragged):
        first = np.asarray(column[0])
        longest = max(len(row) for row in column)
        padded = np.zeros((len(column), longest, *first.shape[1:]), first.dtype)
        for place, row in enumerate(column):
            padded[place, : len(row)] = row
        return padded
    return keras.ops.convert_to_tensor(column.tolist(), dtype="string") if column.dtype == object else column


def train_plainly(model, job, columns, sizes):
    """Trains a model with plain Keras on the global batches; returns it."""
    for _ in range(job.config.epochs):
        for batch in batches_of(job, columns, sizes):
            fit_on([batch], model, class_weight=job.class_weight)
    return model


def fit_on(batches, model, **options):
    """Returns the history of a plain fit on batches ``(x, y, sample_weight)``."""
    packed = [keras.utils.pack_x_y_sample_weight(*batch) for batch in batches]
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf

        # Not train_on_batch, which makes sparse tensors dense.
        datasets = [tf.data.Dataset.from_tensors(batch) for batch in packed]
        dataset = datasets[0]
        for other in datasets[1:]:
            dataset = dataset.concatenate(other)
        return model.fit(dataset, verbose=0, **options).history
    if options.get("class_weight") is not None:
        # Keras takes them with arrays alone.
        ((x, y, _),) = batches
        return model.fit(x, y, batch_size=len(y), shuffle=False, verbose=0, **options).history
    tuples = [batch if isinstance(batch, tuple) else (batch,) for batch in packed]
    return model.fit((batch for batch in tuples), steps_per_epoch=len(tuples), verbose=0, shuffle=False).history


def weights_of(model):
    """Returns copies of a model's weights."""
    return [np.array(keras.ops.convert_to_numpy(weight)) for weight in model.weights]
