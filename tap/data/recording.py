"""A recording: a dataset's file, cut into episodes, in chunks that fit in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tap.data.boundaries import Boundaries, find_boundaries
from tap.data.catalog import DatasetInfo
from tap.data.chunks import episode_chunks
from tap.data.episodes import Episodes, save_episodes
from tap.data.hdf5 import Table, open_table
from tap.settings import FetchParams

ActionBounds = tuple[np.ndarray, np.ndarray]  # least and greatest value of each dimension (A,)


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
            at_goal = rewards[last] > 0 if self.info.suite == "antmaze" else False
            before_limit = cut.lengths[part] < self.info.max_episode_steps
            terminals[last] = (cut.reasons[part] == "terminals") & (before_limit | at_goal)
            yield Episodes(observations, actions, rewards, terminals, offsets)

    def save(self, folder: Path) -> None:
        """Write the episodes for `Episodes.load`, with actions clipped to their bounds if `fetch.clip_actions` is set."""
        parts = self.chunks()
        if self.fetch.clip_actions:
            parts = (replace(part, actions=part.actions.clip(*self.action_bounds)) for part in parts)
        save_episodes(folder, parts, self.boundaries.lengths)


@contextmanager
def open_recording(path: Path, info: DatasetInfo, fetch: FetchParams) -> Iterator[Recording]:
    """Open an HDF5 file in D4RL's layout and find its episodes. The bounds of its actions are taken to be D4RL's [-1, 1].

    Raises ValueError on a file that cannot be read, lacks a key, has keys of different lengths or numbers that are not finite,
    or whose episode boundaries are not found.
    """
    with open_table(path, info) as table:
        ones = np.ones(table.action_dim, np.float32)
        yield Recording(table, find_boundaries(table, info, fetch), info, fetch, (-ones, ones))
