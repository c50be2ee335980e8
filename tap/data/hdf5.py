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
NAMED = 8  # of the keys of a file that lacks some, at most so many are named
SIGNATURE = b"\x89HDF\r\n\x1a\n"
# What else is found where an HDF5 file should be, by its first bytes.
OTHER_FORMATS = {
    b"version https://git-lfs": "a Git LFS pointer, not the file that it stands for: run `git lfs pull`",
    b"PK\x03\x04": "a zip archive, as .npz files are, not HDF5: unpack it or convert it",
    b"\x93NUMPY": "a numpy array, not HDF5: convert it",
    b"\x1f\x8b": "compressed by gzip: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it",
    b"PAR1": "a Parquet table, not HDF5: convert it",
    b"\x80": "a pickle, not HDF5: convert it",
    b"<": "a web page or XML, not HDF5: get the file itself",
    b"{": "JSON, not HDF5: convert it",
}


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
        return self._flags(key, values, rows) if key in FLAGS else values

    def read_flags(self, key: str) -> np.ndarray:
        """All of `terminals` or `timeouts` (N,) bool; False if the file has no such column."""
        flags = np.zeros(self.num_rows, bool)
        if key in self.columns:
            for rows in row_chunks(self.num_rows):
                flags[rows] = self.read(key, rows)
        return flags

    def _flags(self, key: str, values: np.ndarray, rows: slice) -> np.ndarray:
        wrong = np.flatnonzero((values != 0) & (values != 1))
        if len(wrong):
            raise ValueError(
                f"{self.path}: {key} has {values[wrong[0]]:g} in row {rows.start + wrong[0]}, but a flag is 0 or 1: "
                "write 1 in the last row of each episode that it ends, and 0 in all others"
            )
        return values.astype(bool)

    def _values(self, key: str, rows: slice) -> np.ndarray:
        try:
            values: np.ndarray = self.columns[key].astype(np.float32)[rows]
        except OSError as error:
            raise ValueError(f"{self.path}: {key} cannot be read ({error}): replace the file with a complete copy") from error
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
    """Open a dataset's file. Raises ValueError if it or a part of it cannot be read, lacks a key, or has wrong shapes."""
    try:
        file = h5py.File(path)
    except OSError as error:
        raise ValueError(_why_unreadable(path, error)) from error
    with file:
        columns = _columns(file, path, info)
        for key, column in columns.items():
            _require_all_parts(column, f"{path}: {key}")
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
    columns = {}
    for key in (*required, "timeouts", "next_observations"):
        try:
            item = file.get(key)
        except OSError as error:  # a link to another file
            raise ValueError(f"{path}: {key} lies in another file, which cannot be read ({error}): put it there") from error
        if isinstance(item, h5py.Dataset):
            columns[key] = item
        elif isinstance(link := file.get(key, getlink=True), h5py.ExternalLink):
            raise ValueError(f"{path}: {key} lies in {link.filename}, which is not there: put it there")
    missing = [key for key in required if key not in columns]
    if missing:
        present: list[str] = []
        file.visititems(lambda name, item: present.append(name) if isinstance(item, h5py.Dataset) else None)
        more = f", and {len(present) - NAMED} more" if len(present) > NAMED else ""
        names = ", ".join(name[:100] for name in present[:NAMED]) + more
        raise ValueError(f"{path} lacks {' and '.join(missing)}; it has {names or 'nothing'}: add what is missing")
    return columns


def _require_all_parts(column: h5py.Dataset, name: str) -> None:
    """Raises ValueError if a column's data is compressed in an unknown way, or lies in other files that are not all there.

    HDF5 reads what is missing there as zeros.
    """
    filters = column.id.get_create_plist()
    for index in range(filters.get_nfilters()):
        code, _, _, label = filters.get_filter(index)
        if not h5py.h5z.filter_avail(code):
            raise ValueError(
                f"{name} is compressed by HDF5 filter {code} ({label.decode(errors='replace')}), which is not installed: "
                "rewrite the file without it, for example by h5repack, or with gzip"
            )
    folder = Path(column.file.filename).parent
    if column.external:
        raise ValueError(
            f"{name} lies in raw files ({column.external[0][0]}): write the data into the file, for example by h5repack"
        )
    folder = Path(column.file.filename).parent
    if not column.is_virtual:
        return
    mapped = 0
    for part in column.virtual_sources():
        source = Path(column.file.filename) if part.file_name == "." else folder / part.file_name
        try:
            with h5py.File(source) as file:
                _require_all_parts(file[part.dset_name], name)
        except (OSError, KeyError) as error:
            raise ValueError(
                f"{name} is a virtual dataset with parts in {source}, {part.dset_name}, which cannot be read ({error}): "
                "put the file there, or write the data into this one"
            ) from error
        mapped += part.vspace.get_select_npoints()
    if mapped < column.size:
        raise ValueError(
            f"{name} is a virtual dataset without data for {column.size - mapped} of its {column.size} values: fix it"
        )


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


def _why_unreadable(path: Path, error: OSError) -> str:
    """Why h5py cannot open a file, and what to do."""
    if path.is_dir():
        return f"{path} is a folder: name an HDF5 file"
    try:
        with path.open("rb") as file:
            first = file.read(64)
    except OSError as unreadable:
        return f"{path} cannot be read ({unreadable.strerror}): allow it, or copy the file"
    if not first:
        return f"{path} is empty: replace it with a complete copy"
    if not first.startswith(SIGNATURE):
        kinds = (kind for start, kind in OTHER_FORMATS.items() if first.startswith(start))
        return f"{path} is {next(kinds, 'not HDF5: convert it')}"
    if "unable to lock" in str(error) or "already open" in str(error):
        return f"{path} is open for writing in another program ({error}): close it there, or copy the file"
    return f"{path} is not a complete HDF5 file ({error}): replace it with a complete copy"
