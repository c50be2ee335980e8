"""Compares the scores of two recipes by a hierarchical bootstrap over training seeds, then over episodes.

Scores vary more between seeds than between episodes, and the episodes of one seed are not independent evidence about a recipe:
ten episodes of three seeds are three observations, not thirty. Each resample therefore takes S of the S seeds with replacement,
and for each of them E of its E episodes, again with replacement. The two recipes are resampled independently.

The interval reflects only the given seeds, so it is too narrow when there are few. For two equal recipes it should lie above 0
in 2.5 % of comparisons. In simulations (normal scores, std 8 over seeds and 10 over episodes, 10 episodes) it does so in 5 %
with five seeds per recipe, 6 % with three and 9 % with two. With a single seed the interval covers only the episodes of that
policy; as a test of recipes it would be wrong in 27 %.

Shapes: R resamples, S training seeds, E episodes.
"""

from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95
GENERATOR_SEED = 0  # fixed: equal scores give equal decisions


@dataclass(frozen=True)
class Difference:
    """A difference of mean scores, and its bootstrap interval at the level `CONFIDENCE`."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"difference {self.mean:.4g}, {CONFIDENCE:.0%} interval {self.low:.4g} to {self.high:.4g}".replace("%", " %")


def difference(scores_SE: np.ndarray, other_SE: np.ndarray) -> Difference:
    """Mean of `scores_SE` minus mean of `other_SE`. All scores are finite; the two may differ in seeds and episodes."""
    rng = np.random.default_rng(GENERATOR_SEED)
    means_R, others_R = _resampled_means(scores_SE, rng), _resampled_means(other_SE, rng)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means_R - others_R, [tail, 1 - tail])
    return Difference(float(scores_SE.mean() - other_SE.mean()), float(low), float(high))


def _resampled_means(scores_SE: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    seeds, episodes = scores_SE.shape
    seeds_RS = rng.integers(seeds, size=(RESAMPLES, seeds))
    episodes_RSE = rng.integers(episodes, size=(RESAMPLES, seeds, episodes))
    return np.asarray(scores_SE[seeds_RS[:, :, None], episodes_RSE].mean(axis=(1, 2)))
