from typing import Any

import numpy as np
import pytest
from conftest import random_episodes
from recordings import Data, table
from scipy.stats import f_oneway

from tap.data import chunks, profile
from tap.data.catalog import lookup
from tap.data.episodes import Episodes
from tap.data.profile import Profile
from tap.data.recording import open_recording

KINDS = ("constant", "saturated", "jumping", "drifting")
NOTHING: dict[str, list[int]] = {kind: [] for kind in KINDS}


def profile_of(episodes: Episodes, timestamps: np.ndarray | None = None) -> Profile:
    return profile.profile(episodes.chunks(), episodes.lengths, timestamps, np.random.default_rng(0))


def smooth(episodes: int = 60, length: int = 50, dim: int = 5) -> Episodes:
    """Episodes without faults, that start anywhere: walks of small steps, and noisy actions."""
    columns = table([length] * episodes, terminal=[False] * episodes, timeout=[True] * episodes, dim=dim)
    offsets = np.arange(episodes + 1) * length
    return Episodes(columns["observations"], columns["actions"], columns["rewards"], columns["terminals"], offsets)


def found(profile: Profile) -> dict[str, list[int]]:
    """By kind, the dimensions of observations, then those of actions."""
    columns = (profile.observations, profile.actions)
    return {kind: np.flatnonzero(np.concatenate([getattr(each, kind) for each in columns])).tolist() for kind in KINDS}


