"""A recording's steps as a table: columns of equal length, read a chunk of rows at a time from whatever files hold them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tap.data.action_bounds import ActionBounds
from tap.data.chunks import row_chunks
from tap.results import OwnEnvironment

FLAGS = ("terminals", "timeouts")
SCALARS = (*FLAGS, "rewards")


class Column(Protocol):
    """A column (N, ...) in its file's own type, whose rows are read by slicing."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __getitem__(self, rows: slice, /) -> np.ndarray: ...


@dataclass(frozen=True)
class Parts:
    """A column that lies in parts, such as files or episodes; a part is read when some of its rows are."""

    offsets: np.ndarray  # (P + 1,) int64: the first row of each part, and N
    dim: int
    dtype: np.dtype[Any]
    part: Callable[[int], np.ndarray]  # reads a part by its index: (rows, dim)

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.offsets[-1]), self.dim

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        first, last = np.searchsorted(self.offsets, [start, stop - 1], side="right") - 1
        parts = [np.zeros((0, self.dim), self.dtype)]
        for index in range(first, last + 1):
            begin = int(self.offsets[index])
            parts.append(self.part(index)[max(start - begin, 0) : stop - begin])
        return np.concatenate(parts)


@dataclass(frozen=True)
class Facts:
    """What a recording says about itself, as far as it does."""

    files: Sequence[Path]  # those that are read
    has_rewards: bool = True  # otherwise all rewards are 0
    recollected: bool = False  # whether it declares that it was recorded again, and is not D4RL's
    fps: float | None = None  # steps per second
    tasks: Sequence[str] = ()  # in words
    observation_names: Sequence[str] = ()  # of each dimension
    action_names: Sequence[str] = ()
    action_bounds: ActionBounds | None = None
    environment: OwnEnvironment | None = None  # to evaluate policies in
    notes: Sequence[str] = ()  # sentences for its validation report


@dataclass(frozen=True)
class Table:
    """The columns of a recording, all of the same length: observations, actions, rewards, and what its reader needs besides."""

    path: Path
    columns: Mapping[str, Column]
    dims: Mapping[str, int]  # how many of a column's leading dimensions are read
    facts: Facts
    place: Callable[[int], str] = field(default="row {}".format, kw_only=True)  # where a row is found, in words

    @property
    def num_rows(self) -> int:
        return self.columns["rewards"].shape[0]

    @property
    def observation_dim(self) -> int:
        return self.dims["observations"]

    @property
    def action_dim(self) -> int:
        return self.dims["actions"]

    def read(self, key: str, rows: slice) -> np.ndarray:
        """Some rows of a column: float32 (rows, dim), rewards (rows,) float32, flags (rows,) bool.

        Raises ValueError if values are not finite in float32, or the file cannot be read.
        """
        values = self._float32(key, rows)
        if not np.isfinite(values).all():
            raise self._not_finite(key)
        if key in SCALARS:
            values = values[:, 0]
        return self._flags(key, values, rows) if key in FLAGS else values

    def read_flags(self, key: str) -> np.ndarray:
        """All of `terminals` or `timeouts` (N,) bool; False if the file has no such column."""
        flags = np.zeros(self.num_rows, bool)
        if key in self.columns:
            for rows in row_chunks(self.num_rows):
                flags[rows] = self.read(key, rows)
        return flags

    def read_other(self, key: str, rows: slice, most: int) -> np.ndarray | None:
        """Some rows of a key that is no column, (rows, dim) float64, not all of them finite.

        None if the file has no table there of at most `most` dimensions and as many rows as the columns. One number per row
        is one dimension.
        """
        return None

    def _float32(self, key: str, rows: slice) -> np.ndarray:
        values = self._values(key, rows)
        return values.reshape(len(values), -1)[:, : self.dims[key]]

    def _values(self, key: str, rows: slice) -> np.ndarray:
        """Some rows of a column in float32, infinite where they are too large for it."""
        with np.errstate(over="ignore"):
            return np.asarray(self.columns[key][rows], np.float32)

    def _flags(self, key: str, values: np.ndarray, rows: slice) -> np.ndarray:
        wrong = np.flatnonzero((values != 0) & (values != 1))
        if len(wrong):
            raise ValueError(
                f"{self.path}: {key} has {values[wrong[0]]:g} in {self.place(rows.start + int(wrong[0]))}, but a flag is 0 or "
                "1: write 1 in the last row of each episode that it ends, and 0 in all others"
            )
        return values.astype(bool)

    def _not_finite(self, key: str) -> ValueError:
        count, first = 0, self.num_rows
        for rows in row_chunks(self.num_rows):
            wrong = ~np.isfinite(self._float32(key, rows))
            if wrong.any():
                count, first = count + int(wrong.sum()), min(first, rows.start + int(np.argwhere(wrong)[0, 0]))
        number = f"{count} values that are" if count > 1 else "a value that is"
        return ValueError(f"{self.path}: {key} has {number} not a finite float32, the first in {self.place(first)}: fix it")
