"""Reading: an HDF5 file in D4RL's layout, one row per step, as a table whose columns are read a chunk of rows at a time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from tap.data.catalog import ANT_OBSERVATION_DIM, DatasetInfo
from tap.data.chunks import row_chunks

FLAGS = ("terminals", "timeouts")
SCALARS = (*FLAGS, "rewards")


@dataclass(frozen=True)
class Table:
    """The columns of an open file, all of the same length: observations, actions, rewards, terminals, and if the file has
    them timeouts and next_observations. In AntMaze, whose observations end with the goal, also infos/goal.
    """

    path: Path
    columns: Mapping[str, h5py.Dataset]
    dims: Mapping[str, int]  # how many of a column's leading dimensions are read
    recollected: bool  # whether the file declares that it was recorded again, and is not D4RL's

    @property
    def num_rows(self) -> int:
        return len(self.columns["rewards"])

    @property
    def observation_dim(self) -> int:
        return self.dims["observations"] + self.dims.get("infos/goal", 0)

    @property
    def action_dim(self) -> int:
        return self.dims["actions"]

    def read(self, key: str, rows: slice) -> np.ndarray:
        """Some rows of a column: float32 (rows, dim), rewards (rows,) float32, flags (rows,) bool.

        Raises ValueError if values are not finite in float32, or the file cannot be read.
        """
        values = self._values(key, rows)
        if not np.isfinite(values).all():
            raise self._not_finite(key)
        if key == "observations" and "infos/goal" in self.columns:
            return np.concatenate([values, self.read("infos/goal", rows)], axis=1)
        if key in SCALARS:
            values = values[:, 0]
        return values.astype(bool) if key in FLAGS else values

    def read_flags(self, key: str) -> np.ndarray:
        """All of `terminals` or `timeouts` (N,) bool; False if the file has no such column."""
        flags = np.zeros(self.num_rows, bool)
        if key in self.columns:
            for rows in row_chunks(self.num_rows):
                flags[rows] = self.read(key, rows)
        return flags

    def _values(self, key: str, rows: slice) -> np.ndarray:
        try:
            values: np.ndarray = self.columns[key].astype(np.float32)[rows]
        except OSError as error:
            raise _incomplete(self.path, error) from error
        return values.reshape(len(values), -1)[:, : self.dims[key]]

    def _not_finite(self, key: str) -> ValueError:
        count, first = 0, self.num_rows
        for rows in row_chunks(self.num_rows):
            wrong = ~np.isfinite(self._values(key, rows))
            if wrong.any():
                count, first = count + int(wrong.sum()), min(first, rows.start + int(np.argwhere(wrong)[0, 0]))
        number = f"{count} values that are" if count > 1 else "a value that is"
        return ValueError(f"{self.path}: {key} has {number} not a finite float32, the first in row {first}: fix it")


@contextmanager
def open_table(path: Path, info: DatasetInfo) -> Iterator[Table]:
    """Open a dataset's file. Raises ValueError if it cannot be read, lacks a key, or has keys of the wrong shapes."""
    try:
        file = h5py.File(path)
    except OSError as error:
        raise _incomplete(path, error) from error
    with file:
        columns = _columns(file, path, info)
        shapes = _check_shapes(columns, path)
        dims = {key: item.size // len(item) for key, item in columns.items()}
        if dims.get("next_observations", dims["observations"]) != dims["observations"]:
            raise ValueError(f"{path}: next_observations and observations differ in size ({shapes})")
        if info.suite == "antmaze" and (dims["observations"], dims["infos/goal"]) != (29, 2):
            raise ValueError(f"{path}: AntMaze has observations (N, 29) and infos/goal (N, 2), but this file has {shapes}")
        ant = info.environment == "Ant-v4" or (info.environment == "d4rl" and info.id.startswith("ant-"))
        if ant and dims["observations"] == 111:
            dims |= {key: ANT_OBSERVATION_DIM for key in dims if key.endswith("observations")}
        yield Table(path, columns, dims, file.attrs.get("source") == "recollected")


def _columns(file: h5py.File, path: Path, info: DatasetInfo) -> dict[str, h5py.Dataset]:
    """The required columns, and of the optional ones those that the file has."""
    required = ["observations", "actions", "rewards", "terminals"] + ["infos/goal"] * (info.suite == "antmaze")
    items = {key: file.get(key) for key in (*required, "timeouts", "next_observations")}
    columns = {key: item for key, item in items.items() if isinstance(item, h5py.Dataset)}
    missing = [key for key in required if key not in columns]
    if missing:
        present: list[str] = []
        file.visititems(lambda name, item: present.append(name) if isinstance(item, h5py.Dataset) else None)
        raise ValueError(f"{path} lacks {' and '.join(missing)}; it has {', '.join(present) or 'nothing'}: add what is missing")
    return columns


def _check_shapes(columns: Mapping[str, h5py.Dataset], path: Path) -> str:
    """The shapes in words. Raises ValueError if a column is not a table of numbers, or if columns differ in length."""
    shapes = ", ".join(f"{key} {item.shape}" for key, item in columns.items())
    for key, item in columns.items():
        wide = key in SCALARS and item.shape[1:] not in ((), (1,))
        if not item.size or not 1 <= item.ndim <= 2 or item.dtype.kind not in "fiub" or wide:
            raise ValueError(
                f"{path}: {key} is not a table of numbers with one row per step, but {item.shape} {item.dtype} ({shapes})"
            )
    if len({len(item) for item in columns.values()}) > 1:
        raise ValueError(f"{path}: keys have different numbers of rows ({shapes}): one row of each is one step")
    return shapes


def _incomplete(path: Path, error: OSError) -> ValueError:
    return ValueError(f"{path} is not a complete HDF5 file ({error}): replace it with a complete copy")
