"""Reading numbers with pyarrow: errors in one sentence, lists as matrices."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

LONGEST = 200  # characters of pyarrow's reason in a message


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Raises ValueError if pyarrow cannot read `file`."""
    try:
        yield
    except (pa.ArrowException, OSError, KeyError) as error:
        reason = " ".join(str(error.args[0] if error.args else error).split())[:LONGEST]
        raise ValueError(f"{file} cannot be read ({reason}): replace the file with a complete copy") from error


def matrix(column: pa.ChunkedArray | pa.Array, name: str, dim: int) -> np.ndarray:
    """A column of numbers, or of lists of them at any depth, as (rows, dim) in its own type.

    Raises ValueError, about `name`, if values are missing or a row has another number of them.
    """
    rows, values = len(column), column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    nulls = values.null_count
    while not nulls and hasattr(values, "value_lengths"):
        if len(values.value_lengths().unique()) > 1:
            raise ValueError(f"{name} has lists of different lengths: rewrite it with {dim} values in each row")
        values = values.flatten()
        nulls += values.null_count
    if nulls or len(values) != rows * dim:
        found = "values that are missing" if nulls else f"{len(values)} values in {rows} rows"
        raise ValueError(f"{name} has {found}, but its metadata say {dim} in each row: correct the dataset")
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(rows, dim)
