"""Reading: an HDF5 file in D4RL's layout, one row per step, as a table whose columns are read a chunk of rows at a time."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from tap.data.catalog import ANT_OBSERVATION_DIM, DatasetInfo
from tap.data.layouts import layout_of_folder, layout_of_keys
from tap.data.table import SCALARS, Column, Facts, Table

NUMBERS = "fiub"  # numpy's kinds of dtype: floats, integers, booleans
NAMED = 8  # of the keys of a file that lacks some, at most so many are named
LONGEST = 200  # characters of a text of a file in a message
# What h5py raises where a file is damaged, or has what it does not know; the type depends on the place in the file.
HDF5_ERRORS = (OSError, KeyError, ValueError, TypeError, RuntimeError)
SIGNATURE = b"\x89HDF\r\n\x1a\n"
# What else is found where an HDF5 file should be, by its first bytes.
OTHER_FORMATS = {
    b"version https://git-lfs": "a Git LFS pointer, not the file that it stands for: run `git lfs pull`",
    b"PK\x03\x04": "a zip archive, as .npz files are, not HDF5: set `source: ogbench` if it is OGBench's, or convert it",
    b"\x93NUMPY": "a numpy array, not HDF5: convert it",
    b"\x1f\x8b": "compressed by gzip: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it",
    b"PAR1": "a Parquet table, not HDF5: convert it",
    b"\x80": "a pickle, not HDF5: convert it",
    b"<": "a web page or XML, not HDF5: get the file itself",
    b"{": "JSON, not HDF5: convert it",
}


@dataclass(frozen=True)
class HDF5Table(Table):
    """The columns of an open file: observations, actions, rewards, terminals, and if the file has them timeouts and
    next_observations. In AntMaze, whose observations end with the goal, also infos/goal. Without rewards, they are zeros.
    """

    file: h5py.File

    @property
    def observation_dim(self) -> int:
        return self.dims["observations"] + self.dims.get("infos/goal", 0)

    def read(self, key: str, rows: slice) -> np.ndarray:
        """As `Table.read`; observations end with the goal, if there is one."""
        values = super().read(key, rows)
        if key == "observations" and "infos/goal" in self.columns:
            return np.concatenate([values, self.read("infos/goal", rows)], axis=1)
        return values

    def read_other(self, key: str, rows: slice, most: int) -> np.ndarray | None:
        try:
            item = self.file.get(key)
            if not isinstance(item, h5py.Dataset) or item.dtype.kind not in NUMBERS or item.ndim not in (1, 2):
                return None
            require_all_data(item, key, sparse=True)
            fits = len(item) == self.num_rows and item.size <= most * len(item)
            with np.errstate(over="ignore", invalid="ignore"):
                return np.asarray(item[rows], np.float64).reshape(-1, item.size // len(item)) if fits else None
        except HDF5_ERRORS:
            return None

    def _values(self, key: str, rows: slice) -> np.ndarray:
        if isinstance(self.columns[key], np.ndarray):  # the rewards of a dataset without any
            return super()._values(key, rows)
        with readable(f"{self.path}: {key}"):
            values: np.ndarray = self.file[key].astype(np.float32)[rows]
        return values


@contextmanager
def open_table(path: Path, info: DatasetInfo, *, has_rewards: bool = True) -> Iterator[HDF5Table]:
    """Open a dataset's file, whose rewards are zeros without `has_rewards`.

    Raises ValueError if it or a part of it cannot be read, lacks a key, or has wrong shapes.
    """
    with open_file(path) as file:
        columns = _columns(file, path, info, has_rewards)
        shapes = _check_shapes(columns, path)
        for key, column in columns.items():
            require_all_data(column, f"{path}: {key}", sparse=key in SCALARS)
        dims = {key: item.size // len(item) for key, item in columns.items()}
        if dims.get("next_observations", dims["observations"]) != dims["observations"]:
            raise ValueError(f"{path}: next_observations and observations differ in size ({shapes})")
        if info.suite == "antmaze" and (dims["observations"], dims["infos/goal"]) != (29, 2):
            raise ValueError(f"{path}: AntMaze has observations (N, 29) and infos/goal (N, 2), but this file has {shapes}")
        ant = info.environment == "Ant-v4" or (info.environment == "d4rl" and info.id.startswith("ant-"))
        if ant and dims["observations"] == 111:
            dims |= {key: ANT_OBSERVATION_DIM for key in dims if key.endswith("observations")}
        notes = [] if "timeouts" in columns else ["the file has no `timeouts`"]
        facts = Facts([path], has_rewards=has_rewards, recollected=_is_recollected(file), notes=notes)
        unrewarded: dict[str, Column] = {} if has_rewards else {"rewards": np.zeros(len(columns["actions"]), np.float32)}
        yield HDF5Table(path, columns | unrewarded, dims | dict.fromkeys(unrewarded, 1), facts, file)


@contextmanager
def open_file(path: Path) -> Iterator[h5py.File]:
    """Open an HDF5 file. Raises ValueError, with the reason, if it cannot be read."""
    try:
        file = h5py.File(path)
    except HDF5_ERRORS as error:
        raise ValueError(_why_unreadable(path, error)) from error
    with file:
        yield file


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Raises ValueError if h5py cannot read `what`, a part of a file."""
    try:
        yield
    except HDF5_ERRORS as error:
        raise ValueError(f"{what} cannot be read ({_reason(error)}): replace the file with a complete copy") from error


