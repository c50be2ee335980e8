import numpy as np
import pytest
import torch
from conftest import random_episodes

from tap.data.sampling import WindowSampler, by_return, return_weights


def test_windows_are_drawn_in_proportion_to_their_episodes_weights() -> None:
    lengths, weights = np.array([2, 1, 5]), np.array([1.0, 6.0, 0.4])
    rows = WindowSampler(lengths, weights)(100_000, torch.Generator().manual_seed(0))
    expected = np.repeat(weights, lengths) / (weights * lengths).sum()
    np.testing.assert_allclose(np.bincount(rows, minlength=8) / 100_000, expected, atol=0.005)


def test_equal_weights_are_a_plain_uniform_sample() -> None:
    for weights in (None, np.array([0.3, 0.3])):
        rows = WindowSampler(np.array([4, 6]), weights)(50, torch.Generator().manual_seed(1))
        assert torch.equal(rows, torch.randint(10, (50,), generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_the_effective_sample_is_the_wanted_share_in_any_unit_of_return(scale: float) -> None:
    rng = np.random.default_rng(0)
    returns, lengths = scale * rng.normal(size=200) - 5 * scale, rng.integers(1, 100, 200)
    for share in (0.9, 0.5, 0.25):
        weights = return_weights(returns, lengths, share)
        per_window = np.repeat(weights, lengths)
        assert per_window.sum() ** 2 / np.square(per_window).sum() == pytest.approx(share * lengths.sum(), rel=1e-3)
        assert weights.max() == 1
        # ln of a weight is linear in the return: the episode with the highest one weighs most
        slopes = np.log(weights[1:] / weights[0]) / (returns[1:] - returns[0])
        np.testing.assert_allclose(slopes, slopes[0], rtol=1e-6)


def test_two_returns_by_hand() -> None:
    # One of four equally long episodes returns 1, the others 0. With weights 1 and w, (1 + 3w)^2 / (1 + 3w^2) = 2
    # where 3w^2 + 6w = 1: w = 2 / sqrt(3) - 1.
    weights = return_weights(np.array([0.0, 1.0, 0.0, 0.0]), np.full(4, 10), 0.5)
    other = 2 / 3**0.5 - 1
    np.testing.assert_allclose(weights, [other, 1, other, other], rtol=1e-6)


def test_episodes_that_are_about_equally_good_are_drawn_about_alike() -> None:
    # Half of the episodes return 0, half 99 to 101: a tenth of them would be a choice among equals.
    returns = np.concatenate([np.zeros(50), np.linspace(99, 101, 50)])
    weights = return_weights(returns, np.full(100, 10), 0.1)
    np.testing.assert_allclose(weights, np.exp((returns - 101) / (0.5 * returns.std())), rtol=1e-6)
    assert weights[50] > 0.9 and weights[0] < 0.02


def test_equal_returns_and_a_single_episode_are_drawn_alike() -> None:
    assert return_weights(np.full(3, 7.0), np.array([1, 2, 3]), 0.25).tolist() == [1, 1, 1]
    training, _ = random_episodes([5], 2, 1).split(0.0, np.random.default_rng(0))
    assert by_return(training, 0.25).weights_E is None


def test_returns_are_those_of_the_training_episodes() -> None:
    episodes = random_episodes([5, 5, 5, 5, 5, 5], 2, 1)
    training, _ = episodes.split(0.34, np.random.default_rng(3))
    weights = by_return(training, 0.3).weights_E
    assert weights is not None
    assert np.argmax(weights) == np.argmax(episodes.returns[training.indices])
    assert by_return(training, 1.0).weights_E is None
