"""Whether one recipe's scores are above another's: a hierarchical bootstrap, over training seeds, then over episodes.

Seeds are the larger source of chance, and episodes of one seed are no independent evidence about a recipe: ten episodes of
three seeds are three observations of it, not thirty. So each draw takes S of the S seeds with replacement, and of each of
these E of its E episodes, again with replacement. The two recipes are drawn independently.

Such an interval knows nothing but the seeds it is given, so few seeds make it too narrow. Between equal recipes it should lie
above 0 in 2.5 % of comparisons; simulated (normal scores, standard deviation 8 over seeds and 10 over episodes, 10 episodes) it
does in 5 % with five seeds a side, 6 % with three, 9 % with two. Of a single seed it only tells how that one policy would score
in other episodes: as a test of recipes it is wrong in 27 %.

Shapes: D draws, S training seeds, E episodes.
"""

from dataclasses import dataclass

import numpy as np

DRAWS = 10_000
CONFIDENCE = 0.95
GENERATOR_SEED = 0  # fixed: equal scores give equal decisions


@dataclass(frozen=True)
class Difference:
    """A difference of mean scores, and the interval that holds it with `CONFIDENCE`."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"difference {self.mean:.4g}, {CONFIDENCE:.0%} interval {self.low:.4g} to {self.high:.4g}".replace("%", " %")


def difference(scores_SE: np.ndarray, other_SE: np.ndarray) -> Difference:
    """How far the mean of `scores_SE` is above that of `other_SE`; the two may differ in seeds and episodes. All are finite."""
    rng = np.random.default_rng(GENERATOR_SEED)
    means_D, others_D = _resampled_means(scores_SE, rng), _resampled_means(other_SE, rng)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means_D - others_D, [tail, 1 - tail])
    return Difference(float(scores_SE.mean() - other_SE.mean()), float(low), float(high))


def _resampled_means(scores_SE: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    seeds, episodes = scores_SE.shape
    seeds_DS = rng.integers(seeds, size=(DRAWS, seeds))
    episodes_DSE = rng.integers(episodes, size=(DRAWS, seeds, episodes))
    return np.asarray(scores_SE[seeds_DS[:, :, None], episodes_DSE].mean(axis=(1, 2)))
