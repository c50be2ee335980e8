"""Reading: a LeRobot dataset of format v3.0 or v2.1, one row per frame.

    meta/info.json                           frames per second; of each column its type, shape and names
    meta/tasks.parquet                       v3.0: the tasks in words
    meta/tasks.jsonl                         v2.1
    data/chunk-000/file-000.parquet          v3.0: frames of many episodes
    data/chunk-000/episode_000000.parquet    v2.1: of one
    videos/                                  not read

- Observations are the columns `fetch.observations`, joined; by default `observation.state`.
- Rewards are the column `fetch.reward`, by default `next.reward` if there is one. If it is a flag, such as `next.success`, an
  episode in which it is set ends with a reward of 1 and in a terminal. Without any, or if `fetch.reward` is none, all are 0.
- All other episodes are truncated: LeRobot does not record why an episode ends.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from pydantic import BaseModel, PositiveFloat, PositiveInt

from tap.data.arrow import matrix, readable
from tap.data.boundaries import Boundaries
from tap.data.catalog import DatasetInfo
from tap.data.metadata import read_metadata, read_metadata_lines
from tap.data.table import Column, Facts, Parts, Table
from tap.settings import NO_REWARD, FetchParams

VERSIONS = ("v2.", "v3.")
INDEX = ("episode_index", "frame_index")
NUMBERS = re.compile(r"bool|float(16|32|64)|u?int(8|16|32|64)")  # types of columns that can be read


class Feature(BaseModel):
    """A column."""

    dtype: str
    shape: list[PositiveInt]
    names: Any = None

    @property
    def dim(self) -> int:
        return math.prod(self.shape)

    def dimension_names(self, column: str) -> list[str]:
        """A name for each dimension (dim,). LeRobot nests its own in lists or by kind."""
        named = list(_strings(self.names))
        return named if len(named) == self.dim else [column if self.dim == 1 else f"{column}[{i}]" for i in range(self.dim)]


class Info(BaseModel):
    """meta/info.json."""

    codebase_version: str
    fps: PositiveFloat
    total_episodes: PositiveInt
    total_frames: PositiveInt
    features: dict[str, Feature]


class Task(BaseModel):
    """A line of meta/tasks.jsonl."""

    task_index: int
    task: str


@dataclass(frozen=True)
class RowGroup:
    """Rows of a file that are read at once."""

    file: Path
    index: int
    first: int  # its first row in the file
    rows: int

    def read(self, columns: Sequence[str], dims: Sequence[int]) -> np.ndarray:
        """Some columns, joined: (rows, the sum of `dims`). Raises ValueError if one is missing or has other dimensions."""
        with readable(self.file), pq.ParquetFile(self.file) as opened:
            read = opened.read_row_group(self.index, columns=list(columns))
        missing = [column for column in columns if column not in read.column_names]
        if missing:
            raise ValueError(f"{self.file} lacks {' and '.join(missing)}: replace the file with a complete copy")
        values = [matrix(read[column], f"{self.file}: {column}", dim) for column, dim in zip(columns, dims, strict=True)]
        return np.concatenate(values, axis=1)


@dataclass(frozen=True)
class Frames:
    """All frames of a dataset: N rows."""

    path: Path
    features: Mapping[str, Feature]
    groups: Sequence[RowGroup]

    @cached_property
    def offsets(self) -> np.ndarray:
        """The first row of each row group, and N."""
        return np.concatenate([[0], np.cumsum([group.rows for group in self.groups], dtype=np.int64)])

    def column(self, *names: str) -> Parts:
        """Some columns, joined."""
        dims = [self.features[name].dim for name in names]
        dtype = np.result_type(*(self.features[name].dtype for name in names))
        return Parts(self.offsets, sum(dims), dtype, lambda part: self.groups[part].read(names, dims))

    def place(self, row: int) -> str:
        """Where a row is found, in words."""
        part = int(np.searchsorted(self.offsets, row, side="right")) - 1
        group = self.groups[part]
        return f"row {group.first + row - self.offsets[part]} of {group.file.relative_to(self.path)}"


@dataclass(frozen=True)
class LerobotTable(Table):
    """A table whose other columns can be read, too."""

    frames: Frames = field(kw_only=True)

    def read_other(self, key: str, rows: slice, most: int) -> np.ndarray | None:
        """As `Table.read_other`. Raises ValueError if a file lacks the column, or has other dimensions there."""
        feature = self.frames.features.get(key)
        if feature is None or not NUMBERS.fullmatch(feature.dtype) or feature.dim > most:
            return None
        return np.asarray(self.frames.column(key)[rows], np.float64)


def open_lerobot(path: Path, info: DatasetInfo, fetch: FetchParams) -> tuple[Table, Boundaries]:
    """The frames of the dataset in the folder `path`, and its episodes.

    Raises ValueError if a file is missing or damaged, if a column is missing or has no numbers, or if frames are missing.
    """
    described, key = read_metadata(path / "meta/info.json", Info), f"datasets.{info.id}.fetch"
    if not described.codebase_version.startswith(VERSIONS):
        raise ValueError(
            f"{path} has LeRobot's format {described.codebase_version}, but TAP reads v2.1 and v3.0: convert it with the "
            "script that comes with lerobot"
        )
    features = described.features
    observed, reward = fetch.observations or ["observation.state"], fetch.reward
    if reward is None and "next.reward" in features:
        reward = "next.reward"
    elif reward == NO_REWARD:
        reward = None
    for column, user in [
        *((name, f"{key}.observations") for name in observed),
        ("action", "training"),
        (reward, f"{key}.reward"),
    ]:
        if column is not None:
            _require_numbers(column, features, path, user)

    frames = Frames(path, features, [group for file in _data_files(path) for group in _row_groups(file)])
    flag = reward if reward is not None and features[reward].dtype == "bool" else None
    lengths, succeeded = _episodes(frames.groups, flag)
    if (lengths.sum(), len(lengths)) != (described.total_frames, described.total_episodes):
        raise ValueError(
            f"{path}: its files have {lengths.sum()} frames in {len(lengths)} episodes, but meta/info.json counts "
            f"{described.total_frames} in {described.total_episodes}: get the files that are missing, or finish the recording"
        )
    at_end = np.zeros(lengths.sum(), np.float32)
    at_end[np.cumsum(lengths) - 1] = succeeded
    rewards: Column = at_end if reward is None or flag else frames.column(reward)
    file_of_tasks, tasks = _tasks(path)
    cameras = [name for name, feature in features.items() if feature.dtype in ("video", "image")]
    table = LerobotTable(
        path,
        {"observations": frames.column(*observed), "actions": frames.column("action"), "rewards": rewards},
        {"observations": sum(features[name].dim for name in observed), "actions": features["action"].dim, "rewards": 1},
        Facts(
            files=[path / "meta/info.json", file_of_tasks, *dict.fromkeys(group.file for group in frames.groups)],
            has_rewards=reward is not None,
            fps=described.fps,
            tasks=tasks,
            observation_names=[name for column in observed for name in features[column].dimension_names(column)],
            action_names=features["action"].dimension_names("action"),
            notes=[f"pictures are not used ({', '.join(cameras)}): policies observe numbers alone"] if cameras else [],
        ),
        place=frames.place,
        frames=frames,
    )
    return table, Boundaries.of_episodes(lengths, succeeded)


def _strings(names: Any) -> Iterator[str]:
    if isinstance(names, str):
        yield names
    elif isinstance(names, dict | list):
        for each in names.values() if isinstance(names, dict) else names:
            yield from _strings(each)


def _require_numbers(column: str, features: Mapping[str, Feature], path: Path, user: str) -> None:
    """Raise ValueError if the column that `user` needs is not there, or does not contain numbers."""
    numeric = [name for name, feature in features.items() if NUMBERS.fullmatch(feature.dtype)]
    if column not in numeric:
        what = f"of type {features[column].dtype}" if column in features else "missing"
        raise ValueError(f"{path}: {column}, which {user} needs, is {what}: its columns of numbers are {', '.join(numeric)}")
    if user.endswith("reward") and features[column].dim != 1:
        raise ValueError(f"{path}: {column} has {features[column].dim} dimensions: set {user} to a column of one")


def _data_files(path: Path) -> list[Path]:
    """The files of frames in the order of their numbers. Raises ValueError if there are none."""
    files = sorted((path / "data").rglob("*.parquet"), key=lambda file: [int(n) for n in re.findall(r"\d+", str(file))])
    if not files:
        raise ValueError(f"{path / 'data'} has no Parquet files: get the whole dataset")
    return files


def _row_groups(file: Path) -> list[RowGroup]:
    with readable(file), pq.ParquetFile(file) as opened:
        rows = [opened.metadata.row_group(index).num_rows for index in range(opened.num_row_groups)]
    return [RowGroup(file, index, sum(rows[:index]), count) for index, count in enumerate(rows) if count]


def _episodes(groups: Sequence[RowGroup], flag: str | None) -> tuple[np.ndarray, np.ndarray]:
    """The length of each episode (E,) int64, and in which of them (E,) the column `flag` is set.

    Raises ValueError if frames are missing or out of order.
    """
    numbers: list[int] = []
    lengths: list[int] = []
    flagged: set[int] = set()
    columns = [*INDEX, flag] if flag else list(INDEX)
    for group in groups:
        rows = group.read(columns, [1] * len(columns))
        starts = np.flatnonzero(np.concatenate([[True], np.diff(rows[:, 0]) != 0]))
        for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
            if not numbers or rows[start, 0] != numbers[-1]:
                numbers.append(int(rows[start, 0]))
                lengths.append(0)
            expected = np.arange(lengths[-1], lengths[-1] + stop - start)
            wrong = np.flatnonzero(rows[start:stop, 1] != expected)
            if len(wrong):
                row = int(start + wrong[0])
                raise ValueError(
                    f"{group.file}: row {group.first + row} is frame {rows[row, 1]:g} of episode {numbers[-1]}, but frame "
                    f"{expected[wrong[0]]} comes next: get the files that are missing, or leave the episode out"
                )
            lengths[-1] += int(stop - start)
            if flag and rows[start:stop, 2].any():
                flagged.add(len(numbers) - 1)
    return np.array(lengths, np.int64), np.isin(np.arange(len(numbers)), list(flagged))


def _tasks(path: Path) -> tuple[Path, list[str]]:
    """The file of tasks, and the tasks in the order of their numbers."""
    file = path / "meta/tasks.parquet"
    if not file.exists():
        file = path / "meta/tasks.jsonl"
        return file, [task.task for task in sorted(read_metadata_lines(file, Task), key=lambda task: task.task_index)]
    with readable(file):
        rows = sorted(pq.read_table(file).to_pylist(), key=lambda row: int(row["task_index"]))
    # The column is a pandas index, whose name LeRobot's releases set or leave out.
    return file, [str(row.get("task", row.get("__index_level_0__"))) for row in rows]
