"""Episodes of recorded steps: arrays in a folder, memory-mapped, and their split into training and held-out ones."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from tap.data.chunks import episode_chunks
from tap.files import atomic_file


@dataclass(frozen=True)
class Episodes:
    """Episodes of any lengths, their rows one after another: N rows, E episodes."""

    observations: np.ndarray  # (N, O) float32
    actions: np.ndarray  # (N, A) float32
    rewards: np.ndarray  # (N,) float32
    terminals: np.ndarray  # (N,) bool: only on the last row of an episode that truly ended
    offsets: np.ndarray  # (E + 1,) int64: the first row of each episode, and N

    @classmethod
    def load(cls, folder: Path) -> Self:
        """What `save_episodes` wrote to data/raw/DATASET/episodes, memory-mapped and read-only.

        Raises ValueError if a file is missing or damaged.
        """
        remedy = f"fetch the dataset again with `dvc repro --force fetch@{folder.parent.name}`"
        arrays: dict[str, np.ndarray] = {}
        for name, (dtype, ndim) in ARRAYS.items():
            path = folder / f"{name}.npy"
            try:
                array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
            except FileNotFoundError:
                raise ValueError(f"{path} does not exist: {remedy}") from None
            except Exception as error:  # the header is parsed as Python, and a damaged one raises whatever its parser raises
                raise ValueError(f"{path} is damaged ({error}): {remedy}") from error
            if array.dtype != dtype or array.ndim != ndim:
                raise ValueError(f"{path} contains {array.dtype} {array.shape}, not {dtype} with {ndim} dimensions: {remedy}")
            arrays[name] = array
        offsets = arrays["offsets"]
        if len(offsets) < 2 or offsets[0] != 0 or (np.diff(offsets) < 1).any():
            raise ValueError(f"{folder / 'offsets.npy'} does not increase from 0: {remedy}")
        for name in ARRAYS.keys() - {"offsets"}:
            if len(arrays[name]) != offsets[-1]:
                raise ValueError(f"{folder / f'{name}.npy'} has {len(arrays[name])} rows, not {offsets[-1]}: {remedy}")
        return cls(**arrays)

    @property
    def num_episodes(self) -> int:
        """E."""
        return len(self.offsets) - 1

    @property
    def observation_dim(self) -> int:
        """O."""
        return int(self.observations.shape[1])

    @property
    def action_dim(self) -> int:
        """A."""
        return int(self.actions.shape[1])

    @property
    def lengths(self) -> np.ndarray:
        """Steps of each episode (E,) int64, at least 1."""
        return np.asarray(np.diff(self.offsets))

    @property
    def returns(self) -> np.ndarray:
        """Undiscounted return of each episode (E,) float64."""
        sums = [np.add.reduceat(part.rewards.astype(np.float64), part.offsets[:-1]) for part in self.chunks()]
        return np.concatenate(sums) if sums else np.zeros(0)

    @property
    def truncated(self) -> np.ndarray:
        """Whether each episode (E,) was truncated rather than terminated."""
        return np.asarray(~self.terminals[self.offsets[1:] - 1])

    def chunks(self) -> Iterator["Episodes"]:
        """All episodes in order, in parts that fit in memory."""
        return Selection(self, np.arange(self.num_episodes)).chunks()

    def select(self, indices: Sequence[int] | np.ndarray) -> "Episodes":
        """A copy of the episodes `indices`, in that order."""
        chosen = np.asarray(indices, np.int64)
        lengths = self.lengths[chosen]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.arange(offsets[-1]) + np.repeat(self.offsets[chosen] - offsets[:-1], lengths)
        return Episodes(self.observations[rows], self.actions[rows], self.rewards[rows], self.terminals[rows], offsets)

    def split(self, fraction: float, rng: np.random.Generator) -> tuple["Selection", "Selection"]:
        """Whole episodes for training, and about `fraction` of them held out, each part in the file's order.

        The first part has at least one, and so has the second if there are two and `fraction` is above 0.
        """
        held_out = min(max(round(fraction * self.num_episodes), int(fraction > 0)), self.num_episodes - 1)
        order = rng.permutation(self.num_episodes)
        return Selection(self, np.sort(order[held_out:])), Selection(self, np.sort(order[:held_out]))


@dataclass(frozen=True)
class Selection:
    """Some of the episodes, whose rows are copied only a chunk at a time."""

    episodes: Episodes
    indices: np.ndarray  # (E,) int64

    @property
    def observation_dim(self) -> int:
        """O."""
        return self.episodes.observation_dim

    @property
    def action_dim(self) -> int:
        """A."""
        return self.episodes.action_dim

    @property
    def lengths(self) -> np.ndarray:
        """Steps of each episode (E,) int64, at least 1."""
        return np.asarray(self.episodes.lengths[self.indices])

    def chunks(self) -> Iterator[Episodes]:
        """The selected episodes in order, in parts that fit in memory."""
        for part in episode_chunks(self.lengths):
            yield self.episodes.select(self.indices[part])


# The type and number of dimensions of each array.
ARRAYS = {"observations": ("float32", 2), "actions": ("float32", 2), "rewards": ("float32", 1)}
ARRAYS |= {"terminals": ("bool", 1), "offsets": ("int64", 1)}
assert [field.name for field in fields(Episodes)] == list(ARRAYS)


def save_episodes(folder: Path, parts: Iterable[Episodes], lengths: np.ndarray) -> None:
    """Write the arrays of all `parts`, joined, to `folder`/NAME.npy for `Episodes.load`.

    `lengths` (E,) are those of all episodes. Each file appears completely or not at all, and none appears if a part raises.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    with ExitStack() as stack:
        files = {name: stack.enter_context(atomic_file(folder / f"{name}.npy")) for name in ARRAYS}
        _write_header(files["offsets"], offsets, len(offsets))
        files["offsets"].write(offsets.data)
        begun = False
        for part in parts:
            for name in ARRAYS.keys() - {"offsets"}:
                array = np.ascontiguousarray(getattr(part, name))
                if not begun:
                    _write_header(files[name], array, int(offsets[-1]))
                files[name].write(array.data)
            begun = True


def _write_header(file: BinaryIO, array: np.ndarray, rows: int) -> None:
    """The beginning of an .npy file of `rows` rows like `array`'s. `np.save` would not say why a disk refuses its data."""
    descr = np.lib.format.dtype_to_descr(array.dtype)
    header = {"descr": descr, "fortran_order": False, "shape": (rows, *array.shape[1:])}
    np.lib.format.write_array_header_1_0(file, header)
