from typing import Any

import numpy as np
import pytest
from recordings import Data, fetch, table

from tap.data.action_bounds import unit_bounds, with_params


@pytest.mark.parametrize(
    ("params", "low", "high"),
    [
        ({}, [-1, -1], [1, 1]),
        ({"action_low": 0.0}, [0, 0], [1, 1]),
        ({"action_low": [None, -3], "action_high": [50, None]}, [-np.inf, -3], [50, np.inf]),
    ],
)
def test_params_override_bounds(params: dict[str, Any], low: list[float], high: list[float]) -> None:
    np.testing.assert_array_equal(with_params(unit_bounds(2), fetch(**params), "mine"), [low, high])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"action_low": [0.0]}, r"datasets\.mine\.fetch\.action_low has 1 values, but actions have 2 dimensions: list 2"),
        (
            {"action_low": [0.0, 2.0]},
            r"datasets\.mine\.fetch: the bounds of action dimension 1 are 2 and 1: correct action_low",
        ),
    ],
)
def test_bounds_that_make_no_sense_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_params(unit_bounds(2), fetch(**params), "mine")


def wide() -> dict[str, Any]:
    columns = table([20], terminal=[True], timeout=[False])
    columns["actions"] = columns["actions"] * [20, 1] + [25, 0]  # within [5, 45] and [-1, 1]
    columns["actions"][[3, 7], 0] = [60, -10]
    return columns


def test_actions_are_counted_and_clipped_by_one_sided_bounds_of_each_dimension(data: Data) -> None:
    bounds = {"action_low": [None, -1.0], "action_high": [50.0, None]}
    episodes, report = data.load(wide(), **bounds)
    assert report["actions_out_of_range"] == 1 and report["action_low"] == [None, -1] and report["action_high"] == [50, None]
    assert any(each.endswith("are kept: fetch.clip_actions would clip them") for each in report["warnings"])
    clipped, _ = data.load(wide(), clip_actions=True, **bounds)
    expected = episodes.actions.copy()
    expected[3, 0] = 50
    np.testing.assert_array_equal(clipped.actions, expected)


def test_no_hint_would_clip_actions_to_bounds_that_nobody_stated(data: Data) -> None:
    """The first word of the id selects D4RL's locomotion suite, but the data is another robot's."""
    _, report = data.load(wide(), "ant-arms", max_episode_steps=1000)
    (warning,) = [each for each in report["warnings"] if "actions" in each]
    assert warning.endswith("and are kept")