def _reason(error: Exception) -> str:
    """An error of h5py in one line."""
    return _shown(" ".join(str(error.args[0] if error.args else error).split()))


def _shown(text: str | bytes) -> str:
    """A text of a file, which h5py gives as bytes if it is not UTF-8, in printable characters, and not all of a long one."""
    text = text if isinstance(text, str) else text.decode(errors="replace")
    return (text if text.isprintable() else ascii(text))[:LONGEST]


def _columns(file: h5py.File, path: Path, info: DatasetInfo, has_rewards: bool) -> dict[str, h5py.Dataset]:
    """The required columns, and of the optional ones those that the file has."""
    required = ["observations", "actions"] + ["rewards"] * has_rewards + ["terminals"]
    required += ["infos/goal"] * (info.suite == "antmaze")
    columns = {}
    for key in (*required, "timeouts", "next_observations"):
        with readable(f"{path}: {key}"):
            item, link = file.get(key), file.get(key, getlink=True)
        if isinstance(item, h5py.Dataset):
            columns[key] = item
        elif isinstance(link, h5py.ExternalLink):
            raise ValueError(f"{path}: {key} lies in {_shown(link.filename)}, which is not there: put it there")
    missing = [key for key in required if key not in columns]
    if missing:
        present = _names(file)
        if (layout := layout_of_keys(map(_shown, present))) is not None:
            raise ValueError(f"{path} {layout}")
        more = f", and {len(present) - NAMED} more" if len(present) > NAMED else ""
        names = ", ".join(_shown(name) for name in present[:NAMED]) + more
        imitation = ", or set fetch.reward to none: then the data is only imitated" if missing == ["rewards"] else ""
        raise ValueError(f"{path} lacks {' and '.join(missing)}; it has {names or 'nothing'}: add what is missing{imitation}")
    return columns


def _names(file: h5py.File) -> list[str]:
    """The names of all datasets, of a damaged file those that are found."""
    names: list[str] = []
    with suppress(*HDF5_ERRORS):
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    return names


def _is_recollected(file: h5py.File) -> bool:
    try:
        source = file.attrs.get("source")
    except HDF5_ERRORS:
        return False
    return isinstance(source, str) and source == "recollected"


