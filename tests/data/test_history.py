"""Histories that grow step by step, and mistakes in them."""

from typing import Any

import numpy as np
import pytest

from tap.data.history import History, check_histories


def history(steps: int, remembered: int) -> History:
    """After as many steps, of which step t has observation (t, t), action (-t,) and reward t."""
    grown = History.empty(2, 1)
    for t in range(steps):
        grown = grown.after(np.full(2, t), np.full(1, -t), float(t), remembered)
    return grown


@pytest.mark.parametrize(("remembered", "kept"), [(10, [0, 1, 2, 3]), (3, [1, 2, 3]), (0, [])])
def test_a_history_keeps_the_last_steps_and_all_rewards(remembered: int, kept: list[int]) -> None:
    grown = history(4, remembered)
    np.testing.assert_array_equal(grown.observations, np.array([[t, t] for t in kept]).reshape(-1, 2))
    np.testing.assert_array_equal(grown.actions, -np.array(kept).reshape(-1, 1))
    np.testing.assert_array_equal(grown.rewards, [0, 1, 2, 3])


def test_what_a_policy_needs_is_enough() -> None:
    check_histories([History.empty(2, 1), history(2, 3), history(5, 3), history(5, 10)], 4, 2, 1, remembered_steps=3)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"observations": np.zeros((3, 4))}, r"the observations of history 1 have shape \(3, 4\); this policy needs \(t, 2\)"),
        ({"actions": np.zeros(3)}, r"the actions of history 1 have shape \(3,\); this policy needs \(t, 1\)"),
        ({"rewards": np.zeros((3, 1))}, r"the rewards of history 1 have shape \(3, 1\); this policy needs \(t,\)"),
        ({"rewards": np.array([0, np.nan, 0])}, "the rewards of history 1 contain values that are not finite in float32"),
        ({"actions": np.full((3, 1), 1e39)}, "the actions of history 1 contain values that are not finite in float32"),
        ({"actions": np.zeros((2, 1))}, "history 1 has 3 observations, 2 actions and 3 rewards: send the rewards of all"),
        ({"rewards": np.zeros(2)}, "history 1 has 3 observations, 3 actions and 2 rewards"),
        (
            {"observations": np.zeros((1, 2)), "actions": np.zeros((1, 1)), "rewards": np.zeros(9)},
            "observations and actions at least of the last 3",
        ),
    ],
)
def test_a_mistake_is_named(changes: dict[str, Any], sentence: str) -> None:
    wrong = History(**{"observations": np.zeros((3, 2)), "actions": np.zeros((3, 1)), "rewards": np.zeros(3)} | changes)
    with pytest.raises(ValueError, match=sentence):
        check_histories([History.empty(2, 1), wrong], 2, 2, 1, remembered_steps=3)


def test_each_observation_has_one() -> None:
    with pytest.raises(ValueError, match="there are 1 histories for 2 observations: send one for each"):
        check_histories([History.empty(2, 1)], 2, 2, 1, remembered_steps=3)
