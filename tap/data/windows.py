"""Episodes to training windows: returns-to-go, normalisation, padding (paper, sections 3.1 and 3.2).

Shapes: N rows of all episodes, B batch, T window steps, O observation, A action, X transition, F token.

    transition x_t = (s_t, a_t, r_t, R_t), X = O + A + 2        token = (x_t, end flag), F = X + 1

    row of the episode   t   t+1  ...  last   -     -
    window               x_t x_t+1 ... x_last 0     0         padding: the mean transition, which is normalised to 0
    end flag             0   0         0      1     1
    valid                yes yes       yes    no    no
"""

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import PositiveInt
from torch import Tensor

from tap.data.episodes import Episodes, Selection
from tap.settings import WindowParams

# How far the support of the training data reaches beyond its range, as a share of the range's width. Of held-out episodes of
# Hopper and pen 0.01 to 0.3 % of rows lie beyond the range itself, and 0.01 % or less beyond this.
MARGIN = 0.1
NEGLIGIBLE = 1e-12  # a simulator's rounding, in whatever unit


@dataclass(frozen=True)
class Layout:
    """The columns of each quantity in a transition and in a token."""

    observation_dim: PositiveInt
    action_dim: PositiveInt

    @property
    def observation(self) -> slice:
        return slice(0, self.observation_dim)

    @property
    def action(self) -> slice:
        return slice(self.observation_dim, self.observation_dim + self.action_dim)

    @property
    def reward(self) -> int:
        return self.observation_dim + self.action_dim

    @property
    def return_to_go(self) -> int:
        return self.observation_dim + self.action_dim + 1

    @property
    def transition_dim(self) -> int:
        return self.observation_dim + self.action_dim + 2

    @property
    def transition(self) -> slice:
        return slice(0, self.transition_dim)

    @property
    def end(self) -> int:
        return self.transition_dim

    @property
    def token_dim(self) -> int:
        return self.transition_dim + 1


def penalized_rewards(episodes: Episodes, termination_penalty: float | None) -> np.ndarray:
    """Rewards (N,) float64 with those of true terminals replaced by `termination_penalty`; timeouts keep theirs."""
    rewards = episodes.rewards.astype(np.float64)
    if termination_penalty is not None:
        rewards[episodes.terminals] = termination_penalty
    return rewards


def bootstrapped_rewards(episodes: Episodes, rewards: np.ndarray, discount: float) -> np.ndarray:
    """Rewards (N,) float64 whose discounted sums extend beyond the end of truncated episodes.

    The missing part is estimated as if the episode continued forever at its mean reward: discount * mean / (1 - discount) is
    added to the last reward.
    """
    rewards, last = rewards.copy(), episodes.offsets[1:] - 1
    mean = np.add.reduceat(rewards, episodes.offsets[:-1]) / episodes.lengths
    rewards[last] += np.where(episodes.truncated, discount / (1 - discount) * mean, 0.0)
    return rewards


def returns_to_go(rewards: np.ndarray, offsets: np.ndarray, discount: float) -> np.ndarray:
    """R_t = sum_{i >= t} discount^(i - t) r_i to the end of t's episode, r_t included.

    `rewards` (N,) float64, `offsets` (E + 1,) as in `Episodes`; returns (N,) float64. A scan by doubling: after step k each
    row has the sum of the next 2^k rewards, so the work is N log(longest episode), without a loop over rows.
    """
    lengths = np.diff(offsets)
    remaining = np.repeat(offsets[1:], lengths) - np.arange(len(rewards))
    total = rewards.astype(np.float64)
    reach = 1
    while reach < lengths.max(initial=0):
        rows = np.flatnonzero(remaining > reach)
        ahead = total[rows + reach]
        total[rows] += discount**reach * ahead
        reach *= 2
    return total