def require_all_data(column: h5py.Dataset, name: str, sparse: bool, parents: tuple[tuple[Path, int], ...] = ()) -> None:
    """Raises ValueError if a column's data is compressed in an unknown way, or is not all there, in this file or in others.

    HDF5 reads what is missing as zeros, even 10^12 rows of a file of a few kilobytes. A `sparse` column may be written so.
    `parents` are the virtual datasets that this one is a part of: HDF5 never returns from reading one that contains itself.
    """
    with readable(name):
        file, properties, external = Path(column.file.filename), column.id.get_create_plist(), column.external
        filters = [properties.get_filter(index) for index in range(properties.get_nfilters())]
        parts = column.virtual_sources() if column.is_virtual else None
        here = (file.resolve(), h5py.h5o.get_info(column.id).addr)
    for code, _, _, label in filters:
        if not h5py.h5z.filter_avail(code):
            raise ValueError(
                f"{name} is compressed by HDF5 filter {code} ({_shown(label.decode(errors='replace'))}), which is not "
                "installed: rewrite the file without it, for example by h5repack, or with gzip"
            )
    if external:
        raise ValueError(
            f"{name} lies in raw files ({_shown(external[0][0])}): write the data into the file, for example by h5repack"
        )
    if parts is None:
        if not sparse:
            _require_all_values(column, name)
        return
    if here in parents:
        raise ValueError(f"{name} is a virtual dataset that contains itself: write the data into the file")
    mapped = 0
    for part in parts:
        source = file if part.file_name == "." else file.parent / part.file_name
        with ExitStack() as stack:
            try:
                item = stack.enter_context(h5py.File(source))[part.dset_name]
                if not isinstance(item, h5py.Dataset):
                    raise KeyError("not a dataset")
                mapped += part.vspace.get_select_npoints()
            except HDF5_ERRORS as error:
                raise ValueError(
                    f"{name} is a virtual dataset with parts in {_shown(str(source))}, {_shown(part.dset_name)}, which "
                    f"cannot be read ({_reason(error)}): put the file there, or write the data into this one"
                ) from error
            require_all_data(item, name, sparse, (*parents, here))
    if mapped < column.size:
        raise ValueError(
            f"{name} is a virtual dataset without data for {column.size - mapped} of its {column.size} values: fix it"
        )


def _require_all_values(column: h5py.Dataset, name: str) -> None:
    """Raises ValueError if the file has no data for some of a column's values."""
    with readable(name):
        if column.chunks:
            needed = math.prod(-(-size // chunk) for size, chunk in zip(column.shape, column.chunks, strict=True))
            stored = column.id.get_num_chunks()
        else:
            needed, stored = column.nbytes, column.id.get_storage_size()
    if stored < needed:
        raise ValueError(
            f"{name} has room for {column.shape} values, but data for {stored / needed:.1%} of them: finish the recording, "
            "or cut all keys to the rows that were written"
        )


def _check_shapes(columns: Mapping[str, h5py.Dataset], path: Path) -> str:
    """The shapes in words. Raises ValueError if a column is not a table of numbers, or if columns differ in length."""
    types = {}
    for key, item in columns.items():
        with readable(f"{path}: {key}"):
            types[key] = (item.shape, _dtype(item))
    shapes = ", ".join(f"{key} {shape}" for key, (shape, _) in types.items())
    for key, (shape, dtype) in types.items():
        wide = shape and key in SCALARS and shape[1:] not in ((), (1,))
        if not shape or 0 in shape or len(shape) > 2 or dtype is None or dtype.kind not in NUMBERS or wide:
            raise ValueError(
                f"{path}: {key} is not a table of numbers with one row per step, but {shape} "
                f"{_shown(str(dtype or 'of a type that numpy lacks'))} ({shapes})"
            )
    if len({shape[0] for shape, _ in types.values()}) > 1:
        raise ValueError(f"{path}: keys have different numbers of rows ({shapes}): one row of each is one step")
    return shapes


def _dtype(column: h5py.Dataset) -> np.dtype | None:
    """None for a type that numpy lacks."""
    try:
        dtype: np.dtype = column.dtype
    except TypeError:
        return None
    return dtype


def _why_unreadable(path: Path, error: Exception) -> str:
    """Why h5py cannot open a file, and what to do."""
    if path.is_dir():
        return f"{path} is {layout_of_folder(path) or 'a folder: name an HDF5 file'}"
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
        return f"{path} is open for writing in another program ({_reason(error)}): close it there, or copy the file"
    return f"{path} is not a complete HDF5 file ({_reason(error)}): replace it with a complete copy"
