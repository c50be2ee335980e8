"""Action errors on held-out episodes, against plain loops."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from conftest import random_episodes

from tap.data.action_bounds import no_bounds
from tap.data.episodes import Episodes, Selection
from tap.data.history import History
from tap.evaluation import held_out
from tap.evaluation.held_out import held_out_errors
from tap.methods.policy import Action
from tap.planning.policy import Policy


class Linear:
    """Plans of H actions that are a function of the observation alone."""

    def __init__(self, horizon: int, action_dim: int, scale: float = 1.0) -> None:
        self.horizon, self.action_dim, self.scale = horizon, action_dim, scale

    def action(self, observation: np.ndarray, ahead: int) -> np.ndarray:
        return np.asarray(self.scale * np.sin(observation[: self.action_dim] + ahead))

    def plan(self, observations: np.ndarray, generators: Sequence[torch.Generator]) -> Action:
        assert len(generators) == len(observations)
        plans = [[self.action(each, ahead) for ahead in range(self.horizon)] for each in observations]
        return Action(np.array(plans).reshape(len(observations), self.horizon, self.action_dim))


def by_loops(policy: Linear, episodes: Episodes, chosen: list[int], low: float = -np.inf) -> dict[str, list[list[float]]]:
    """Errors as shares of the variance, by episode and steps ahead, with one dimension after another."""
    variance = episodes.actions.astype(float).var(axis=0)
    found: dict[str, list[list[float]]] = {"policy": [], "hold": []}
    for index in chosen:
        rows = range(episodes.offsets[index], episodes.offsets[index + 1])
        if len(rows) < 2:
            continue
        for name in found:
            by_step = []
            for ahead in range(policy.horizon):
                shares = []
                for row in rows[1:]:
                    if row + ahead not in rows:
                        continue
                    for dim in range(episodes.action_dim):
                        planned = max(policy.action(episodes.observations[row], ahead)[dim], low)
                        guess = planned if name == "policy" else episodes.actions[row - 1, dim]
                        shares.append((guess - episodes.actions[row + ahead, dim]) ** 2 / variance[dim])
                by_step.append(float(np.mean(shares)) if shares else np.nan)
            found[name].append(by_step)
    return found


@pytest.mark.parametrize("horizon", [1, 4])
def test_errors_are_those_of_plain_loops(horizon: int) -> None:
    episodes = random_episodes([9, 3, 1, 12, 6], observation_dim=5, action_dim=3)
    chosen, policy = [1, 2, 3], Linear(horizon, 3)
    low = np.full(3, -0.25, np.float32)
    found = held_out_errors(policy, Selection(episodes, np.array(chosen)), (low, np.full(3, np.inf, np.float32)), 0)
    expected = by_loops(policy, episodes, chosen, low=-0.25)
    np.testing.assert_allclose(found.shares(found.errors), expected["policy"], rtol=1e-6)
    np.testing.assert_allclose(found.shares(found.hold_errors), expected["hold"], rtol=1e-6)
    summary = found.summarize()
    assert (summary["episodes"], summary["decisions"]) == (2, 2 + 11)  # one episode has no action to hold
    assert summary["action_error"] == pytest.approx(np.mean([each[0] for each in expected["policy"]]))
    assert summary["error_ahead"] == pytest.approx(np.nanmean(expected["policy"], axis=0).tolist())
    assert summary["scores"] == pytest.approx([each[0] for each in expected["policy"]])
    shares = np.square(np.array(summary["rmse"]) / summary["std"]).mean(axis=1)
    assert shares == pytest.approx(summary["error_ahead"])
    assert np.square(np.array(summary["hold_rmse"]) / summary["std"]).mean(axis=1) == pytest.approx(summary["hold_error_ahead"])


def test_an_action_that_never_changes_has_no_share() -> None:
    episodes = random_episodes([9, 5], observation_dim=5, action_dim=3)
    episodes.actions[:, 1] = 0.5
    found = held_out_errors(Linear(1, 3), Selection(episodes, np.array([0])), no_bounds(3), 0)
    varying = found.errors[0, 0, [0, 2]] / episodes.actions[:, [0, 2]].astype(float).var(axis=0)
    assert found.summarize()["action_error"] == pytest.approx(varying.mean())
    episodes.actions[:] = 0.5
    with pytest.raises(ValueError, match="all recorded actions are the same"):
        held_out_errors(Linear(1, 3), Selection(episodes, np.array([0])), no_bounds(3), 0)


def test_steps_that_no_episode_has_ahead_are_left_out() -> None:
    episodes = random_episodes([4, 3], observation_dim=5, action_dim=3)
    found = held_out_errors(Linear(9, 3), Selection(episodes, np.array([0, 1])), no_bounds(3), 0)
    assert found.errors.shape == (2, 3, 3)  # from step 1 of 4 to step 3
    assert np.isnan(found.errors[1, 2]).all() and np.isfinite(found.errors[0]).all()


def test_single_steps_are_refused() -> None:
    episodes = random_episodes([1, 5], observation_dim=5, action_dim=3)
    with pytest.raises(ValueError, match="single step"):
        held_out_errors(Linear(1, 3), Selection(episodes, np.array([0])), no_bounds(3), 0)


def test_many_steps_are_spaced_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "MOST_DECISIONS", 10)
    episodes = random_episodes([31, 4], observation_dim=5, action_dim=3)
    policy = Linear(1, 3)
    found = held_out_errors(policy, Selection(episodes, np.array([0, 1])), no_bounds(3), 0)
    rows = [[*range(1, 31, 4)], [32]]
    squares = [[(policy.action(episodes.observations[r], 0) - episodes.actions[r]) ** 2 for r in each] for each in rows]
    assert found.decisions == 9
    np.testing.assert_allclose(found.errors[:, 0], [np.mean(each, axis=0) for each in squares], rtol=1e-6)


@dataclass
class Recalling(Linear):
    """Repeats the action of two steps ago, and checks the rewards."""

    rewards: np.ndarray
    remembered_steps: int = 2

    def __post_init__(self) -> None:
        super().__init__(1, 3)

    def check(self, observations: np.ndarray, histories: Sequence[History] | None = None) -> None:
        raise NotImplementedError

    def plan(  # type: ignore[override]
        self, observations: np.ndarray, generators: Sequence[torch.Generator], histories: Sequence[History] | None = None
    ) -> Action:
        if histories is None:
            return Action(np.zeros((len(observations), 1, 3)))
        for history in histories:
            np.testing.assert_array_equal(history.rewards, self.rewards[: len(history.rewards)])
        return Action(np.stack([each.actions[0] if len(each.actions) == 2 else np.zeros(3) for each in histories])[:, None])


def test_a_policy_that_remembers_gets_the_steps_before() -> None:
    episodes = random_episodes([3, 8], observation_dim=5, action_dim=3)
    recalling = Recalling(episodes.rewards[3:])
    found = held_out_errors(recalling, Selection(episodes, np.array([1])), no_bounds(3), 0)
    actions = episodes.actions[3:]
    guesses = [np.zeros(3), *actions[:6]]
    np.testing.assert_allclose(
        found.errors[0, 0], np.mean([(guess - actions[t + 1]) ** 2 for t, guess in enumerate(guesses)], axis=0), rtol=1e-6
    )


def test_a_planners_plans_are_compared_as_far_as_they_go(tiny_policy: Policy) -> None:
    """Beside the tiny policy's own plan from one state."""
    episodes = random_episodes([2, 9], observation_dim=11, action_dim=3)
    found = held_out_errors(tiny_policy, Selection(episodes, np.array([0])), no_bounds(3), 7)
    generator = held_out.episode_generator(7, 0)
    actions = tiny_policy.plan(episodes.observations[1:2], [generator]).actions
    np.testing.assert_allclose(found.errors, (actions[:, :1] - episodes.actions[1]) ** 2, rtol=1e-4)
