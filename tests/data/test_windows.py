import errno
import itertools
import json
import os

import numpy as np
import pytest
import torch
from conftest import random_episodes
from hypothesis import given
from hypothesis import strategies as st

from tap.data.episodes import Episodes
from tap.data.windows import Layout, Normalizer, Windows, fit_normalizer, penalized_rewards, returns_to_go, transitions
from tap.settings import WindowParams

PARAMS = WindowParams(length=4, discount=0.9, termination_penalty=None, bootstrap_truncated=False, normalize=True)


@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6),
    discount=st.sampled_from([0.5, 0.99, 1.0]),
    seed=st.integers(0, 1000),
)
def test_returns_to_go_equals_a_reverse_loop(lengths: list[int], discount: float, seed: int) -> None:
    rewards = np.random.default_rng(seed).normal(size=sum(lengths))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    expected = np.empty_like(rewards)
    for first, end in itertools.pairwise(offsets):
        ahead = 0.0
        for row in reversed(range(first, end)):
            ahead = expected[row] = rewards[row] + discount * ahead
    np.testing.assert_allclose(returns_to_go(rewards, offsets, discount), expected, rtol=1e-10, atol=1e-12)


def test_returns_to_go_by_hand_includes_the_present_reward() -> None:
    rewards = np.array([1.0, 2.0, 3.0, 10.0])
    np.testing.assert_allclose(returns_to_go(rewards, np.array([0, 3, 4]), 0.5), [1 + 1 + 0.75, 2 + 1.5, 3, 10])


def test_the_penalty_replaces_the_reward_of_true_terminals_only() -> None:
    episodes = random_episodes([3, 2, 4], 2, 1)  # terminals at rows 2 and 8; row 4 is a timeout
    rewards = penalized_rewards(episodes, -100.0)
    assert rewards[[2, 8]].tolist() == [-100.0, -100.0]
    others = [0, 1, 3, 4, 5, 6, 7]
    np.testing.assert_array_equal(rewards[others], episodes.rewards[others])


def test_windows_equal_a_plain_loop_over_every_start() -> None:
    episodes = random_episodes([3, 1, 6], 2, 1)
    normalizer = fit_normalizer(episodes, PARAMS)
    windows = Windows(episodes, PARAMS, normalizer, torch.device("cpu"))
    tokens, valid = windows.gather(torch.arange(len(windows)))
    raw = transitions(episodes, PARAMS)
    for start in range(len(windows)):
        end = next(int(e) for e in episodes.offsets[1:] if e > start)
        for step in range(PARAMS.length):
            inside = start + step < end
            content = raw[start + step] if inside else normalizer.mean
            np.testing.assert_allclose(
                tokens[start, step, :-1], (content - normalizer.mean) / normalizer.std, rtol=1e-5, atol=1e-6
            )
            assert tokens[start, step, -1] == (0.0 if inside else 1.0)
            assert valid[start, step] == inside


def test_a_full_disk_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    episodes = random_episodes([5], 2, 1)
    with pytest.raises(ValueError, match="no room for 100 bytes of training windows"):
        Windows(episodes, PARAMS, fit_normalizer(episodes, PARAMS), torch.device("cpu"))


def test_layout_names_every_column_once() -> None:
    layout = Layout(observation_dim=3, action_dim=2)
    columns = np.arange(layout.token_dim)
    named = [*columns[layout.observation], *columns[layout.action], layout.reward, layout.return_to_go, layout.end]
    assert named == columns.tolist()