def moments(chunks: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mean and std (X,) float64, min and max (X,) of all rows of `chunks`, each (N, X); at least one row.

    Chunks are combined by the formula of Chan, Golub and LeVeque (1983). Of a single chunk these are numpy's mean and std.
    """
    count, mean, squares = 0, np.zeros(()), np.zeros(())  # of the rows so far; squares: sum of squared distances from the mean
    low, high = np.array(np.inf, np.float32), np.array(-np.inf, np.float32)
    for chunk in chunks:
        total, chunk_mean = count + len(chunk), chunk.mean(axis=0, dtype=np.float64)
        distances, shift = chunk - chunk_mean, chunk_mean - mean
        squares = squares + np.square(distances, out=distances).sum(axis=0) + shift**2 * (count * len(chunk) / total)
        mean = mean + shift * (len(chunk) / total)
        low, high = np.minimum(low, chunk.min(axis=0)), np.maximum(high, chunk.max(axis=0))
        count = total
    assert count > 0, "no rows"
    return mean, np.sqrt(squares / count), low, high


@dataclass(frozen=True)
class Normalizer:
    """Per-dimension shift and scale of transitions, each (X,) float32: normalised = (raw - mean) / std.

    Also the min and max of the values that it was fitted to; None for one that was not fitted.
    """

    mean: np.ndarray
    std: np.ndarray
    min: np.ndarray | None = None
    max: np.ndarray | None = None
    _tensors: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def fit(cls, chunks: Iterable[np.ndarray]) -> Self:
        """Statistics of transitions that come in `chunks`, each (N, X). The std of a constant dimension is 1: its raw unit.

        A dimension counts as constant if it varies by no more than float32's rounding, or than NEGLIGIBLE.
        """
        mean, std, low, high = moments(chunks)
        constant = std <= np.maximum(NEGLIGIBLE, np.finfo(np.float32).eps * np.maximum(np.abs(low), np.abs(high)))
        return cls(mean.astype(np.float32), np.where(constant, 1.0, std).astype(np.float32), low, high)

    @classmethod
    def identity(cls, dim: int) -> Self:
        """One that changes nothing, of X = `dim`."""
        return cls(np.zeros(dim, np.float32), np.ones(dim, np.float32))

    def normalize(self, raw: Tensor, columns: slice = slice(None)) -> Tensor:
        """`raw` (..., len(columns)) as multiples of the std from the mean."""
        mean, std = (tensor[columns] for tensor in self._on(raw.device))
        return (raw - mean).div_(std)

    def denormalize(self, normal: Tensor, columns: slice = slice(None)) -> Tensor:
        """The inverse of `normalize`."""
        mean, std = (tensor[columns] for tensor in self._on(normal.device))
        return normal * std + mean

    def support_bounds(self, columns: slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """The bounds beyond which a raw value is far outside the data: its range, widened by `MARGIN` on each side.

        Each (len(columns),) float64, and infinite if the Normalizer was not fitted. They are in a dimension's raw unit,
        normalised or not.
        """
        if self.min is None or self.max is None:
            return np.full_like(self.mean[columns], -np.inf, np.float64), np.full_like(self.mean[columns], np.inf, np.float64)
        low, high = self.min[columns].astype(np.float64), self.max[columns].astype(np.float64)
        rounding = 1e-6 * np.maximum(1.0, np.maximum(np.abs(low), np.abs(high)))  # of constant dimensions to float32
        margin = MARGIN * (high - low) + rounding
        return low - margin, high + margin

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Both on `device`, copied there once: the planner must not wait for copies."""
        if device not in self._tensors:
            self._tensors[device] = torch.as_tensor(self.mean, device=device), torch.as_tensor(self.std, device=device)
        return self._tensors[device]

    def to_json(self) -> dict[str, Any]:
        """The statistics as lists, min and max None if the Normalizer was not fitted."""
        values = {"mean": self.mean, "std": self.std, "min": self.min, "max": self.max}
        return {name: None if value is None else value.tolist() for name, value in values.items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Sequence[float] | None], dim: int) -> Self:
        """The inverse of `to_json`, of X = `dim`.

        Raises ValueError for what an earlier version wrote, under other keys, and for what no data has.
        """
        if missing := {"mean", "std", "min", "max"} - value.keys():
            raise ValueError(f"the normalizer lacks {', '.join(sorted(missing))}")
        with np.errstate(over="ignore"):
            arrays = {key: None if each is None else np.array(each, np.float32) for key, each in value.items()}
        mean, std, low, high = (arrays[key] for key in ("mean", "std", "min", "max"))
        if mean is None or std is None or (low is None) != (high is None):
            raise ValueError("the normalizer's statistics are incomplete")
        for key, array in arrays.items():
            if array is not None and (array.shape != (dim,) or not np.isfinite(array).all()):
                raise ValueError(f"the normalizer's {key} is not {dim} finite float32 numbers")
        if not (std > 0).all():
            raise ValueError("the normalizer's std is not above 0")
        return cls(mean, std, low, high)


