"""Transitions (s, a, r, s') for methods that learn values from them.

    row of the episode   t    t+1  ...  last of a terminated one    last of a truncated one
    successor            t+1  t+2  ...  none: the value is 0        unknown: no transition

Shapes: N rows, M transitions, B batch, O observation, A action.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tap.data.episodes import Selection
from tap.data.sampling import WindowSampler, return_weights
from tap.data.windows import Layout, Normalizer, Windows, penalized_rewards
from tap.settings import RewardParams, WindowParams

# One step, normalised; rewards are taken from the episodes, since their mean matters where episodes may end.
WINDOWS = WindowParams(length=1, discount=1.0, termination_penalty=None, bootstrap_truncated=False, normalize=True)
AT_ONCE = 4096  # of transitions that are not a training batch


@dataclass(frozen=True)
class Batch:
    """B transitions, normalised."""

    observation_BO: Tensor
    action_BA: Tensor
    reward_B: Tensor  # shifted and scaled
    next_observation_BO: Tensor  # of a terminated episode's last row, the same observation again
    terminated_B: Tensor  # bool

    def first(self, count: int) -> "Batch":
        """The first `count` transitions."""
        return Batch(*(getattr(self, field.name)[:count] for field in fields(self)))


def concatenate(*batches: Batch) -> Batch:
    """All transitions of some batches."""
    return Batch(*(torch.cat([getattr(batch, field.name) for batch in batches]) for field in fields(Batch)))


def reward_scale(episodes: Selection, params: RewardParams) -> float:
    """The factor by which the returns of `episodes` span `params.return_range`; 1 without it, and if all are equal."""
    span = float(np.ptp(episodes.episodes.returns[episodes.indices])) if len(episodes.indices) else 0.0
    return params.return_range / span if params.return_range and span else 1.0


class Transitions:
    """All transitions of some episodes, on `device`; on a CPU, observations and actions are memory-mapped as in `Windows`.

    Rewards of true terminals are `termination_penalty` if it is not None; then all are shifted and scaled.
    """

    def __init__(
        self,
        episodes: Selection,
        normalizer: Normalizer,
        rewards: RewardParams,
        scale: float,
        device: torch.device,
        folder: Path | None = None,
        termination_penalty: float | None = None,
    ) -> None:
        self.layout = Layout(episodes.observation_dim, episodes.action_dim)
        self.normalizer, self.reward_scale = normalizer, scale
        self._rows_NX = Windows(episodes, WINDOWS, normalizer, device, folder).transitions_NX
        parts = [(penalized_rewards(part, termination_penalty), part.terminals) for part in episodes.chunks()]
        rewards_N = np.concatenate([part for part, _ in parts]).astype(np.float32) if parts else np.zeros(0)
        terminals_N = np.concatenate([part for _, part in parts]) if parts else np.zeros(0, bool)
        last_N = np.zeros(len(rewards_N), bool)
        last_N[np.cumsum(episodes.lengths) - 1] = True
        truncated_E = ~terminals_N[last_N]
        self._lengths_E = episodes.lengths - truncated_E
        self._returns_E = episodes.episodes.returns[episodes.indices]
        self._reward_N = torch.from_numpy((scale * (rewards_N + rewards.shift)).astype(np.float32)).to(device)
        self._terminated_N = torch.from_numpy(terminals_N).to(device)
        self._rows_M = torch.from_numpy(np.flatnonzero(~last_N | terminals_N)).to(device)

    def __len__(self) -> int:
        """M."""
        return len(self._rows_M)

    def sampler(self, effective_share: float) -> WindowSampler:
        """Draws indices of transitions, by the return of their episodes as `tap.data.sampling.by_return` does."""
        some_E = self._lengths_E > 0
        lengths_E = self._lengths_E[some_E]
        return WindowSampler(lengths_E, return_weights(self._returns_E[some_E], lengths_E, effective_share))

    def batches(self, count: int) -> Iterator[Batch]:
        """At most `count` transitions, spread evenly over all."""
        indices = torch.linspace(0, len(self) - 1, min(count, len(self)), dtype=torch.float64).long()
        for part in indices.split(AT_ONCE):  # type: ignore[no-untyped-call]
            yield self.batch(part.to(self._rows_M.device))

    def batch(self, indices_B: Tensor) -> Batch:
        """The transitions `indices_B`, counted from 0 to M."""
        rows_B = self._rows_M[indices_B]
        terminated_B = self._terminated_N[rows_B]
        steps_BX = self._rows_NX[rows_B]
        return Batch(
            observation_BO=steps_BX[:, self.layout.observation],
            action_BA=steps_BX[:, self.layout.action],
            reward_B=self._reward_N[rows_B],
            next_observation_BO=self._rows_NX[torch.where(terminated_B, rows_B, rows_B + 1), self.layout.observation],
            terminated_B=terminated_B,
        )
