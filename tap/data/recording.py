"""A recording: a dataset's file, cut into episodes, in chunks that fit in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tap.data.action_bounds import ActionBounds, no_bounds, unit_bounds, with_params
from tap.data.boundaries import Boundaries, find_boundaries
from tap.data.catalog import WITH_EPISODES, DatasetInfo
from tap.data.chunks import episode_chunks
from tap.data.episodes import Episodes, save_episodes
from tap.data.hdf5 import open_table
from tap.data.lerobot import open_lerobot
from tap.data.minari import open_minari
from tap.data.ogbench import open_ogbench
from tap.data.table import Table
from tap.settings import NO_REWARD, FetchParams

TIMESTAMPS = ("timestamps", "timestamp", "infos/timestamps", "infos/timestamp")


@dataclass(frozen=True)
class Recording:
    """An open file and its episodes."""

    table: Table
    boundaries: Boundaries
    info: DatasetInfo
    fetch: FetchParams
    action_bounds: ActionBounds

    def chunks(self) -> Iterator[Episodes]:
        """The episodes as recorded, in the file's order and whole in each chunk. Raises ValueError as `Table.read` does."""
        cut = self.boundaries
        for part in episode_chunks(cut.lengths):
            rows = slice(cut.starts[part.start], cut.ends[part.stop - 1])
            kept, offsets = cut.kept[rows], np.concatenate([[0], np.cumsum(cut.lengths[part])])
            observations, actions, rewards = (
                self.table.read(key, rows)[kept] for key in ("observations", "actions", "rewards")
            )
            terminals, last = np.zeros(len(rewards), bool), offsets[1:] - 1
            terminals[last] = cut.terminated[part]
            yield Episodes(observations, actions, rewards, terminals, offsets)

    def episodes(self) -> Iterator[Episodes]:
        """As `chunks`, with actions clipped to their bounds if `fetch.clip_actions` is set."""
        for part in self.chunks():
            yield replace(part, actions=part.actions.clip(*self.action_bounds)) if self.fetch.clip_actions else part

    def timestamps(self) -> np.ndarray | None:
        """The time of each row that `chunks` gives (N,) float64, in the file's unit.

        None if the file has no finite numbers under one of TIMESTAMPS.
        """
        for key in TIMESTAMPS:
            times = self.table.read_other(key, slice(None), most=1)
            if times is not None and np.isfinite(times).all():
                return np.asarray(times[self.boundaries.kept, 0])
        return None

    def save(self, folder: Path) -> None:
        """Write `episodes` for `Episodes.load`."""
        save_episodes(folder, self.episodes(), self.boundaries.lengths)


@contextmanager
def open_recording(path: Path, info: DatasetInfo, fetch: FetchParams) -> Iterator[Recording]:
    """Open a file or folder in the layout of `info.source` and find its episodes. The bounds of its actions do not
    regard an environment.

    Raises ValueError on a file that cannot be read, lacks a key, has keys of different lengths or numbers that are not finite,
    or whose episode boundaries are not found.
    """
    with _opened(path, info, fetch) as (table, boundaries):
        unknown = no_bounds if info.source in WITH_EPISODES else unit_bounds
        bounds = table.facts.action_bounds or unknown(table.action_dim)
        yield Recording(table, boundaries, info, fetch, with_params(bounds, fetch, info.id))


@contextmanager
def _opened(path: Path, info: DatasetInfo, fetch: FetchParams) -> Iterator[tuple[Table, Boundaries]]:
    match info.source:
        case "lerobot":
            yield open_lerobot(path, info, fetch)
        case "minari":
            with open_minari(path, info, fetch) as opened:
                yield opened
        case "ogbench":
            with open_ogbench(path) as opened:
                yield opened
        case _:
            with open_table(path, info, has_rewards=fetch.reward != NO_REWARD) as table:
                yield table, find_boundaries(table, info, fetch)