def transitions(episodes: Episodes, params: WindowParams) -> np.ndarray:
    """All rows as raw transitions (N, X) float32, columns as in Layout."""
    rewards = penalized_rewards(episodes, params.termination_penalty)
    paid = bootstrapped_rewards(episodes, rewards, params.discount) if params.bootstrap_truncated else rewards
    returns = returns_to_go(paid, episodes.offsets, params.discount)
    columns = (episodes.observations, episodes.actions, rewards[:, None], returns[:, None])
    return np.concatenate([column.astype(np.float32) for column in columns], axis=1)


def fit_normalizer(episodes: Episodes | Selection, params: WindowParams) -> Normalizer:
    """The Normalizer of a dataset: with the identity if `params.normalize` is off (as for AntMaze at the paper's scale)."""
    fitted = Normalizer.fit(transitions(part, params) for part in episodes.chunks())
    identity = Normalizer.identity(len(fitted.mean))
    return fitted if params.normalize else replace(fitted, mean=identity.mean, std=identity.std)


class Windows:
    """Every window of some episodes, one starting at each row: flat arrays, gathered by index.

    On a CPU the transitions are in a temporary file in `folder` (the system's if it is None), memory-mapped, so that they
    may be larger than memory; on a GPU in its memory.
    """

    def __init__(
        self,
        episodes: Episodes | Selection,
        params: WindowParams,
        normalizer: Normalizer,
        device: torch.device,
        folder: Path | None = None,
    ) -> None:
        ends_E = np.cumsum(episodes.lengths)
        num_rows, dim = int(episodes.lengths.sum()), len(normalizer.mean)
        on_disk = device.type == "cpu" and num_rows > 0
        self.transitions_NX = _mapped(num_rows, dim, folder) if on_disk else torch.empty(num_rows, dim, device=device)
        first = 0
        for part in episodes.chunks():
            raw_NX = torch.from_numpy(transitions(part, params)).to(device)
            self.transitions_NX[first : first + len(raw_NX)] = normalizer.normalize(raw_NX)
            first += len(raw_NX)
        self.ends_E = torch.from_numpy(ends_E).to(device)
        self.steps_T = torch.arange(params.length, device=device)

    def __len__(self) -> int:
        return len(self.transitions_NX)

    def episodes_of(self, starts_B: Tensor) -> Tensor:
        """The episodes (B,), counted from 0, of the windows that start at rows `starts_B`."""
        return torch.searchsorted(self.ends_E, starts_B, right=True)

    def gather(self, starts_B: Tensor) -> tuple[Tensor, Tensor]:
        """The windows that start at rows `starts_B`: tokens (B, T, F) normalised, and which steps are valid (B, T) bool."""
        rows_BT = starts_B[:, None] + self.steps_T
        ends_B = self.ends_E[self.episodes_of(starts_B)]
        valid_BT = rows_BT < ends_B[:, None]
        inside_BTX = self.transitions_NX[rows_BT.clamp(max=len(self) - 1)]
        tokens_BTX = torch.where(valid_BT[..., None], inside_BTX, 0.0)
        return torch.cat([tokens_BTX, (~valid_BT)[..., None].to(tokens_BTX.dtype)], dim=-1), valid_BT


def _mapped(rows: int, dim: int, folder: Path | None) -> Tensor:
    """An uninitialised float32 tensor (rows, dim) in a temporary file, whose space is freed with the tensor.

    Raises ValueError if the disk is full.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        size = 4 * rows * dim
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk raises an error here, but would crash a later write
        except OSError as error:
            place = folder or tempfile.gettempdir()
            raise ValueError(f"{place} has no room for {size} bytes of training windows ({error}): free some space") from error
        return torch.from_numpy(np.memmap(file, np.float32, "r+", shape=(rows, dim)))
