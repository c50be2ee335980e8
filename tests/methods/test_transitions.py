"""Transitions against rows written by hand."""

import numpy as np
import pytest
import torch

from tap.data.episodes import Episodes, Selection
from tap.data.sampling import return_weights
from tap.data.windows import fit_normalizer
from tap.methods.transitions import WINDOWS, Transitions, reward_scale
from tap.settings import RewardParams

# Episodes: 3 rows, terminated; 2 rows, truncated; 1 row, truncated; 1 row, terminated.
EPISODES = Episodes(
    np.arange(7, dtype=np.float32)[:, None],
    10 + np.arange(7, dtype=np.float32)[:, None],
    np.array([1, 2, 3, 4, 5, 6, 7], np.float32),
    np.array([0, 0, 1, 0, 0, 0, 1], bool),
    np.array([0, 3, 5, 6, 7]),
)


def transitions(indices: list[int], rewards: RewardParams, scale: float = 1.0) -> list[tuple[float, ...]]:
    """(s, a, r, s', terminated) of all transitions, s and a in raw units."""
    some = Selection(EPISODES, np.array(indices))
    normalizer = fit_normalizer(some, WINDOWS)
    found = Transitions(some, normalizer, rewards, scale, torch.device("cpu"))
    batch = found.batch(torch.arange(len(found)))
    observation, following = (
        normalizer.denormalize(each, slice(0, 1))[:, 0] for each in (batch.observation_BO, batch.next_observation_BO)
    )
    action = normalizer.denormalize(batch.action_BA, slice(1, 2))[:, 0]
    columns = (observation, action, batch.reward_B, following, batch.terminated_B.float())
    return [tuple(round(float(value), 4) for value in row) for row in zip(*columns, strict=True)]


def test_a_truncated_episodes_last_row_has_no_successor_and_is_left_out() -> None:
    assert transitions([0, 1, 2, 3], RewardParams(shift=0, return_range=None)) == [
        (0, 10, 1, 1, 0),
        (1, 11, 2, 2, 0),
        (2, 12, 3, 2, 1),  # the end: whatever follows has no value
        (3, 13, 4, 4, 0),
        (6, 16, 7, 6, 1),
    ]


def test_episodes_that_are_not_selected_are_left_out_and_rewards_are_shifted_and_scaled() -> None:
    assert transitions([1, 3], RewardParams(shift=-1, return_range=None), scale=2) == [(3, 13, 6, 4, 0), (6, 16, 12, 6, 1)]


def test_rewards_are_scaled_by_the_range_of_returns() -> None:
    scaled = RewardParams(shift=0, return_range=1000)
    assert reward_scale(Selection(EPISODES, np.array([0, 1, 3])), scaled) == pytest.approx(1000 / 3)  # returns 6, 9, 7
    assert reward_scale(Selection(EPISODES, np.array([0])), scaled) == 1
    assert reward_scale(Selection(EPISODES, np.array([0, 1])), RewardParams(shift=0, return_range=None)) == 1


def drawn(indices: list[int], effective_share: float) -> list[float]:
    """How often each transition is drawn, as a share."""
    some = Selection(EPISODES, np.array(indices))
    found = Transitions(some, fit_normalizer(some, WINDOWS), RewardParams(shift=0, return_range=None), 1, torch.device("cpu"))
    indices_B = found.sampler(effective_share)(50_000, torch.Generator().manual_seed(0))
    return (torch.bincount(indices_B, minlength=len(found)) / len(indices_B)).tolist()


def test_transitions_are_drawn_alike() -> None:
    assert drawn([0, 1, 2, 3], effective_share=1) == pytest.approx([0.2] * 5, abs=0.008)


def test_transitions_of_episodes_with_high_returns_are_drawn_more_often() -> None:
    # Returns 6, 9 and 7, and 6 of an episode without a transition, which has no part in the temperature.
    shares = drawn([0, 1, 2, 3], effective_share=0.6)
    weights = return_weights(np.array([6.0, 9, 7]), np.array([3, 1, 1]), 0.6)
    expected = np.repeat(weights, [3, 1, 1])
    assert shares == pytest.approx((expected / expected.sum()).tolist(), abs=0.008)
    assert shares[3] > shares[4] > shares[0]
