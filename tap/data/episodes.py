"""Episodes of recorded steps, and their split into training and held-out ones."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Episodes:
    """Episodes of any lengths, their rows one after another: N rows, E episodes."""

    observations: np.ndarray  # (N, O) float32
    actions: np.ndarray  # (N, A) float32
    rewards: np.ndarray  # (N,) float32
    terminals: np.ndarray  # (N,) bool: only on the last row of an episode that truly ended
    offsets: np.ndarray  # (E + 1,) int64: where each episode begins, and N

    @classmethod
    def load(cls, folder: Path) -> "Episodes":
        return cls(*(np.load(folder / f"{field.name}.npy") for field in fields(cls)))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for field in fields(self):
            np.save(folder / f"{field.name}.npy", getattr(self, field.name))

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
        return np.asarray(np.add.reduceat(self.rewards.astype(np.float64), self.offsets[:-1]))

    @property
    def truncated(self) -> np.ndarray:
        """Whether each episode (E,) was stopped rather than ended."""
        return np.asarray(~self.terminals[self.offsets[1:] - 1])

    def select(self, indices: Sequence[int] | np.ndarray) -> "Episodes":
        """The episodes `indices`, in that order."""
        chosen = np.asarray(indices, np.int64)
        lengths = self.lengths[chosen]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.arange(offsets[-1]) + np.repeat(self.offsets[chosen] - offsets[:-1], lengths)
        return Episodes(self.observations[rows], self.actions[rows], self.rewards[rows], self.terminals[rows], offsets)

    def split(self, fraction: float, rng: np.random.Generator) -> tuple["Episodes", "Episodes"]:
        """Whole episodes for training, and about `fraction` of them held out, each part in the file's order.

        The first part has at least one, and so has the second, where there are two and `fraction` is above 0.
        """
        held_out = min(max(round(fraction * self.num_episodes), int(fraction > 0)), self.num_episodes - 1)
        order = rng.permutation(self.num_episodes)
        return self.select(np.sort(order[held_out:])), self.select(np.sort(order[:held_out]))