def test_normalisation_is_reversible_and_keeps_the_unit_of_constant_dimensions() -> None:
    rng = np.random.default_rng(0)
    raw = np.stack([rng.normal(1e6, 3e4, 500), np.full(500, 0.7), rng.normal(0, 1e-3, 500)], axis=1).astype(np.float32)
    normalizer = Normalizer.fit([raw])
    normal = normalizer.normalize(torch.from_numpy(raw))
    np.testing.assert_allclose(normal.mean(0), [0, 0, 0], atol=1e-3)
    np.testing.assert_allclose(normal.std(0), [1, 0, 1], atol=1e-2)
    np.testing.assert_allclose(normalizer.denormalize(normal), raw, rtol=1e-6, atol=1e-9)
    # a constant dimension that moves a little at run time stays a little off
    assert normalizer.normalize(torch.tensor([[1e6, 0.8, 0.0]]))[0, 1] == pytest.approx(0.1, rel=1e-4)
    again = Normalizer.from_json(normalizer.to_json(), 3)
    np.testing.assert_array_equal(again.mean, normalizer.mean)
    np.testing.assert_array_equal(again.std, normalizer.std)
    np.testing.assert_array_equal(again.support_bounds(), normalizer.support_bounds())


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("shift", [0.0, -1.0])
def test_scale_and_shift_of_rewards_do_not_change_normalised_rewards(scale: float, shift: float) -> None:
    """Returns-to-go keep their normalised values under a scale; a shift adds what depends on the steps that are left."""
    episodes = random_episodes([8, 8], 2, 1)
    rewards = (scale * (episodes.rewards + shift)).astype(np.float32)
    changed = Episodes(episodes.observations, episodes.actions, rewards, episodes.terminals, episodes.offsets)
    same = slice(0, 5 if shift == 0 else 4)  # observations, action, reward, return-to-go
    normal = [fit_normalizer(e, PARAMS).normalize(torch.from_numpy(transitions(e, PARAMS))) for e in (episodes, changed)]
    torch.testing.assert_close(normal[0][:, same], normal[1][:, same], rtol=1e-3, atol=1e-4)
    stored = Normalizer.from_json(json.loads(json.dumps(fit_normalizer(changed, PARAMS).to_json())), 5)
    back = stored.denormalize(normal[1]).numpy()
    np.testing.assert_allclose(back[:, 3], rewards, rtol=1e-4, atol=1e-4 * scale)
    np.testing.assert_allclose(back[:, 4], returns_to_go(rewards, changed.offsets, 0.9), rtol=1e-4, atol=1e-4 * scale)


@pytest.mark.parametrize(("shift", "scale"), [(4.5e6, 64.0), (-(2.0**20), 8.0), (0.0, 1e-7), (3e-3, 1e-7)])
def test_windows_do_not_depend_on_where_zero_is_or_on_the_unit(shift: float, scale: float) -> None:
    """UTM metres, or a tiny unit: the same tokens, padding included, as of centred observations."""
    episodes = random_episodes([5, 3, 7], observation_dim=2, action_dim=1)
    observations = (scale * episodes.observations.astype(np.float64) + shift).astype(np.float32)
    centred = ((observations.astype(np.float64) - shift) / scale).astype(np.float32)  # with the same rounding
    tokens = []
    for values in (observations, centred):
        moved = Episodes(values, episodes.actions, episodes.rewards, episodes.terminals, episodes.offsets)
        windows = Windows(moved, PARAMS, fit_normalizer(moved, PARAMS), torch.device("cpu"))
        tokens.append(windows.gather(torch.arange(len(windows)))[0])
    torch.testing.assert_close(*tokens, rtol=0.01, atol=0.02)
    assert tokens[0][..., :-1].abs().max() < 5


def test_antmaze_trains_on_raw_values() -> None:
    episodes = random_episodes([5], 2, 1)
    normalizer = fit_normalizer(episodes, PARAMS.model_copy(update={"normalize": False}))
    value = torch.randn(3, 5)
    torch.testing.assert_close(normalizer.normalize(value), value)


def test_a_truncated_episode_is_worth_its_mean_reward_for_ever() -> None:
    episodes = random_episodes([4, 6], observation_dim=2, action_dim=1)  # the first ends, the second is truncated
    params = PARAMS.model_copy(update={"bootstrap_truncated": True})
    raw = transitions(episodes, params)
    reward, return_to_go = raw[:, 3], raw[:, 4]
    np.testing.assert_array_equal(reward, episodes.rewards)  # only returns go on
    endless = [*episodes.rewards[4:], *[episodes.rewards[4:].mean()] * 400]
    for t in range(6):
        assert return_to_go[4 + t] == pytest.approx(sum(0.9**i * r for i, r in enumerate(endless[t:])), abs=1e-4)
    np.testing.assert_array_equal(return_to_go[:4], transitions(episodes, PARAMS)[:4, 4])


def test_the_support_is_the_range_of_the_data_and_a_tenth_more_normalised_or_not() -> None:
    raw = np.array([[0.0, 5.0, -2.0], [10.0, 5.0, 2.0], [3.0, 5.0, 0.0]], np.float32)
    low, high = Normalizer.fit([raw]).support_bounds()
    np.testing.assert_allclose(low, [-1, 5, -2.4], rtol=1e-4)
    np.testing.assert_allclose(high, [11, 5, 2.4], rtol=1e-4)
    np.testing.assert_allclose(Normalizer.fit([raw]).support_bounds(slice(2, 3)), [[-2.4], [2.4]], rtol=1e-4)
    episodes = random_episodes([8, 8], 2, 1)
    bounds = [fit_normalizer(episodes, PARAMS.model_copy(update={"normalize": on})).support_bounds() for on in (True, False)]
    np.testing.assert_array_equal(*bounds)
    assert np.isinf(Normalizer.identity(3).support_bounds()).all()  # was fitted to nothing