@pytest.mark.parametrize("rows", [17, chunks.ROWS])
@pytest.mark.parametrize("block", [5, profile.BLOCK])
def test_statistics_are_those_of_all_rows_at_once(rows: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = random_episodes([7, 1, 12, 30, 2, 1], observation_dim=4, action_dim=2)
    episodes.observations[:, 1] = np.round(episodes.observations[:, 1]) + 1e6
    monkeypatch.setattr(chunks, "ROWS", rows)
    monkeypatch.setattr(profile, "BLOCK", block)
    result = profile_of(episodes)
    for statistics, values in (
        (result.observations, episodes.observations),
        (result.actions, episodes.actions),
        (result.rewards, episodes.rewards[:, None]),
    ):
        exact = values.astype(np.float64)
        np.testing.assert_allclose(statistics.mean, exact.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(statistics.std, exact.std(axis=0), rtol=1e-9)
        assert np.array_equal(statistics.min, exact.min(axis=0)) and np.array_equal(statistics.max, exact.max(axis=0))
        np.testing.assert_allclose(statistics.at_min, (values == values.min(axis=0)).mean(axis=0))
        np.testing.assert_allclose(statistics.at_max, (values == values.max(axis=0)).mean(axis=0))
        part = np.arange(53) * 10 // 53
        for tenth in range(10):
            np.testing.assert_allclose(statistics.part_mean[tenth], exact[part == tenth].mean(axis=0), rtol=1e-12)
            np.testing.assert_allclose(statistics.part_std[tenth], exact[part == tenth].std(axis=0), rtol=1e-9, atol=1e-9)
        steps = {
            (episode, step): np.abs(exact[first + step + 1] - exact[first + step])
            for episode, (first, end) in enumerate(zip(episodes.offsets, episodes.offsets[1:], strict=False))
            for step in range(end - first - 1)
        }
        assert np.array_equal(statistics.largest_step, np.max(list(steps.values()), axis=0))
        np.testing.assert_allclose(statistics.usual_step, np.quantile(list(steps.values()), 0.99, axis=0), rtol=1e-6)
        for dim, (episode, step) in enumerate(statistics.largest_at.T):
            assert steps[episode, step][dim] == statistics.largest_step[dim]
        assert np.array_equal(statistics.sample, values)  # in the file's order, while there are few
    np.testing.assert_allclose(
        result.returns, [part.sum() for part in np.split(episodes.rewards, episodes.offsets[1:-1])], 1e-5
    )
    assert result.terminated.tolist() == [True, False] * 3


def test_the_p_value_of_a_drift_is_that_of_scipys_analysis_of_variance() -> None:
    episodes = random_episodes([5, 3, 9] * 12, observation_dim=3, action_dim=1)
    means = np.array([part.mean(axis=0) for part in np.split(episodes.observations.astype(np.float64), episodes.offsets[1:-1])])
    groups = np.arange(36) * 10 // 36
    expected = f_oneway(*(means[groups == group] for group in range(10)), axis=0).pvalue
    np.testing.assert_allclose(profile_of(episodes).observations.chance, expected, rtol=1e-9)


def test_nothing_is_found_in_faultless_data() -> None:
    result = profile_of(smooth())
    assert found(result) == NOTHING
    assert (result.copies, result.repeated_rows, result.clock) == ([], 0, None)


def test_planted_faults_are_found_where_they_are() -> None:
    episodes = smooth()
    observations, actions = episodes.observations, episodes.actions
    observations[:, 0] = 2.5
    observations[:, 1] = observations[:, 1].clip(np.quantile(observations[:, 1], 0.07), None)
    observations[7 * 50 + 20 :, 2] += np.where(np.arange(len(observations) - 370) < 30, 5.0, 0.0)  # to the end of episode 7
    observations[:, 3] += np.linspace(0, 2000, len(observations))
    actions[:, 1] = actions[:, 1].clip(-0.8, None)
    result = profile_of(episodes)
    assert found(result) == {"constant": [0], "saturated": [1, 6], "jumping": [2], "drifting": [3]}
    assert result.observations.largest_at[:, 2].tolist() == [7, 19]
    assert result.actions.at_min[1] == np.mean(actions[:, 1] == np.float32(-0.8))


def test_a_flag_is_neither_saturated_nor_jumping() -> None:
    episodes = smooth()
    episodes.observations[:, 4] = np.arange(len(episodes.observations)) % 50 == 25  # changes in 4 % of the steps
    result = profile_of(episodes)
    assert found(result) == NOTHING
    assert result.observations.discrete.tolist() == [False] * 4 + [True]


def test_too_few_episodes_show_no_drift() -> None:
    episodes = smooth(episodes=19)
    episodes.observations[:, 0] += np.linspace(0, 2000, len(episodes.observations))
    assert found(profile_of(episodes))["drifting"] == []
    assert found(profile_of(smooth(episodes=1, length=3))) == NOTHING


def test_duplicates_are_counted_once() -> None:
    episodes = smooth()
    for array in (episodes.observations, episodes.actions, episodes.rewards):
        array[50 * 40 : 50 * 41] = array[50 * 3 : 50 * 4]  # episode 40 is episode 3
        array[50 * 9 + 10 : 50 * 9 + 13] = array[50 * 9 + 9]  # a recorder that stood still for three rows
    episodes.observations[50 * 20 : 50 * 21] = episodes.observations[50 * 5 : 50 * 6]  # with other actions
    result = profile_of(episodes)
    assert result.copies == [(40, 3)]
    assert result.repeated_rows == 3


@pytest.mark.parametrize("key", ["timestamps", "infos/timestamp"])
def test_gaps_in_timestamps_are_found_within_episodes_alone(data: Data, key: str) -> None:
    columns: dict[str, Any] = table([20, 30], terminal=[True, False], timeout=[False, True])
    times = np.concatenate([np.arange(20), 1000 + np.arange(30)]) / 30
    times[20 + 12 :] += 0.5
    times[8] = times[7]
    data.write(columns | {key: times})
    params = data.params("mine")
    with open_recording(data.path, lookup("mine", params), params) as recording:
        clock = profile.profile(
            recording.chunks(), recording.boundaries.lengths, recording.timestamps(), np.random.default_rng(0)
        ).clock
    assert clock is not None
    assert clock.usual == pytest.approx(1 / 30)
    assert clock.largest == pytest.approx(0.5 + 1 / 30)
    assert (clock.largest_at, clock.gaps, clock.backwards) == ((1, 11), 2, 1)


@pytest.mark.parametrize("times", [None, np.full(50, np.nan), np.zeros(49), np.zeros((50, 2)), np.array([b"x"] * 50)])
def test_what_is_no_time_of_each_row_is_not_read(data: Data, times: np.ndarray | None) -> None:
    data.write(table([20, 30], terminal=[True, False], timeout=[False, True]) | {"timestamps": times})
    params = data.params("mine")
    with open_recording(data.path, lookup("mine", params), params) as recording:
        assert recording.timestamps() is None
