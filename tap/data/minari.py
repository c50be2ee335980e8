"""Reading: a Minari dataset in its HDF5, Arrow or Parquet layout, one group, or one folder, per episode of T steps.

    data/metadata.json                                             spaces, environment, data_format
    data/main_data.hdf5     episode_0/observations                 (T + 1, ...), or a group with one for each key of a Dict
                            episode_0/actions                      (T, ...)
                            episode_0/rewards, terminations        (T,)
    data/0/part-0.arrow     the same columns, padded to T + 1 rows

- Observations that are a Dict are flattened: the keys `fetch.observations`, joined in this order, by default all of them in
  alphabetical order, as in gymnasium. A key in a Dict in another one is "outer/inner".
- The last observation of an episode, after its last action, is not a step, and left out.
- Policies are evaluated in the environment of the metadata, unless params name another.
- An episode whose last step is a termination ends in a terminal; every other one is truncated.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.dataset
from pydantic import AliasPath, BaseModel, Field, Json, PositiveInt

from tap.data import arrow, hdf5
from tap.data.action_bounds import ActionBounds
from tap.data.boundaries import Boundaries
from tap.data.catalog import DatasetInfo
from tap.data.metadata import read_metadata
from tap.data.table import Facts, Parts, Table
from tap.results import OwnEnvironment
from tap.settings import FetchParams

PACKAGES = ("gymnasium", "gymnasium_robotics")  # whose environments are made
PICTURE_DIMS = 3  # Minari may compress a uint8 Box of so many dimensions as JPEG


class Space(BaseModel):
    """A gymnasium space, as Minari describes it."""

    type: str
    dtype: str = ""
    shape: list[int] = []
    low: Any = None
    high: Any = None
    subspaces: "dict[str, Space] | list[Space]" = {}

    @property
    def dim(self) -> int:
        return math.prod(self.shape)

    def leaves(self, name: str = "") -> "Iterator[tuple[str, Space]]":
        """The spaces in a Dict of spaces, at any depth, by their joined keys in alphabetical order; "" names this space."""
        if isinstance(self.subspaces, dict) and self.type == "Dict":
            for key, space in sorted(self.subspaces.items()):
                yield from space.leaves(f"{name}/{key}" if name else key)
        else:
            yield name, self

    @property
    def obstacle(self) -> str | None:
        """Why it is not read, if it is not."""
        if self.type != "Box":
            return f"of type {self.type}"
        return "a picture" if len(self.shape) == PICTURE_DIMS and self.dtype == "uint8" else None


class Environment(BaseModel):
    """A gymnasium environment, as Minari describes it."""

    id: str
    entry_point: Any = None
    max_episode_steps: PositiveInt | None = None
    arguments: dict[str, Any] = Field({}, validation_alias=AliasPath("kwargs"))  # of its constructor
    additional_wrappers: list[Any] = []

    @property
    def obstacle(self) -> str | None:
        """Why it is not made, if it is not. Only PACKAGES are imported for a dataset: it may name any code."""
        if self.additional_wrappers:
            return "it has wrappers"
        known = self._package in PACKAGES and ":" not in self.id  # before which gymnasium takes a module to import
        return None if known else f"it is of none of {' and '.join(PACKAGES)}"

    @property
    def _package(self) -> str:
        return str(self.entry_point).split(".")[0]

    def facts(self) -> OwnEnvironment:
        """How it is made. With its package in its name, it has that package's rewards, where D4RL's are others."""
        name = self.id if self._package == "gymnasium" else f"{self._package}:{self.id}"
        arguments = {key: value for key, value in self.arguments.items() if key != "render_mode"}
        return OwnEnvironment(environment=name, environment_kwargs=arguments, max_episode_steps=self.max_episode_steps)


class Metadata(BaseModel):
    """data/metadata.json."""

    total_episodes: PositiveInt
    data_format: Literal["hdf5", "arrow", "parquet"] = "hdf5"
    observation_space: Json[Space]
    action_space: Json[Space]
    env_spec: Json[Environment] | None = None
    eval_env_spec: Json[Environment] | None = None  # where that to evaluate in is another
    has_rewards: bool = True  # what `tap export-dataset` adds

    @property
    def environment(self) -> Environment | None:
        return self.eval_env_spec or self.env_spec


class Storage(Protocol):
    """Where episodes are stored."""

    @property
    def files(self) -> Sequence[Path]: ...

    def length(self, episode: int) -> int:
        """Its steps T."""
        ...

    def read(self, episode: int, column: str, steps: int, dim: int) -> np.ndarray:
        """A column of its `steps` T (T, dim); a key of a Dict is read by "observations/key"."""
        ...

    def place(self, episode: int) -> str:
        """Where an episode is found, in words."""
        ...


@contextmanager
def open_minari(path: Path, info: DatasetInfo, fetch: FetchParams) -> Iterator[tuple[Table, Boundaries]]:
    """The steps of the dataset in the folder `path`, which contains `data`, and its episodes.

    Raises ValueError if a file is missing or damaged, or if observations or actions are not numbers in boxes.
    """
    file = path / "data/metadata.json"
    metadata = read_metadata(file, Metadata)
    key = f"datasets.{info.id}.fetch.observations"
    spaces = _observed(dict(metadata.observation_space.leaves()), fetch.observations, file, key)
    if metadata.action_space.obstacle:
        raise ValueError(f"{file}: actions are {metadata.action_space.obstacle}, but TAP needs a Box: use another dataset")
    with _opened(path, metadata) as storage:
        episodes = range(metadata.total_episodes)
        lengths = np.array([storage.length(episode) for episode in episodes], np.int64)
        if 0 in lengths:
            raise ValueError(f"{path}: {storage.place(int(lengths.argmin()))} has no steps: leave it out of the dataset")
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        terminated = np.array([bool(storage.read(episode, "terminations", lengths[episode], 1)[-1]) for episode in episodes])

        def column(**dims: int) -> Parts:
            def part(episode: int) -> np.ndarray:
                return np.concatenate(
                    [storage.read(episode, name, lengths[episode], dim) for name, dim in dims.items()], axis=1
                )

            return Parts(offsets, sum(dims.values()), part(0).dtype, part)

        def place(row: int) -> str:
            episode = int(np.searchsorted(offsets, row, side="right")) - 1
            return f"step {row - offsets[episode]} of {storage.place(episode)}"

        columns = {
            "observations": column(
                **{f"observations/{name}" if name else "observations": space.dim for name, space in spaces.items()}
            ),
            "actions": column(actions=metadata.action_space.dim),
            "rewards": column(rewards=1),
        }
        dims = {name: each.dim for name, each in columns.items()}
        named = [f"{name}[{i}]" for name, space in spaces.items() if name for i in range(space.dim)]
        environment, notes = metadata.environment, []
        if environment and environment.obstacle and info.environment is None:
            notes = [
                f"it was recorded in {environment.id}, which is not made for it, since {environment.obstacle}: to evaluate "
                f"policies in one, set datasets.{info.id}.fetch.environment in params.yaml"
            ]
        facts = Facts(
            [file, *storage.files],
            has_rewards=metadata.has_rewards,
            observation_names=named,
            action_bounds=_bounds(metadata.action_space, file),
            environment=environment.facts() if environment and not environment.obstacle else None,
            notes=notes,
        )
        yield Table(path, columns, dims, facts, place=place), Boundaries.of_episodes(lengths, terminated)


def _observed(leaves: Mapping[str, Space], chosen: Sequence[str] | None, file: Path, key: str) -> dict[str, Space]:
    """The spaces that are observed, by name. Raises ValueError if one is not there, or not read."""
    usable = [name for name, space in leaves.items() if not space.obstacle]
    for name in chosen or leaves:
        if name not in usable:
            what = f"is {leaves[name].obstacle}" if name in leaves else "is missing"
            remedy = f"set {key} to some of {', '.join(usable)}" if any(usable) else "use another dataset"
            raise ValueError(f"{file}: observation {name!r} {what}: {remedy}")
    return {name: leaves[name] for name in chosen or leaves}


def _bounds(actions: Space, file: Path) -> ActionBounds:
    """The bounds of the actions (A,). Raises ValueError if they are none."""
    try:
        low, high = (np.array(bound, np.float32).reshape(actions.dim) for bound in (actions.low, actions.high))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: the bounds of action_space are none ({error}): replace it with a complete copy") from None
    return low, high


@contextmanager
def _opened(path: Path, metadata: Metadata) -> Iterator[Storage]:
    if metadata.data_format == "hdf5":
        with hdf5.open_file(path / "data/main_data.hdf5") as file:
            yield HDF5Storage(file)
    else:
        yield ArrowStorage(path / "data", metadata.data_format, metadata.total_episodes)


@dataclass(frozen=True)
class HDF5Storage:
    """Episodes as groups of an HDF5 file."""

    file: h5py.File

    @property
    def files(self) -> list[Path]:
        return [Path(self.file.filename)]

    def length(self, episode: int) -> int:
        return len(self._column(episode, "rewards"))

    def read(self, episode: int, column: str, steps: int, dim: int) -> np.ndarray:
        item = self._column(episode, column)
        rows = steps + column.startswith("observations")
        name = f"{self.files[0]}: episode_{episode}/{column}"
        if len(item) != rows or item.size != rows * dim:
            raise ValueError(
                f"{name} has shape {item.shape}, but its {steps} rewards and metadata.json call for {rows} rows of {dim}: "
                "replace the file with a complete copy"
            )
        with hdf5.readable(name):
            return np.asarray(item[:steps]).reshape(steps, dim)

    def place(self, episode: int) -> str:
        return f"episode_{episode}"

    def _column(self, episode: int, column: str) -> Any:
        """An h5py.Dataset of numbers, all there."""
        name = f"{self.files[0]}: episode_{episode}/{column}"
        with hdf5.readable(name):
            item = self.file.get(f"episode_{episode}/{column}")
        if not isinstance(item, h5py.Dataset) or item.dtype.kind not in hdf5.NUMBERS or not item.shape:
            raise ValueError(f"{name} is missing, or no table of numbers: replace the file with a complete copy")
        hdf5.require_all_data(item, name, sparse=column in ("rewards", "terminations"))
        return item


@dataclass(frozen=True)
class ArrowStorage:
    """Episodes as folders of Arrow or Parquet files."""

    folder: Path
    format: str
    episodes: int

    @property
    def files(self) -> list[Path]:
        return [file for each in range(self.episodes) for file in sorted((self.folder / str(each)).glob(f"*.{self.format}"))]

    def length(self, episode: int) -> int:
        with arrow.readable(self.folder / str(episode)):
            return int(self._dataset(episode).count_rows()) - 1

    def read(self, episode: int, column: str, steps: int, dim: int) -> np.ndarray:
        name, *keys = column.split("/")
        with arrow.readable(self.folder / str(episode)):
            values = self._dataset(episode).to_table([name])[name].combine_chunks()
            for key in keys:
                values = values.field(key)
        return arrow.matrix(values[:steps], f"{self.folder / str(episode)}: {column}", dim)

    def place(self, episode: int) -> str:
        return f"data/{episode}"

    def _dataset(self, episode: int) -> Any:
        ignored = [".", "_", "metadata.json"]
        return pa.dataset.dataset(self.folder / str(episode), format=self.format, ignore_prefixes=ignored)
