"""Which windows an update is trained on: all alike, or more of those from episodes with high returns.

Shapes: E episodes, B batch.
"""

import numpy as np
import torch
from torch import Tensor

from tap.data.episodes import Selection

BISECTIONS = 60  # of the temperature, on a logarithmic scale
LEAST_SPREAD = 0.5  # the temperature's least value, in standard deviations of the returns


class WindowSampler:
    """Draws windows, one of which starts at each row of E episodes, with replacement: an episode's are all alike.

    `weights_E` are the relative probabilities of the episodes' windows; None is for equal ones.
    """

    def __init__(self, lengths_E: np.ndarray, weights_E: np.ndarray | None = None) -> None:
        self.size = int(lengths_E.sum())
        self.weights_E = None if weights_E is None or np.ptp(weights_E) == 0 else weights_E
        if self.weights_E is not None:
            shares_E = self.weights_E * lengths_E / (self.weights_E * lengths_E).sum()
            self._ends_E = torch.from_numpy(np.cumsum(lengths_E))
            self._lengths_E = torch.from_numpy(np.asarray(lengths_E))
            self._cumulative_E = torch.from_numpy(np.cumsum(shares_E))

    def __call__(self, count: int, generator: torch.Generator) -> Tensor:
        """The first rows (count,) int64 of as many windows."""
        if self.weights_E is None:
            return torch.randint(self.size, (count,), generator=generator)
        episode_B, place_B = torch.rand(2, count, dtype=torch.float64, generator=generator)
        episodes_B = torch.searchsorted(self._cumulative_E, episode_B, right=True).clamp(max=len(self._lengths_E) - 1)
        lengths_B = self._lengths_E[episodes_B]
        rows_B: Tensor = self._ends_E[episodes_B] - lengths_B + (place_B * lengths_B).long()
        return rows_B


def by_return(training: Selection, effective_share: float) -> WindowSampler:
    """A sampler that draws an episode's windows in proportion to exp(return / alpha) (Hong et al. 2023, ICLR).

    alpha is such that Kish's effective sample size, (sum w)^2 / sum w^2 over windows, is `effective_share` of all windows, or
    as near as the episodes allow. So it needs no unit of return. But it is at least LEAST_SPREAD standard deviations of the
    returns: where more episodes than the share are about equally good, all of them are used.
    """
    lengths_E = training.lengths
    return WindowSampler(lengths_E, return_weights(training.episodes.returns[training.indices], lengths_E, effective_share))


def return_weights(returns_E: np.ndarray, lengths_E: np.ndarray, effective_share: float) -> np.ndarray:
    """exp(return / alpha) of each episode (E,), the largest 1, with alpha as in `by_return`."""
    if effective_share == 1 or len(returns_E) < 2:
        return np.ones(len(returns_E))
    gaps_E = returns_E - returns_E.max()
    spread = float(-gaps_E.min())
    if spread == 0:
        return np.ones(len(gaps_E))
    # Of ln(alpha); the effective size grows with alpha.
    low, high = np.log(LEAST_SPREAD * returns_E.std()), np.log(1e4 * spread)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        weights_E = np.exp(gaps_E / np.exp(middle))
        effective = (weights_E * lengths_E).sum() ** 2 / (weights_E**2 * lengths_E).sum()
        low, high = (low, middle) if effective > effective_share * lengths_E.sum() else (middle, high)
    return np.asarray(np.exp(gaps_E / np.exp(low)))
