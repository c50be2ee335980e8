"""The bootstrap against all possible resamples, against binomial quantiles, and on scores that show no difference."""

from itertools import product

import numpy as np
import pytest
from scipy.stats import binom

from tap.evaluation import bootstrap
from tap.evaluation.bootstrap import difference


def every_resampled_mean(scores_SE: np.ndarray) -> list[float]:
    """The mean of each possible resample, all equally likely, by plain loops."""
    seeds, episodes = scores_SE.shape
    means = []
    for seed_choice in product(range(seeds), repeat=seeds):
        for episode_choice in product(range(episodes), repeat=seeds * episodes):
            total = 0.0
            for place, seed in enumerate(seed_choice):
                for episode in episode_choice[place * episodes : (place + 1) * episodes]:
                    total += scores_SE[seed, episode]
            means.append(total / (seeds * episodes))
    return means


def test_the_interval_is_that_of_all_possible_resamples() -> None:
    rng = np.random.default_rng(1)
    new, old = rng.normal(3, 5, (2, 2)), rng.normal(0, 5, (3, 1))
    every = np.subtract.outer(every_resampled_mean(new), every_resampled_mean(old)).ravel()
    found = difference(new, old)
    assert found.mean == pytest.approx(new.mean() - old.mean())
    # The exact distribution has steps, so compare the share of resamples below each bound.
    assert np.mean(every < found.low) <= 0.03 and np.mean(every <= found.low) >= 0.02
    assert np.mean(every < found.high) <= 0.98 and np.mean(every <= found.high) >= 0.97


@pytest.mark.parametrize("episodes", [1, 20])
def test_with_seeds_that_score_0_or_1_the_interval_is_the_binomials(episodes: int) -> None:
    seeds = np.repeat([[0.0], [1.0]] * 10, episodes, axis=1)  # more equal episodes add no information
    found = difference(seeds, np.zeros((1, 1)))
    expected = binom.ppf([0.025, 0.975], 20, 0.5) / 20
    assert (found.low, found.high) == pytest.approx(tuple(expected))


def test_a_single_seed_leaves_the_interval_over_its_episodes() -> None:
    scores = np.random.default_rng(2).normal(50, 10, (1, 400))
    found = difference(scores, np.zeros((1, 5)))
    half = 1.96 * scores.std() / np.sqrt(400)  # by the central limit theorem
    assert (found.low, found.high) == pytest.approx((scores.mean() - half, scores.mean() + half), abs=0.15)


def test_many_episodes_of_few_seeds_do_not_hide_that_the_seeds_differ() -> None:
    """A bootstrap over pooled episodes would find a difference that two of the four seeds do not show."""
    rng = np.random.default_rng(3)
    new = np.array([[70.0], [70.0], [40.0], [40.0]]) + rng.normal(0, 1, (4, 100))
    old = np.array([[50.0], [52.0], [48.0], [50.0]]) + rng.normal(0, 1, (4, 100))
    naive = 1.96 * np.sqrt(new.var() / new.size + old.var() / old.size)
    found = difference(new, old)
    assert found.mean - naive > 0 and found.low < 0 < found.high


def test_equal_scores_give_equal_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    new, old = np.random.default_rng(4).normal(size=(2, 3, 10))
    assert difference(new, old) == difference(new, old)
    first = difference(new, old)
    monkeypatch.setattr(bootstrap, "GENERATOR_SEED", 1)  # another generator gives nearly the same
    second = difference(new, old)
    assert first != second and (first.low, first.high) == pytest.approx((second.low, second.high), abs=0.03)


def test_a_difference_in_words() -> None:
    assert str(bootstrap.Difference(3.14159, -2.0, 8.34567)) == "difference 3.142, 95 % interval -2 to 8.346"
