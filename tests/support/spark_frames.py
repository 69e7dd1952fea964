"""DataFrames whose partitions hold exactly the rows that a test gives them."""

import numpy as np


def partitioned_frame(spark, parts, schema):
    """Returns a DataFrame with one partition per item of ``parts``, each a list of row tuples, in that order."""
    numbered = list(enumerate(parts))
    rdd = spark.sparkContext.parallelize(numbered, len(parts)).flatMap(lambda item: item[1])
    return spark.createDataFrame(rdd, schema)


def rows_of(columns):
    """Returns arrays by name, shape (rows, ...), as row tuples of Python values."""
    return list(zip(*[np.asarray(values).tolist() for values in columns.values()], strict=True))


def split_rows(columns, sizes):
    """Returns the row tuples of each partition."""
    rows, bounds = rows_of(columns), np.cumsum([0, *sizes])
    return [rows[start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
