"""Reading: an OGBench dataset, one .npz file, one row per state.

                 trajectory 1    trajectory 2
    observations  s0 s1 s2 s3     s0 s1 s2 s3
    actions       a0 a1 a2 a3     a0 a1 a2 a3
    terminals      .  .  .  1      .  .  .  1      the last state
    step           x  x  x         x  x  x

- The last row of a trajectory has no next state: its action was not executed, and the row is left out.
- Trajectories are truncated: `terminals` only separates them. The file has no rewards: all are 0.
"""

import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from tap.data.boundaries import Boundaries
from tap.data.chunks import row_chunks
from tap.data.table import Facts, Parts, Table

NUMBERS = "fiub"  # numpy's kinds of dtype: floats, integers, booleans
# What zipfile and numpy raise where a file is damaged.
ERRORS = (zipfile.BadZipFile, zlib.error, OSError, EOFError, KeyError, ValueError, NotImplementedError, SyntaxError)


@dataclass(frozen=True)
class Array:
    """An array in an .npz file, of which rows are read from a stream; going back reads it again from its beginning."""

    name: str  # in messages
    stream: IO[bytes]
    begin: int  # of the first row in the stream
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def read(self, rows: slice) -> np.ndarray:
        """Some rows (rows, dim). Raises ValueError if they cannot be read."""
        count, dim = rows.stop - rows.start, math.prod(self.shape[1:])
        size = dim * self.dtype.itemsize
        with _readable(self.name):
            self.stream.seek(self.begin + rows.start * size)
            content = self.stream.read(count * size)
            return np.frombuffer(content, self.dtype).reshape(count, dim)


@contextmanager
def open_ogbench(path: Path) -> Iterator[tuple[Table, Boundaries]]:
    """The steps in the file `path`, and its episodes. Raises ValueError if it is damaged, or has no vectors of numbers."""
    with ExitStack() as stack:
        with _readable(str(path)):
            file = stack.enter_context(zipfile.ZipFile(path))
        arrays = {name: _array(stack, file, path, name) for name in ("observations", "actions", "terminals")}
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        if len({array.shape[0] for array in arrays.values()}) > 1:
            raise ValueError(f"{path}: arrays have different numbers of rows ({shapes}): replace it with a complete copy")
        for name in ("observations", "actions"):
            if len(arrays[name].shape) != 2:
                raise ValueError(
                    f"{path}: TAP needs vectors of observations and actions, but this file has {shapes}: use a dataset of "
                    "states, not of pictures, with continuous actions"
                )
        last = _last_states(arrays["terminals"])
        starts = np.concatenate([[0], last[:-1] + 1])
        lengths = last - starts
        if 0 in lengths:
            row = int(starts[lengths.argmin()])
            raise ValueError(f"{path}: row {row} is a trajectory of one state, without a step: leave it out of the file")
        offsets = np.concatenate([[0], np.cumsum(lengths)])

        def column(name: str) -> Parts:
            array = arrays[name]
            return Parts(offsets, array.shape[1], array.dtype, lambda part: array.read(slice(starts[part], last[part])))

        def place(row: int) -> str:
            part = int(np.searchsorted(offsets, row, side="right")) - 1
            return f"row {starts[part] + row - offsets[part]}"

        columns = {"observations": column("observations"), "actions": column("actions")}
        dims = {name: each.dim for name, each in columns.items()} | {"rewards": 1}
        rewards = np.zeros(offsets[-1], np.float32)
        table = Table(path, columns | {"rewards": rewards}, dims, Facts([path], has_rewards=False), place=place)
        yield table, Boundaries.of_episodes(lengths, np.zeros(len(lengths), bool))


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Raises ValueError if `name`, a file or a part of one, cannot be read."""
    try:
        yield
    except ERRORS as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{name} cannot be read ({reason}): replace the file with a complete copy") from error


def _array(stack: ExitStack, file: zipfile.ZipFile, path: Path, name: str) -> Array:
    """An array of numbers. Raises ValueError if the file does not have it; objects, which are pickles, are refused."""
    if f"{name}.npy" not in file.namelist():
        present = ", ".join(sorted(each.removesuffix(".npy") for each in file.namelist())[:8])
        raise ValueError(f"{path} lacks {name}; it has {present or 'nothing'}: name a file of OGBench")
    what = f"{path}: {name}"
    with _readable(what):
        stream = stack.enter_context(file.open(f"{name}.npy"))
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    if fortran or not shape or not shape[0] or dtype.kind not in NUMBERS:
        raise ValueError(f"{what} is not a table of numbers with one row per state, but {shape} {dtype}: replace the file")
    return Array(what, stream, stream.tell(), shape, dtype)


def _last_states(terminals: Array) -> np.ndarray:
    """The last row of each trajectory (E,) int64. The file's last row is one, even if its flag is missing."""
    flags = np.zeros(terminals.shape[0], bool)
    for rows in row_chunks(len(flags)):
        flags[rows] = terminals.read(rows).reshape(rows.stop - rows.start, -1)[:, 0] != 0
    flags[-1] = True
    return np.flatnonzero(flags)
